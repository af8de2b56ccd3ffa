// The loops over a row: batches of groups, groups, pieces of up to 64 elements. Compiled once per instruction set (NC_ISA).
//
// Pieces start at multiples of 8 elements, so their codes start at a whole byte. What is left over at the end of a group
// goes through zero-padded copies: nothing outside a row is read or written.

#include "scales.h"

// Into the loop over groups, so that what all groups share is set up once.
#define NC_INLINE __attribute__((always_inline)) inline

namespace {

constexpr int64_t BATCH = 2048;  // elements that are measured, then quantized while they are in the first-level cache

constexpr int64_t FETCH = 2048;  // bytes that decoding asks for ahead: ranks are read in turns, too short for the hardware

// -- encoding ------------------------------------------------------------------------------------------------------------

template <int ELEMENT, int BITS>
NC_INLINE void quantize_piece(const Spec& spec, const float* x, int64_t index, Scaling by, const Table& table, Dice dice,
                           uint8_t* codes) {
    if constexpr (ELEMENT == INT || ELEMENT == AFFINE) {
        if (spec.stochastic) {
            alignas(64) float draws[PIECE];
            dice.roll(index, draws, PIECE);
            if constexpr (ELEMENT == INT) return quantize_int_randomly<BITS>(x, by, draws, codes);
            if constexpr (ELEMENT == AFFINE) return quantize_affine_randomly<BITS>(x, by, draws, codes);
        }
    }
    if constexpr (ELEMENT == INT) {
        spec.signed_scale ? quantize_int<BITS, true>(x, by, codes) : quantize_int<BITS, false>(x, by, codes);
    }
    if constexpr (ELEMENT == AFFINE) quantize_affine<BITS>(x, by, codes);
    if constexpr (ELEMENT == LEVELS) quantize_levels<BITS>(x, by, table, codes);
    if constexpr (ELEMENT == SIGN) quantize_sign(x, codes);
    if constexpr (ELEMENT == E4M3) quantize_float<Fp8E4M3>(x, by.inverse, codes);
    if constexpr (ELEMENT == E5M2) quantize_float<Fp8E5M2>(x, by.inverse, codes);
}

// `count` elements of one group, the first of which is the row's element `begin`.
template <int ELEMENT, int BITS>
NC_INLINE void quantize_as(const Spec& spec, const float* x, int64_t begin, int64_t count, Scaling by, const Table& table,
                        Dice dice, uint8_t* out) {
    alignas(64) uint8_t codes[PIECE], packed[PIECE];
    uint8_t* to = out + begin * BITS / 8;
    if (by.inverse == 0.0f) {
        std::memset(to, 0, size_t((count * BITS + 7) / 8));
        return;
    }
    int64_t i = 0;
    for (; i + PIECE <= count; i += PIECE, to += 8 * BITS) {
        if constexpr (BITS == 8) {
            quantize_piece<ELEMENT, BITS>(spec, x + i, begin + i, by, table, dice, to);
        } else {
            quantize_piece<ELEMENT, BITS>(spec, x + i, begin + i, by, table, dice, codes);
            pack<BITS>(codes, to);
        }
    }
    if (int64_t n = count - i) {
        alignas(64) float padded[PIECE] = {};
        std::memcpy(padded, x + i, size_t(n) * 4);
        quantize_piece<ELEMENT, BITS>(spec, padded, begin + i, by, table, dice, codes);
        std::fill(codes + n, codes + PIECE, uint8_t(0));
        pack<BITS>(codes, packed);
        std::memcpy(to, packed, size_t((n * BITS + 7) / 8));
    }
}

// Whether several groups share a piece: then elements are scaled first, and pieces quantized with a scale of one. The
// numbers are the same, since multiplying by one changes nothing; an affine group's zero point would get in the way.
template <int ELEMENT>
inline bool shared_pieces(int64_t group_size) {
    return ELEMENT != AFFINE && group_size > 0 && group_size < PIECE && PIECE % group_size == 0;
}

template <int ELEMENT, int BITS>
NC_INLINE void quantize_shared(const Spec& spec, const float* x, int64_t index, const float* inverse, int64_t size,
                               const Table& table, Dice dice, uint8_t* out) {
    alignas(64) float scaled[PIECE];
    alignas(64) uint8_t codes[PIECE];
    for (int64_t i = 0, g = 0; i < PIECE; i += size, ++g) {
        for (int64_t j = 0; j < size; ++j) scaled[i + j] = x[i + j] * inverse[g];
    }
    quantize_piece<ELEMENT, BITS>(spec, scaled, index, Scaling{1.0f, 1.0f, 0}, table, dice, codes);
    for (int64_t i = 0, g = 0; i < PIECE; i += size, ++g) {
        if (inverse[g] == 0.0f) std::memset(codes + i, 0, size_t(size));
    }
    pack<BITS>(codes, out + index * BITS / 8);
}

// fp32, fp16 and bf16 rows have no groups and no packing.
void quantize_wide(const Spec& spec, Floats row, int64_t begin, int64_t count, uint8_t* out) {
    alignas(64) float buffer[BATCH];
    int32_t dtype = spec.element == FP32 ? F32 : spec.element == FP16 ? F16 : B16;
    for (int64_t i = begin; i < begin + count; i += BATCH) {
        int64_t n = std::min(BATCH, begin + count - i);
        store(load(row, i, n, buffer), out, dtype, i, n);
    }
}

struct Encoding {
    const Spec& spec;
    Floats row;
    int64_t begin, count;
    Scaling by;
    uint8_t* out;
    Dice dice;
};

// Part of a group whose scale is known, or of a plain cast.
struct Quantize : Encoding {
    template <int ELEMENT, int BITS>
    void call() const {
        alignas(64) float buffer[BATCH];
        const Table table(spec);
        for (int64_t i = begin; i < begin + count; i += BATCH) {
            int64_t n = std::min(BATCH, begin + count - i);
            quantize_as<ELEMENT, BITS>(spec, load(row, i, n, buffer), i, n, by, table, dice, out);
        }
    }
    void wide() const { quantize_wide(spec, row, begin, count, out); }
};

struct EncodeGroups : Encoding {
    template <int ELEMENT, int BITS>
    void call() const {
        alignas(64) float buffer[BATCH];
        const Spec spec = this->spec;  // a copy: the compiler need not fear that writing codes changes it
        const Table table(spec);
        Batch batch;
        const int64_t size = spec.group_size, end = begin + count;
        const int64_t groups = std::max<int64_t>(1, std::min<int64_t>(Batch::SIZE, BATCH / size));
        for (int64_t i = begin; i < end; i += groups * size) {
            int64_t n = std::min(groups * size, end - i), here = (n + size - 1) / size;
            if (n <= BATCH) {
                const float* x = load(row, i, n, buffer);
                measure_batch<ELEMENT>(x, n, size, batch);
                settle_batch<ELEMENT>(spec, batch, i / size, here, n - (here - 1) * size, out);
                int64_t g = 0;
                if (shared_pieces<ELEMENT>(size)) {
                    for (; g * size + PIECE <= n; g += PIECE / size) {
                        fetch(row, i + g * size + BATCH, PIECE);
                        quantize_shared<ELEMENT, BITS>(spec, x + g * size, i + g * size, batch.inverse + g, size, table, dice, out);
                    }
                }
                for (; g < here; ++g) {
                    Scaling by{batch.scale[g], batch.inverse[g], batch.zero[g]};
                    fetch(row, i + g * size + BATCH, size);
                    quantize_as<ELEMENT, BITS>(spec, x + g * size, i + g * size, std::min(size, n - g * size), by, table, dice, out);
                }
            } else {
                measure_large<ELEMENT>(row, i, n, batch, 0);
                settle_batch<ELEMENT>(spec, batch, i / size, 1, n, out);
                Scaling by{batch.scale[0], batch.inverse[0], batch.zero[0]};
                Quantize{{spec, row, i, n, by, out, dice}}.template call<ELEMENT, BITS>();
            }
        }
    }
    void wide() const {}

