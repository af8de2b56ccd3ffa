// Codes that are places in a table: the code of y is how many thresholds lie below it.
//
// Ways to count, which agree exactly. Where every threshold is a multiple of a half (the integer grids of additive powers of
// two) 2y is rounded up to an integer and looked up; where levels are powers of two, y's exponent says which; otherwise a
// binary search goes down the thresholds.

#pragma once
#include "codes.h"

namespace {

// What a table's codes are found with, derived from its thresholds.
struct Table {
    enum Way { SEARCH, BYTES, MAGNITUDES, INTEGERS, POWERS };
    static constexpr int REACH = 2047;  // thresholds of a grid lie within +- REACH halves

    Way way = SEARCH;
    int32_t lowest = 0, highest = 0;           // for INTEGERS: lookup[t - lowest] is the code of t halves, t = ceil(2y)
    int32_t zero = 0;                          // for MAGNITUDES and POWERS: the code of 0, half way up the table
    alignas(64) uint8_t below[128];            // for MAGNITUDES: thresholds below 16 c, for each cell c of 16 halves,
    alignas(64) uint8_t first[128], last[128]; // and those in it, a bit for each half: the first eight, the last eight
    alignas(64) uint8_t lookup[2 * REACH + 2];
    alignas(64) float node[256];               // for SEARCH: step s compares with node[(1 << s) - 1 + (bits so far)]
    alignas(64) uint8_t order[256];            // for SEARCH: the code, from its bits in the order in which they were found

    explicit Table(const Spec& spec) {
        if (spec.element != LEVELS) return;
        const int count = 1 << spec.bits;
        int thresholds = 0;
        bool integers = true;
        for (; thresholds < count && spec.thresholds[thresholds] < HUGE_VALF; ++thresholds) {
            float halves = 2.0f * spec.thresholds[thresholds];
            // A threshold of zero tells 2 (x / scale) from x (2 / scale), which is what the fast ways take, where x / scale
            // vanishes.
            integers = integers && halves != 0.0f && std::fabs(halves) < float(REACH) && halves == std::floor(halves);
        }
#if defined(__AVX512VBMI__)
        if (!integers && powers(spec, thresholds)) {
            way = POWERS, zero = thresholds / 2;
            return;
        }
#endif
        if (integers) use_grid(spec, thresholds);
        else use_search(spec, count);
    }

   private:
    // Whether the thresholds are +-0.5, +-1.5, +-3, +-6, ...: those between 0 and the powers of two from 1 on.
    static bool powers(const Spec& spec, int thresholds) {
        bool so = thresholds % 2 == 0 && thresholds >= 4;
        float expected = 0.5f;
        for (int i = thresholds / 2; so && i < thresholds; ++i) {
            so = spec.thresholds[i] == expected && spec.thresholds[thresholds - 1 - i] == -expected;
            expected = i == thresholds / 2 ? 1.5f : 2.0f * expected;
        }
        return so;
    }

    void use_grid(const Spec& spec, int thresholds) {
        auto half = [&](int i) { return int32_t(2.0f * spec.thresholds[i]); };
        lowest = half(0), highest = half(thresholds - 1) + 1;
        way = INTEGERS;
#if defined(__AVX512VBMI__)
        bool symmetric = true;
        for (int i = 0; i < thresholds; ++i) symmetric = symmetric && half(i) == -half(thresholds - 1 - i);
        if (lowest >= -128 && highest <= 127) lowest = -128, highest = 127, way = BYTES;
        else if (symmetric && thresholds % 2 == 0) return use_magnitudes(spec, thresholds);
        else {  // a wide grid that is not symmetric, such as an unsigned one
            way = SEARCH;
            return use_search(spec, 1 << spec.bits);
        }
#endif
        int32_t from = lowest;
        for (int code = 0; code <= thresholds; ++code) {
            int32_t to = code < thresholds ? half(code) : highest;
            std::memset(lookup + (from - lowest), code, size_t(to - from + 1));
            from = to + 1;
        }
    }

    void use_magnitudes(const Spec& spec, int thresholds) {
        way = MAGNITUDES, zero = thresholds / 2;
        std::memset(first, 0, sizeof first);
        std::memset(last, 0, sizeof last);
        int next = zero;
        for (int cell = 0; cell < 128; ++cell) {
            below[cell] = uint8_t(next - zero);
            for (; next < thresholds; ++next) {
                int32_t place = int32_t(2.0f * spec.thresholds[next]) - 16 * cell;
                if (place >= 16) break;
                (place < 8 ? first : last)[cell] |= uint8_t(1 << (place & 7));
            }
        }
    }

    // Bit s of the number that a search finds is its answer at step s: the code's bits from the top.
    void use_search(const Spec& spec, int count) {
        for (int found = 0; found < count; ++found) {
            int code = 0;
            for (int step = 0; step < spec.bits; ++step) {
                int stride = 1 << (spec.bits - 1 - step);
                if (found < 1 << step) node[(1 << step) - 1 + found] = spec.thresholds[code + stride - 1];
                code += found >> step & 1 ? stride : 0;
            }
            order[found] = uint8_t(code);
        }
    }
};

}  // namespace

#if defined(__AVX512VBMI__)
#include "levels_avx512.h"
#else
#if defined(__AVX2__)
#include "levels_avx2.h"
#endif

namespace {

template <int BITS>
inline void quantize_levels(const float* __restrict x, Scaling by, const Table& table, uint8_t* __restrict codes) {
    if (table.way == Table::INTEGERS) {
        const float low = float(table.lowest), high = float(table.highest);
        int32_t t[PIECE];
        for (int i = 0; i < PIECE; ++i) t[i] = int32_t(std::ceil(clamp(2.0f * (x[i] * by.inverse), low, high))) - table.lowest;
        for (int i = 0; i < PIECE; ++i) codes[i] = table.lookup[t[i]];
        return;
    }
#if defined(__AVX2__)
    if constexpr (BITS <= 4) {
        for (int i = 0; i < PIECE; i += 32) search<BITS>(x + i, by, table, codes + i);
        return;
    }
#endif
    for (int i = 0; i < PIECE; ++i) {
        float y = x[i] * by.inverse;
        uint32_t found = 0;
        for (int step = 0; step < BITS; ++step) found |= uint32_t(y > table.node[(1u << step) - 1 + found]) << step;
        codes[i] = table.order[found];
    }
}

template <int BITS, bool ADD>
inline void dequantize_levels(const uint8_t* __restrict codes, Scaling by, const float* __restrict levels, float* __restrict out) {
#if defined(__AVX2__)
    if constexpr (BITS <= 4) {
        const Registers<BITS> table(levels);
        for (int i = 0; i < PIECE; i += 8) {
            const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
            const __m256 value = _mm256_mul_ps(table[index], _mm256_set1_ps(by.scale));
            _mm256_storeu_ps(out + i, ADD ? _mm256_add_ps(_mm256_loadu_ps(out + i), value) : value);
        }
        return;
    }
#endif
    for (int i = 0; i < PIECE; ++i) put<ADD>(levels[codes[i]] * by.scale, out[i]);
}

}  // namespace
#endif
