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
    inline void units(const float* __restrict x, Scaling by, float* __restrict out) const {
        for (int i = 0; i < PIECE; ++i) out[i] = (clamp(x[i] * by.inverse, low, top) + ROUNDER) - ROUNDER;
    }
    static inline float value(float unit, float scale) { return unit * scale; }
};

struct Affine {
    static constexpr int BITS = 0;
    float top;
    explicit Affine(const Spec& spec) : top(float((1 << spec.bits) - 1)) {}
    inline void units(const float* __restrict x, Scaling by, float* __restrict out) const {
        const float zero = float(by.zero);
        for (int i = 0; i < PIECE; ++i) {
            float whole = (clamp(x[i] * by.inverse, -top, top) + ROUNDER) - ROUNDER;
            out[i] = clamp(whole + zero, 0.0f, top) - zero;
        }
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
    inline void units(const float* __restrict x, Scaling, float* __restrict out) const {
        for (int i = 0; i < PIECE; ++i) out[i] = as<float>((as<uint32_t>(x[i]) & 0x80000000u) | 0x3F800000u);
    }
    static inline float value(float unit, float scale) { return unit * scale; }
};

template <class Format>
struct NarrowFloats {
    static constexpr int BITS = 0;
    explicit NarrowFloats(const Spec&) {}
    inline void units(const float* __restrict x, Scaling by, float* __restrict out) const {
        for (int i = 0; i < PIECE; ++i) out[i] = Format::widen(Format::narrow(x[i] * by.inverse));
    }
    static inline float value(float unit, float scale) { return unit * scale; }
};

// One group, and zeros behind its last element up to a whole piece.
template <class Codes>
struct Group {
    const Spec& spec;
    const Search& how;
    const Codes& codes;
    const float* x;
    const float* weights;  // or null
    int64_t count;

    // The weighted sum of term(element, units) over the group.
    template <class Term>
    inline float total(Scaling by, const Term& term) const {
        alignas(64) float units[PIECE], sum[PIECE] = {};
        int64_t begin = 0;
        for (; begin + PIECE <= count; begin += PIECE) {
            const float* here = x + begin;
            codes.units(here, by, units);
            if (weights) {
                for (int i = 0; i < PIECE; ++i) sum[i] += term(here[i], units[i]) * weights[begin + i];
            } else {
                for (int i = 0; i < PIECE; ++i) sum[i] += term(here[i], units[i]);
            }
        }
        if (begin < count) {
            alignas(64) float products[PIECE];
            const int64_t left = count - begin;
            codes.units(x + begin, by, units);
            for (int i = 0; i < PIECE; ++i) products[i] = term(x[begin + i], units[i]);
            for (int64_t i = 0; weights && i < left; ++i) products[i] *= weights[begin + i];
            for (int64_t i = left; i < PIECE; ++i) products[i] = 0.0f;
            for (int i = 0; i < PIECE; ++i) sum[i] += products[i];
        }
        for (int half = PIECE / 2; half; half /= 2) {
            for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
        }
        return sum[0];
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

    Scaling best(Scaling first) const {
        Scaling found = first;
        float least = loss(first);
        auto take = [&](Scaling by) {
            const float lost = loss(by);
            if (lost < least) found = by, least = lost;
        };
        auto try_scale = [&](float wanted) {
            const float scale = round_to_stored(wanted, spec.scale, spec.limit);
            const bool allowed = (spec.signed_scale ? std::fabs(scale) : scale) >= 0x1p-126f;  // no NaN either
            if (allowed) take(Scaling{scale, 1.0f / scale, found.zero});
        };
        for (int64_t i = 0; spec.element != SIGN && i < how.factor_count; ++i) {
            try_scale(first.scale * how.factors[i]);
            if (spec.signed_scale) try_scale(first.scale * -how.factors[i]);
        }
        for (int step = -1; spec.element == AFFINE && step <= 1; step += 2) {
            take(Scaling{found.scale, found.inverse, std::min(std::max(found.zero + step, 0), (1 << spec.bits) - 1)});
        }
        for (int64_t i = 0; i < how.refinements; ++i) {
            const float before = found.scale;
            try_scale(fitted(found));
            if (found.scale == before) break;  // the next one would find the same
        }
        return found;
    }
};

void write(const Spec& spec, Scaling by, int64_t group, uint8_t* out) {
    uint8_t* at = out + spec.scales_offset;
    switch (spec.scale) {
        case SCALE_FP32: write_scales<SCALE_FP32>(&by.scale, 1, at + 4 * group); break;
        case SCALE_BF16: write_scales<SCALE_BF16>(&by.scale, 1, at + 2 * group); break;
        case SCALE_FP16: write_scales<SCALE_FP16>(&by.scale, 1, at + 2 * group); break;
        default: write_scales<SCALE_E8M0>(&by.scale, 1, at + group);
    }
    if (spec.element == AFFINE) out[spec.zeros_offset + group] = uint8_t(by.zero);
}

template <class Codes>
void encode_groups(const Spec& spec, const Kernels& k, Floats row, int64_t first, int64_t end, const Search& how, float* x,
                   uint8_t* out) {
    Spec nearest = spec;  // codes are the nearest, whatever the codec does otherwise
    nearest.stochastic = 0;
    const Codes codes(spec);
    Batch batch;
    for (int64_t group = first; group < end; ++group) {
        const int64_t begin = group * spec.group_size, count = std::min(spec.group_size, spec.numel - begin);
        k.measure(spec, row, begin, count, batch, 0);
        k.settle(spec, batch, group, 1, count, out);
        Scaling by{batch.scale[0], batch.inverse[0], batch.zero[0]};
        if (by.inverse != 0.0f) {  // all of it is finite
            const float* loaded = load(row, begin, count, x);
            if (loaded != x) std::memcpy(x, loaded, size_t(count) * 4);
            std::fill(x + count, x + (count + PIECE - 1) / PIECE * PIECE, 0.0f);
            const float* weights = how.importance ? how.importance + begin : nullptr;
            by = Group<Codes>{nearest, how, codes, x, weights, count}.best(by);
            write(spec, by, group, out);
        }
        if constexpr (Codes::BITS != 0) {  // a table is set up once for all groups
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
        case INT: return as(encode_groups<Integers>);
        case AFFINE: return as(encode_groups<Affine>);
        case SIGN: return as(encode_groups<Signs>);
        case E4M3: return as(encode_groups<NarrowFloats<Fp8E4M3>>);
        case E5M2: return as(encode_groups<NarrowFloats<Fp8E5M2>>);
        default: break;
    }
    switch (spec.bits) {
        case 1: return as(encode_groups<Places<1>>);
        case 2: return as(encode_groups<Places<2>>);
        case 3: return as(encode_groups<Places<3>>);
        case 4: return as(encode_groups<Places<4>>);
        case 5: return as(encode_groups<Places<5>>);
        case 6: return as(encode_groups<Places<6>>);
        case 7: return as(encode_groups<Places<7>>);
        default: return as(encode_groups<Places<8>>);
    }
}

}  // namespace

#define NC_PASTE(a, b) a##b
#define NC_NAMED(isa) NC_PASTE(search_, isa)

namespace nc {
extern const SearchKernels NC_NAMED(NC_ISA);
const SearchKernels NC_NAMED(NC_ISA) = {::encode};
}  // namespace nc