    // One group that does not fit into a batch.
    template <int ELEMENT>
    static void measure_large(Floats row, int64_t begin, int64_t count, Batch& batch, int64_t slot) {
        alignas(64) float buffer[BATCH];
        PairSum pairs;
        batch.key[slot] = 0, batch.low[slot] = 0, batch.high[slot] = 0;
        for (int64_t i = 0; i < count; i += BATCH) {
            int64_t n = std::min(BATCH, count - i);
            const float* x = load(row, begin + i, n, buffer);
            measure_range<ELEMENT == AFFINE>(x, n, batch, slot);
            if (ELEMENT == SIGN) pairs.add(magnitude_sum(x, n));
        }
        batch.sum[slot] = pairs.total();
    }
};

struct Measure {
    Floats row;
    int64_t begin, count;
    Batch& batch;
    int64_t slot;
    template <int ELEMENT, int BITS>
    void call() const {
        EncodeGroups::measure_large<ELEMENT>(row, begin, count, batch, slot);
    }
    void wide() const {}
};

struct Settle {
    const Spec& spec;
    Batch& batch;
    int64_t group, groups, last_count;
    uint8_t* out;
    template <int ELEMENT, int BITS>
    void call() const {
        settle_batch<ELEMENT>(spec, batch, group, groups, last_count, out);
    }
    void wide() const {}
};

// -- decoding ------------------------------------------------------------------------------------------------------------

// PIECE floats, written to `out` or, for ADD, added to what is there.
template <int ELEMENT, int BITS, bool ADD>
NC_INLINE void dequantize_piece(const Spec& spec, const uint8_t* codes, Scaling by, float* out) {
    if constexpr (ELEMENT == INT) dequantize_int<BITS, ADD>(codes, by, out);
    if constexpr (ELEMENT == AFFINE) dequantize_affine<ADD>(codes, by, out);
    if constexpr (ELEMENT == LEVELS) dequantize_levels<BITS, ADD>(codes, by, spec.levels, out);
    if constexpr (ELEMENT == SIGN) dequantize_sign<ADD>(codes, by, out);
    if constexpr (ELEMENT == E4M3) dequantize_float<Fp8E4M3, ADD>(codes, by.scale, out);
    if constexpr (ELEMENT == E5M2) dequantize_float<Fp8E5M2, ADD>(codes, by.scale, out);
    if (!(std::fabs(by.scale) < HUGE_VALF)) {
        for (int i = 0; i < PIECE; ++i) out[i] = canonical(out[i]);
    }
}

// Decodes [begin, begin + count) piece by piece. A whole piece goes where target(offset) points (for ADD on top of what is
// there), a partial one into a buffer; done(offset, n, floats) hears of each.
template <int ELEMENT, int BITS, bool ADD, class Target, class Done>
inline void dequantize_as(const Spec& spec, const uint8_t* data, int64_t begin, int64_t count, Target target, Done done) {
    alignas(64) uint8_t codes[PIECE], packed[PIECE];
    alignas(64) float part[PIECE];
    const int64_t size = spec.group_size ? spec.group_size : spec.numel, end = begin + count;
    int64_t group = begin / size, i = begin;
    if (shared_pieces<ELEMENT>(spec.group_size)) {
        for (; i + PIECE <= end; i += PIECE, group += PIECE / size) {
            unpack<BITS>(data + i * BITS / 8, codes);
            dequantize_piece<ELEMENT, BITS, false>(spec, codes, Scaling{1.0f, 1.0f, 0}, part);
            float* to = target(i - begin);
            for (int64_t j = 0; j < PIECE; j += size) {
                float scale = read_scale(spec, data, group + j / size).scale;
                for (int64_t k = j; k < j + size; ++k) {
                    put<ADD>(ELEMENT == INT ? part[k] * scale + 0.0f : part[k] * scale, to[k]);
                }
            }
            for (int64_t k = 0; k < PIECE; ++k) to[k] = canonical(to[k]);
            done(i - begin, PIECE, to);
        }
    }
    for (; i < end; ++group) {
        const Scaling by = read_scale(spec, data, group);
        const int64_t group_end = std::min({(group + 1) * size, spec.numel, end});
        for (; i + PIECE <= group_end; i += PIECE) {
            const uint8_t* from = data + i * BITS / 8;
            __builtin_prefetch(from + FETCH);
            if constexpr (BITS != 8) {
                unpack<BITS>(from, codes);
                from = codes;
            }
            float* to = target(i - begin);
            dequantize_piece<ELEMENT, BITS, ADD>(spec, from, by, to);
            done(i - begin, PIECE, to);
        }
        if (int64_t n = group_end - i; n > 0) {
            size_t bytes = size_t((n * BITS + 7) / 8);
            std::memset(packed, 0, PIECE);
            std::memcpy(packed, data + i * BITS / 8, bytes);
            unpack<BITS>(packed, codes);
            dequantize_piece<ELEMENT, BITS, false>(spec, codes, by, part);
            done(i - begin, n, part);
            i = group_end;
        }
    }
}

inline void widen_row(const Spec& spec, const uint8_t* data, int64_t begin, int64_t count, float* out) {
    const uint8_t* from = data + begin * (spec.bits / 8);
    if (spec.element == FP32) {
        std::memcpy(out, from, size_t(count) * 4);
    } else if (spec.element == FP16) {
        widen_half(reinterpret_cast<const Half16*>(from), out, count);
    } else {
        const Half16* in = reinterpret_cast<const Half16*>(from);
        for (int64_t i = 0; i < count; ++i) out[i] = Brain::widen(in[i]);
    }
}

struct Decode {
    const Spec& spec;
    const uint8_t* data;
    int64_t begin, count;
    void* out;
    int32_t dtype;
    int64_t origin;  // the row's element that out[0] stands for

