// Scales that lose least. Compiled once per instruction set. What is tried, in which order, is written in
// kernels/reference/search.py; sums run in the same 64 lanes.

#include "search.h"

#include "encode.h"

namespace {

// The nearest stored scale, ties to even, its magnitude at most `limit`.
inline float round_to_stored(float scale, int32_t kind, float limit) {
    if (scale != scale) return scale;
    float magnitude = std::fabs(scale);
    magnitude = magnitude < limit ? magnitude : limit;
    const uint32_t bits = as<uint32_t>(magnitude);
    if (kind == SCALE_BF16) magnitude = as<float>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16);
    if (kind == SCALE_E8M0) magnitude = as<float>((bits + 0x3FFFFF + ((bits >> 23) & 1)) >> 23 << 23);
    if (kind == SCALE_FP16) magnitude = Half::widen(Half::narrow(magnitude));
    magnitude = magnitude < limit ? magnitude : limit;
    return std::copysign(magnitude, scale);
}

// What PIECE elements decode to, in units of the scale: one class for each kind of code. BITS are those of a table, else 0.

struct Integers {
    static constexpr int BITS = 0;
    float low, top;
    explicit Integers(const Spec& spec)
        : low(-float((1 << (spec.bits - 1)) - 1 + spec.signed_scale)), top(float((1 << (spec.bits - 1)) - 1)) {}
    inline float unit(float x, Scaling by) const { return (clamp(x * by.inverse, low, top) + ROUNDER) - ROUNDER; }
    static inline float value(float unit, float scale) { return unit * scale; }
};

struct Affine {
    static constexpr int BITS = 0;
    float top;
    explicit Affine(const Spec& spec) : top(float((1 << spec.bits) - 1)) {}
    inline float unit(float x, Scaling by) const {
        const float zero = float(by.zero), whole = (clamp(x * by.inverse, -top, top) + ROUNDER) - ROUNDER;
        return clamp(whole + zero, 0.0f, top) - zero;
    }
    static inline float value(float unit, float scale) {
        constexpr float most = 0x1.fffffep+127f;
        return clamp(unit * scale, -most, most);
    }
};

template <int WIDTH>
struct Places {
    static constexpr int BITS = WIDTH;
    const Table table;
    const float* levels;
    explicit Places(const Spec& spec) : table(spec), levels(spec.levels) {}
    inline void units(const float* __restrict x, Scaling by, float* __restrict out) const {
        alignas(64) uint8_t codes[PIECE];
        quantize_levels<BITS>(x, by, table, codes);
        dequantize_levels<BITS, false>(codes, Scaling{1.0f, 1.0f, 0}, levels, out);
    }
    static inline float value(float unit, float scale) { return unit * scale; }
};

struct Signs {
    static constexpr int BITS = 0;
    explicit Signs(const Spec&) {}
    inline float unit(float x, Scaling) const { return as<float>((as<uint32_t>(x) & 0x80000000u) | 0x3F800000u); }
    static inline float value(float unit, float scale) { return unit * scale; }
};

template <class Format>
struct NarrowFloats {
    static constexpr int BITS = 0;
    explicit NarrowFloats(const Spec&) {}
    inline float unit(float x, Scaling by) const { return Format::widen(Format::narrow(x * by.inverse)); }
    static inline float value(float unit, float scale) { return unit * scale; }
};

struct Choice {
    Scaling by;
    float loss;
};

inline Choice better(const Choice& found, const Choice& other) { return other.loss < found.loss ? other : found; }

