// Encoding the blocks of a row: batches of blocks, blocks, pieces of up to 64 elements.
//
// Pieces start at multiples of 8 elements, so their codes start at a whole byte. What is left over at the end of a block
// goes through zero-padded copies: nothing outside a row is read or written.

#pragma once
#include "scales.h"

// Into the loop over blocks, so that what all blocks share is set up once.
#define NC_INLINE __attribute__((always_inline)) inline

namespace {

constexpr int64_t BATCH = 2048;  // elements that are measured, then quantized while they are in the first-level cache

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

// `count` elements of one block, the first of which is the row's element `begin`.
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

// Whether several blocks share a piece: then elements are scaled first, and pieces quantized with a scale of one. The
// numbers are the same, since multiplying by one changes nothing; an affine block's zero point would get in the way.
template <int ELEMENT>
inline bool shared_pieces(int64_t block_size) {
    return ELEMENT != AFFINE && block_size > 0 && block_size < PIECE && PIECE % block_size == 0;
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

// fp32, fp16 and bf16 rows have no blocks and no packing.
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

// Part of a block whose scale is known, or of a plain cast.
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

// The blocks of a batch, whose scales are known: elements [begin, begin + count) of the row, which lie at x.
template <int ELEMENT, int BITS>
NC_INLINE void quantize_blocks(const Spec& spec, Floats row, const float* x, int64_t begin, int64_t count, const Batch& batch,
                              const Table& table, Dice dice, uint8_t* out) {
    const int64_t size = spec.block_size, blocks = (count + size - 1) / size;
    int64_t g = 0;
    if (shared_pieces<ELEMENT>(size)) {
        for (; g * size + PIECE <= count; g += PIECE / size) {
            fetch(row, begin + g * size + BATCH, PIECE);
            quantize_shared<ELEMENT, BITS>(spec, x + g * size, begin + g * size, batch.inverse + g, size, table, dice, out);
        }
    }
    for (; g < blocks; ++g) {
        Scaling by{batch.scale[g], batch.inverse[g], batch.zero[g]};
        fetch(row, begin + g * size + BATCH, size);
        quantize_as<ELEMENT, BITS>(spec, x + g * size, begin + g * size, std::min(size, count - g * size), by, table, dice, out);
    }
}

// Blocks that are in a batch as a whole.
inline int64_t blocks_in_batch(int64_t size) { return std::max<int64_t>(1, std::min<int64_t>(Batch::SIZE, BATCH / size)); }

struct EncodeBlocks : Encoding {
    template <int ELEMENT, int BITS>
    void call() const {
        alignas(64) float buffer[BATCH];
        const Spec spec = this->spec;  // a copy: the compiler need not fear that writing codes changes it
        const Table table(spec);
        Batch batch;
        const int64_t size = spec.block_size, end = begin + count, blocks = blocks_in_batch(size);
        for (int64_t i = begin; i < end; i += blocks * size) {
            int64_t n = std::min(blocks * size, end - i), here = (n + size - 1) / size;
            if (n <= BATCH) {
                const float* x = load(row, i, n, buffer);
                measure_batch<ELEMENT>(x, n, size, batch);
                settle_batch<ELEMENT>(spec, batch, i / size, here, n - (here - 1) * size, out);
                quantize_blocks<ELEMENT, BITS>(spec, row, x, i, n, batch, table, dice, out);
            } else {
                measure_large<ELEMENT>(row, i, n, batch, 0);
                settle_batch<ELEMENT>(spec, batch, i / size, 1, n, out);
                Scaling by{batch.scale[0], batch.inverse[0], batch.zero[0]};
                Quantize{{spec, row, i, n, by, out, dice}}.template call<ELEMENT, BITS>();
            }
        }
    }
    void wide() const {}

    // One block that does not fit into a batch.
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

// A batch whose scales are known.
struct QuantizeBatch : Encoding {
    const Batch& batch;
    template <int ELEMENT, int BITS>
    void call() const {
        alignas(64) float buffer[BATCH];
        const Table table(spec);
        quantize_blocks<ELEMENT, BITS>(spec, row, load(row, begin, count, buffer), begin, count, batch, table, dice, out);
    }
    void wide() const {}
};

struct Measure {
    Floats row;
    int64_t begin, count;
    Batch& batch;
    int64_t slot;
    template <int ELEMENT, int BITS>
    void call() const {
        EncodeBlocks::measure_large<ELEMENT>(row, begin, count, batch, slot);
    }
    void wide() const {}
};

struct Settle {
    const Spec& spec;
    Batch& batch;
    int64_t block, blocks, last_count;
    uint8_t* out;
    template <int ELEMENT, int BITS>
    void call() const {
        settle_batch<ELEMENT>(spec, batch, block, blocks, last_count, out);
    }
    void wide() const {}
};

}  // namespace