    template <int ELEMENT, int BITS>
    void call() const {
        if (dtype == F32) {
            float* floats = static_cast<float*>(out) + (begin - origin);
            auto done = [&](int64_t i, int64_t n, const float* x) {
                if (x != floats + i) std::memcpy(floats + i, x, size_t(n) * 4);
            };
            dequantize_as<ELEMENT, BITS, false>(spec, data, begin, count, [&](int64_t i) { return floats + i; }, done);
        } else {
            alignas(64) float buffer[PIECE];
            auto done = [&](int64_t i, int64_t n, const float* x) { store(x, out, dtype, begin - origin + i, n); };
            dequantize_as<ELEMENT, BITS, false>(spec, data, begin, count, [&](int64_t) { return buffer; }, done);
        }
    }
    void wide() const {
        if (dtype == F32) return widen_row(spec, data, begin, count, static_cast<float*>(out) + (begin - origin));
        alignas(64) float buffer[BATCH];
        for (int64_t i = begin; i < begin + count; i += BATCH) {
            int64_t n = std::min(BATCH, begin + count - i);
            widen_row(spec, data, i, n, buffer);
            store(buffer, out, dtype, i - origin, n);
        }
    }
};

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
#define NC_WIDTHS(E) \
    case E: \
        switch (spec.bits) { \
            case 1: return f.template call<E, 1>(); \
            case 2: return f.template call<E, 2>(); \
            case 3: return f.template call<E, 3>(); \
            case 4: return f.template call<E, 4>(); \
            case 5: return f.template call<E, 5>(); \
            case 6: return f.template call<E, 6>(); \
            case 7: return f.template call<E, 7>(); \
            default: return f.template call<E, 8>(); \
        }
    switch (spec.element) {
        NC_WIDTHS(INT)
        NC_WIDTHS(AFFINE)
        NC_WIDTHS(LEVELS)
        case SIGN: return f.template call<SIGN, 1>();
        case E4M3: return f.template call<E4M3, 8>();
        case E5M2: return f.template call<E5M2, 8>();
        default: return f.wide();
    }
#undef NC_WIDTHS
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
    dispatch(spec, EncodeGroups{{spec, row, begin, count, Scaling{}, out, Dice{key}}});
}