// 64 lanes, folded in halves.
inline float fold(float (&lane)[PIECE]) {
    for (int i = 0; i < 32; ++i) lane[i] += lane[i + 32];
    for (int i = 0; i < 16; ++i) lane[i] += lane[i + 16];
    for (int i = 0; i < 8; ++i) lane[i] += lane[i + 8];
    for (int i = 0; i < 4; ++i) lane[i] += lane[i + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

// One block, and zeros behind its last element up to a whole piece.
template <class Codes>
struct Block {
    const Spec& spec;
    const Search& how;
    const Codes& codes;
    const float* x;
    const float* weights;  // or null
    int64_t count;

    // Calls add(i, element, units) for the PIECE elements from `begin` on.
    template <class Add>
    inline void each(int64_t begin, Scaling by, const Add& add) const {
        const float* __restrict here = x + begin;
        if constexpr (Codes::BITS != 0) {
            alignas(64) float units[PIECE];
            codes.units(here, by, units);
            for (int i = 0; i < PIECE; ++i) add(i, here[i], units[i]);
        } else {
            for (int i = 0; i < PIECE; ++i) add(i, here[i], codes.unit(here[i], by));
        }
    }

    // The weighted sum of term(element, units) over the block, in 64 lanes.
    template <class Term>
    inline float total(Scaling by, const Term& term) const {
        alignas(64) float lanes[PIECE] = {};
        int64_t begin = 0;
        for (; begin + PIECE <= count; begin += PIECE) {
            const float* w = weights + begin;
            if (weights) {
                each(begin, by, [&](int i, float element, float unit) { lanes[i] += term(element, unit) * w[i]; });
            } else {
                each(begin, by, [&](int i, float element, float unit) { lanes[i] += term(element, unit); });
            }
        }
        if (begin < count) {
            alignas(64) float products[PIECE];
            const int64_t left = count - begin;
            each(begin, by, [&](int i, float element, float unit) { products[i] = term(element, unit); });
            for (int64_t i = 0; weights && i < left; ++i) products[i] *= weights[begin + i];
            for (int64_t i = left; i < PIECE; ++i) products[i] = 0.0f;
            for (int i = 0; i < PIECE; ++i) lanes[i] += products[i];
        }
        return fold(lanes);
    }

    inline float loss(Scaling by) const {
        const float scale = by.scale;
        return total(by, [scale](float element, float unit) {
            const float error = element - Codes::value(unit, scale);
            return error * error;
        });
    }

    inline float fitted(Scaling by) const {
        const float above = total(by, [](float element, float unit) { return unit * element; });
        return above / total(by, [](float, float unit) { return unit * unit; });
    }

    // A stored scale near `wanted`; NaN where none may be used.
    inline float stored(float wanted) const {
        const float scale = round_to_stored(wanted, spec.scale, spec.limit);
        return (spec.signed_scale ? std::fabs(scale) : scale) >= 0x1p-126f ? scale : NOT_A_NUMBER;
    }

    inline Choice choice(float scale, int32_t zero) const {
        const Scaling by{scale, 1.0f / scale, zero};
        return Choice{by, scale == scale ? loss(by) : HUGE_VALF};
    }

    Scaling best(Scaling first) const {
        // Losses first, comparisons then: a processor works on several candidates at once if no branch stands between them.
        Choice tried[2 * Search::MOST + 1];
        int64_t count = 0;
        tried[count++] = Choice{first, loss(first)};
        for (int64_t i = 0; spec.element != SIGN && i < how.factor_count; ++i) {
            tried[count++] = choice(stored(first.scale * how.factors[i]), first.zero);
            if (spec.signed_scale) tried[count++] = choice(stored(first.scale * -how.factors[i]), first.zero);
        }
        Choice found = tried[0];
        for (int64_t i = 1; i < count; ++i) found = better(found, tried[i]);
        for (int step = -1; spec.element == AFFINE && step <= 1; step += 2) {
            found = better(found, choice(found.by.scale, std::min(std::max(found.by.zero + step, 0), (1 << spec.bits) - 1)));
        }
        for (int64_t i = 0; i < how.refinements; ++i) {
            const float before = found.by.scale;
            found = better(found, choice(stored(fitted(found.by)), found.by.zero));
            if (found.by.scale == before) break;  // the next one would find the same
        }
        return found.by;
    }
};

void write(const Spec& spec, Scaling by, int64_t block, uint8_t* out) {
    uint8_t* at = out + spec.scales_offset;
    switch (spec.scale) {
        case SCALE_FP32: write_scales<SCALE_FP32>(&by.scale, 1, at + 4 * block); break;
        case SCALE_BF16: write_scales<SCALE_BF16>(&by.scale, 1, at + 2 * block); break;
        case SCALE_FP16: write_scales<SCALE_FP16>(&by.scale, 1, at + 2 * block); break;
        default: write_scales<SCALE_E8M0>(&by.scale, 1, at + block);
    }
    if (spec.element == AFFINE) out[spec.zeros_offset + block] = uint8_t(by.zero);
}

template <class Codes>
void encode_blocks(const Spec& spec, const Kernels& k, Floats row, int64_t first, int64_t end, const Search& how, float* x,
                   uint8_t* out) {
    Spec nearest = spec;  // codes are the nearest, whatever the codec does otherwise
    nearest.stochastic = 0;
    const Codes codes(spec);
    Batch batch;
    for (int64_t block = first; block < end; ++block) {
        const int64_t begin = block * spec.block_size, count = std::min(spec.block_size, spec.numel - begin);
        k.measure(spec, row, begin, count, batch, 0);
        k.settle(spec, batch, block, 1, count, out);
        Scaling by{batch.scale[0], batch.inverse[0], batch.zero[0]};
        if (by.inverse != 0.0f) {  // all of it is finite
            const float* loaded = load(row, begin, count, x);
            if (loaded != x) std::memcpy(x, loaded, size_t(count) * 4);
            std::fill(x + count, x + (count + PIECE - 1) / PIECE * PIECE, 0.0f);
            const float* weights = how.importance ? how.importance + begin : nullptr;
            by = Block<Codes>{nearest, how, codes, x, weights, count}.best(by);
            write(spec, by, block, out);
        }
        if constexpr (Codes::BITS != 0) {  // a table is set up once for all blocks
            quantize_as<LEVELS, Codes::BITS>(nearest, x, begin, count, by, codes.table, Dice{0}, out);
        } else {
            k.quantize(nearest, row, begin, count, by, out, 0);
        }
    }
}

void encode(const Spec& spec, const Kernels& k, Floats row, int64_t first, int64_t end, const Search& how, float* x,
            uint8_t* out) {
    auto as = [&](auto run) { run(spec, k, row, first, end, how, x, out); };
    switch (spec.element) {
        case INT: return as(encode_blocks<Integers>);
        case AFFINE: return as(encode_blocks<Affine>);
        case SIGN: return as(encode_blocks<Signs>);
        case E4M3: return as(encode_blocks<NarrowFloats<Fp8E4M3>>);
        case E5M2: return as(encode_blocks<NarrowFloats<Fp8E5M2>>);
        default: with_bits(spec.bits, [&](auto bits) { as(encode_blocks<Places<decltype(bits)::value>>); });
    }
}

}  // namespace

namespace nc {
const SearchKernels NC_NAMED_BY_ISA(search) = {::encode};
}  // namespace nc
