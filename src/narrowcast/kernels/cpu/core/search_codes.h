// What elements decode to under a scale, one class for each kind of code: what a search of scales compares them with.

#pragma once
#include "levels.h"

namespace {

// What elements decode to, in units of the scale: one class for each kind of code. BITS are those of a table, else 0. SMALL:
// half a piece can be looked at by itself.

struct Integers {
    static constexpr bool SMALL = true;
    static constexpr int ELEMENT = INT, BITS = 0;
    float low, top;
    explicit Integers(const Spec& spec)
        : low(-float((1 << (spec.bits - 1)) - 1 + spec.signed_scale)), top(float((1 << (spec.bits - 1)) - 1)) {}
    inline float unit(float x, Scaling by) const { return (clamp(x * by.inverse, low, top) + ROUNDER) - ROUNDER; }
    static inline float value(float unit, float scale) { return unit * scale; }
};

struct Affine {
    static constexpr bool SMALL = true;
    static constexpr int ELEMENT = AFFINE, BITS = 0;
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

#if defined(__AVX2__) && !defined(__AVX512VBMI__)

// Up to 16 levels and the thresholds between them, in registers: four comparisons find the level of eight elements.
struct Registers16 {
    __m256 nodes[4], low, high;

    explicit Registers16(const Spec& spec) {
        alignas(32) float node[4][8], level[16];
        const int count = 1 << spec.bits;
        auto threshold = [&](int i) { return i < count ? spec.thresholds[i] : HUGE_VALF; };
        for (int i = 0; i < 8; ++i) {
            node[0][i] = threshold(7), node[1][i] = threshold(i < 2 ? 8 * i + 3 : 15);
            node[2][i] = threshold(i < 4 ? 4 * i + 1 : 15), node[3][i] = threshold(2 * i);
        }
        for (int i = 0; i < 16; ++i) level[i] = i < count ? spec.levels[i] : 0.0f;
        for (int i = 0; i < 4; ++i) nodes[i] = _mm256_load_ps(node[i]);
        low = _mm256_load_ps(level), high = _mm256_load_ps(level + 8);
    }

    inline __m256 operator()(__m256 y) const {
        const __m256 upper = _mm256_cmp_ps(y, nodes[0], _CMP_GT_OQ);
        __m256i found = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_castps_si256(upper));
        for (int step = 1; step < 4; ++step) {
            const __m256 above = _mm256_cmp_ps(y, _mm256_permutevar8x32_ps(nodes[step], found), _CMP_GT_OQ);
            found = _mm256_sub_epi32(_mm256_add_epi32(found, found), _mm256_castps_si256(above));
        }
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, found), _mm256_permutevar8x32_ps(high, found), upper);
    }
};
#else
struct Registers16 {
    explicit Registers16(const Spec&) {}
};
#endif

template <int WIDTH>
struct Places {
    static constexpr int ELEMENT = LEVELS, BITS = WIDTH;
#if defined(__AVX2__) && !defined(__AVX512VBMI__)
    static constexpr bool SMALL = WIDTH <= 4;
#else
    static constexpr bool SMALL = false;
#endif
    const Table table;
    const Registers16 registers;
    const float* levels;
    explicit Places(const Spec& spec) : table(spec), registers(spec), levels(spec.levels) {}

    template <int COUNT>
    inline void units(const float* __restrict x, Scaling by, float* __restrict out) const {
#if defined(__AVX2__) && !defined(__AVX512VBMI__)
        if constexpr (SMALL) {
            const __m256 inverse = _mm256_set1_ps(by.inverse);
            for (int i = 0; i < COUNT; i += 8) _mm256_store_ps(out + i, registers(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse)));
            return;
        }
#endif
        static_assert(SMALL || COUNT == PIECE, "tables are looked up a piece at a time");
        alignas(64) uint8_t codes[PIECE];
        quantize_levels<BITS>(x, by, table, codes);
        dequantize_levels<BITS, false>(codes, Scaling{1.0f, 1.0f, 0}, levels, out);
    }
    static inline float value(float unit, float scale) { return unit * scale; }
};

struct Signs {
    static constexpr bool SMALL = true;
    static constexpr int ELEMENT = SIGN, BITS = 0;
    explicit Signs(const Spec&) {}
    inline float unit(float x, Scaling) const { return as<float>((as<uint32_t>(x) & 0x80000000u) | 0x3F800000u); }
    static inline float value(float unit, float scale) { return unit * scale; }
};

template <class Format, int CODE>
struct NarrowFloats {
    static constexpr bool SMALL = true;
    static constexpr int ELEMENT = CODE, BITS = 0;
    explicit NarrowFloats(const Spec&) {}
    inline float unit(float x, Scaling by) const { return Format::widen(Format::narrow(x * by.inverse)); }
    static inline float value(float unit, float scale) { return unit * scale; }
};

}  // namespace
