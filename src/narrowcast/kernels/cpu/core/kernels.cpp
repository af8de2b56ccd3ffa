// The operations on part of a row, as a table of functions. Compiled once per instruction set (NC_ISA).

#include "decode.h"

namespace {

// -- sums ----------------------------------------------------------------------------------------------------------------

constexpr int64_t SPAN = 1024;  // elements summed over all ranks before the next ones: four kilobytes of total

inline void add(const float* x, int64_t n, float* total) {
    for (int64_t i = 0; i < n; ++i) total[i] += x[i];
}

struct AddRank {
    const Spec& spec;
    const uint8_t* data;
    int64_t begin, count;
    float* total;

    template <int ELEMENT, int BITS>
    void call() const {
        auto done = [&](int64_t i, int64_t n, const float* x) {
            if (x != total + i) add(x, n, total + i);
        };
        dequantize_as<ELEMENT, BITS, true>(spec, data, begin, count, [&](int64_t i) { return total + i; }, done);
    }
    void wide() const {
        alignas(64) float buffer[SPAN];
        widen_row(spec, data, begin, count, buffer);
        add(buffer, count, total);
    }
};

// Calls f.template call<ELEMENT, BITS>() for what the spec names, or f.wide() for fp32, fp16 and bf16.
template <class F>
inline void dispatch(const Spec& spec, const F& f) {
    auto packed = [&](auto element) {
        with_bits(spec.bits, [&](auto bits) { f.template call<decltype(element)::value, decltype(bits)::value>(); });
    };
    switch (spec.element) {
        case INT: return packed(Constant<INT>());
        case AFFINE: return packed(Constant<AFFINE>());
        case LEVELS: return packed(Constant<LEVELS>());
        case SIGN: return f.template call<SIGN, 1>();
        case E4M3: return f.template call<E4M3, 8>();
        case E5M2: return f.template call<E5M2, 8>();
        default: return f.wide();
    }
}

// The fp32 sum of all ranks over [begin, begin + count), for count <= SPAN.
void sum_span(const Spec& spec, const uint8_t* data, int64_t stride, int64_t ranks, Floats own, int64_t own_rank,
              int64_t divisor, int64_t begin, int64_t count, float* total) {
    alignas(64) float buffer[SPAN];
    for (int64_t rank = 0; rank < ranks; ++rank) {
        bool exact = own.data && rank == own_rank;
        if (rank == 0 && !exact) {
            dispatch(spec, Decode{spec, data, begin, count, total, F32, begin});
        } else if (rank == 0) {
            std::memcpy(total, load(own, begin, count, buffer), size_t(count) * 4);
        } else if (exact) {
            add(load(own, begin, count, buffer), count, total);
        } else {
            dispatch(spec, AddRank{spec, data + rank * stride, begin, count, total});
        }
    }
    float by = float(divisor);
    if (divisor != 1) {
        for (int64_t i = 0; i < count; ++i) total[i] /= by;
    }
    for (int64_t i = 0; i < count; ++i) total[i] = canonical(total[i]);
}

// -- the table of operations ----------------------------------------------------------------------------------------------

void encode(const Spec& spec, Floats row, int64_t begin, int64_t count, uint8_t* out, uint64_t key) {
    dispatch(spec, EncodeBlocks{{spec, row, begin, count, Scaling{}, out, Dice{key}}});
}

void measure(const Spec& spec, Floats row, int64_t begin, int64_t count, Batch& batch, int64_t slot) {
    dispatch(spec, Measure{row, begin, count, batch, slot});
}

void settle(const Spec& spec, Batch& batch, int64_t block, int64_t blocks, int64_t last_count, uint8_t* out) {
    dispatch(spec, Settle{spec, batch, block, blocks, last_count, out});
}

void quantize(const Spec& spec, Floats row, int64_t begin, int64_t count, Scaling by, uint8_t* out, uint64_t key) {
    dispatch(spec, Quantize{{spec, row, begin, count, by, out, Dice{key}}});
}

void quantize_batch(const Spec& spec, Floats row, int64_t begin, int64_t count, const Batch& batch, uint8_t* out) {
    dispatch(spec, QuantizeBatch{{spec, row, begin, count, Scaling{}, out, Dice{0}}, batch});
}

void decode(const Spec& spec, const uint8_t* data, int64_t begin, int64_t count, void* out, int32_t dtype) {
    dispatch(spec, Decode{spec, data, begin, count, out, dtype, 0});
}

void decode_sum(const Spec& spec, const uint8_t* data, int64_t stride, int64_t ranks, Floats own, int64_t own_rank,
                int64_t divisor, int64_t begin, int64_t count, void* out, int32_t dtype) {
    alignas(64) float total[SPAN];
    for (int64_t i = begin; i < begin + count; i += SPAN) {
        int64_t n = std::min(SPAN, begin + count - i);
        sum_span(spec, data, stride, ranks, own, own_rank, divisor, i, n, total);
        store(total, out, dtype, i, n);
    }
}

void decode_sum_encode(const Spec& spec, const uint8_t* data, int64_t stride, int64_t ranks, Floats own,
                       int64_t own_rank, int64_t divisor, int64_t begin, int64_t count, float* scratch, uint8_t* out,
                       uint64_t key) {
    for (int64_t i = 0; i < count; i += SPAN) {
        sum_span(spec, data, stride, ranks, own, own_rank, divisor, begin + i, std::min(SPAN, count - i), scratch + i);
    }
    Floats summed{scratch, F32, begin};
    if (spec.scale == NO_SCALE) quantize(spec, summed, begin, count, Scaling{1.0f, 1.0f, 0}, out, key);
    else encode(spec, summed, begin, count, out, key);
}

}  // namespace

namespace nc {
const Kernels NC_NAMED_BY_ISA(kernels) = {::encode, ::measure, ::settle, ::quantize, ::quantize_batch,
                                          ::decode, ::decode_sum, ::decode_sum_encode};
}  // namespace nc
