// Floats to the bytes of their levels, four channels to a word. Compiled once per instruction set.
//
// Consecutive integers: cut and rounded, ties to even. A table of integers has thresholds that are multiples of a half, and
// the level of v is the same for all that round up to the same number of halves: it is looked up by that number.

#pragma once
#include <cmath>
#include <cstring>

#include "conv.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {
using namespace nc;

constexpr int64_t PIECE = 64;

// Any grid, in loops that compilers vectorise.
[[maybe_unused]] bool quantize_pieces(const ConvGrid& grid, const float* const rows[4], int64_t count, uint32_t* to) {
    bool unknown = false;
    for (int64_t i = 0; i < count; i += PIECE) {
        const int64_t n = count - i < PIECE ? count - i : PIECE;
        for (int j = 0; j < 4 && rows[j]; ++j) {
            int32_t whole[PIECE];
            for (int64_t k = 0; k < n; ++k) {
                const float v = rows[j][i + k] * grid.inverse, units = grid.uniform ? v : v + v;
                unknown |= v != v;
                const float low = units > grid.low ? units : grid.low, cut = low < grid.high ? low : grid.high;
                whole[k] = int32_t(grid.uniform ? std::nearbyint(cut) : std::ceil(cut)) - grid.origin;
            }
            for (int64_t k = 0; k < n && !grid.uniform; ++k) whole[k] = grid.lookup[whole[k]];
            for (int64_t k = 0; k < n; ++k) to[i + k] = (j ? to[i + k] : 0u) | uint32_t(whole[k]) << (8 * j);
        }
    }
    return unknown;
}

#if defined(__AVX2__)

// A table of up to 256 bytes, of which each 16 are looked up where they are meant, and give zero elsewhere.
struct Lookup {
    __m256i parts[16];
    int count;

    explicit Lookup(const ConvGrid& grid) : count((grid.places + 15) / 16) {
        for (int i = 0; i < count; ++i) {
            const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(grid.lookup + 16 * i));
            parts[i] = _mm256_broadcastsi128_si256(part);
        }
    }

    inline __m256i operator[](__m256i index) const {
        __m256i found = _mm256_shuffle_epi8(parts[0], _mm256_adds_epu8(index, _mm256_set1_epi8(0x70)));
        for (int i = 1; i < count; ++i) {
            index = _mm256_sub_epi8(index, _mm256_set1_epi8(16));
            // What lies outside of the part gets its top bit set, by the sum or by saturation.
            const __m256i place = _mm256_adds_epu8(index, _mm256_set1_epi8(0x70));
            found = _mm256_or_si256(found, _mm256_shuffle_epi8(parts[i], place));
        }
        return found;
    }
};

// 8 pixels: what is rounded, of one channel.
template <bool UNIFORM>
inline __m256i rounded(const ConvGrid& grid, __m256 v) {
    const __m256 low = _mm256_set1_ps(grid.low), high = _mm256_set1_ps(grid.high);
    const __m256 cut = _mm256_min_ps(_mm256_max_ps(UNIFORM ? v : _mm256_add_ps(v, v), low), high);
    const __m256i whole = _mm256_cvtps_epi32(UNIFORM ? cut : _mm256_ceil_ps(cut));  // ties to even
    return _mm256_sub_epi32(whole, _mm256_set1_epi32(grid.origin));
}

template <bool UNIFORM, int CHANNELS>
inline bool quantize_rows(const ConvGrid& grid, const float* const rows[4], int64_t count, uint32_t* to) {
    const Lookup lookup(grid);
    const __m256 inverse = _mm256_set1_ps(grid.inverse);
    __m256 unknown = _mm256_setzero_ps();
    for (int64_t i = 0; i + 8 <= count; i += 8) {
        __m256i word = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int j = 0; j < CHANNELS; ++j) {
            const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(rows[j] + i), inverse);
            unknown = _mm256_or_ps(unknown, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
            word = _mm256_or_si256(word, _mm256_slli_epi32(rounded<UNIFORM>(grid, v), 8 * j));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), UNIFORM ? word : lookup[word]);
    }
    return _mm256_movemask_ps(unknown) != 0;
}

template <bool UNIFORM>
inline bool quantize_channels(const ConvGrid& grid, const float* const rows[4], int64_t count, uint32_t* to) {
    if (rows[3]) return quantize_rows<UNIFORM, 4>(grid, rows, count, to);
    if (rows[2]) return quantize_rows<UNIFORM, 3>(grid, rows, count, to);
    if (rows[1]) return quantize_rows<UNIFORM, 2>(grid, rows, count, to);
    return quantize_rows<UNIFORM, 1>(grid, rows, count, to);
}

bool quantize(const ConvGrid& grid, const float* const rows[4], int64_t count, uint32_t* to) {
    if (!grid.uniform && grid.places > 256) return quantize_pieces(grid, rows, count, to);
    const int64_t whole = count / 8 * 8;
    bool unknown = grid.uniform ? quantize_channels<true>(grid, rows, whole, to) : quantize_channels<false>(grid, rows, whole, to);
    if (whole == count) return unknown;
    float rest[4][8] = {};
    const float* last[4] = {};
    for (int j = 0; j < 4 && rows[j]; ++j) {
        std::memcpy(rest[j], rows[j] + whole, size_t(count - whole) * 4);
        last[j] = rest[j];
    }
    uint32_t words[8];
    unknown |= grid.uniform ? quantize_channels<true>(grid, last, 8, words) : quantize_channels<false>(grid, last, 8, words);
    std::memcpy(to + whole, words, size_t(count - whole) * 4);
    return unknown;
}

#else

bool quantize(const ConvGrid& grid, const float* const rows[4], int64_t count, uint32_t* to) {
    return quantize_pieces(grid, rows, count, to);
}

#endif

}  // namespace