void measure(const Spec& spec, Floats row, int64_t begin, int64_t count, Batch& batch, int64_t slot) {
    dispatch(spec, Measure{row, begin, count, batch, slot});
}

void settle(const Spec& spec, Batch& batch, int64_t group, int64_t groups, int64_t last_count, uint8_t* out) {
    dispatch(spec, Settle{spec, batch, group, groups, last_count, out});
}

void quantize(const Spec& spec, Floats row, int64_t begin, int64_t count, Scaling by, uint8_t* out, uint64_t key) {
    dispatch(spec, Quantize{{spec, row, begin, count, by, out, Dice{key}}});
}

void decode(const Spec& spec, const uint8_t* data, int64_t begin, int64_t count, void* out, int32_t dtype) {
    dispatch(spec, Decode{spec, data, begin, count, out, dtype, 0});
}

void sum(const Spec& spec, const uint8_t* data, int64_t stride, int64_t ranks, Floats own, int64_t own_rank,
         int64_t divisor, int64_t begin, int64_t count, void* out, int32_t dtype) {
    alignas(64) float total[SPAN];
    for (int64_t i = begin; i < begin + count; i += SPAN) {
        int64_t n = std::min(SPAN, begin + count - i);
        sum_span(spec, data, stride, ranks, own, own_rank, divisor, i, n, total);
        store(total, out, dtype, i, n);
    }
}

void reduce(const Spec& spec, const uint8_t* data, int64_t stride, int64_t ranks, Floats own, int64_t own_rank,
            int64_t divisor, int64_t begin, int64_t count, float* scratch, uint8_t* out, uint64_t key) {
    for (int64_t i = 0; i < count; i += SPAN) {
        sum_span(spec, data, stride, ranks, own, own_rank, divisor, begin + i, std::min(SPAN, count - i), scratch + i);
    }
    Floats summed{scratch, F32, begin};
    if (spec.scale == NO_SCALE) quantize(spec, summed, begin, count, Scaling{1.0f, 1.0f, 0}, out, key);
    else encode(spec, summed, begin, count, out, key);
}

}  // namespace

#define NC_PASTE(a, b) a##b
#define NC_NAMED(isa) NC_PASTE(kernels_, isa)
#define NC_TEXT(a) #a
#define NC_STRING(a) NC_TEXT(a)

namespace nc {
extern const Kernels NC_NAMED(NC_ISA);
const Kernels NC_NAMED(NC_ISA) = {NC_STRING(NC_ISA), ::encode, ::measure, ::settle, ::quantize, ::decode, ::sum, ::reduce};
}  // namespace nc
