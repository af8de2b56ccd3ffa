// Fake quantization in 512-bit registers, 64 elements at a time: what fake.cpp does in buffers, without them.
//
// A way finds the levels of 64 numbers. What it makes of a NaN does not matter, except for Round, which keeps it.

#pragma once
#include <type_traits>

#include "fake.h"
#include "levels.h"

#if defined(__AVX512VBMI__)

namespace {

// What ways look up, made once per call.
struct Lookups {
    Table table;
    bool near;                        // for Near: thresholds are multiples of a half, all within 64 of them
    float lowest, highest;            // and these are the first one and half more than the last, in halves
    alignas(64) uint8_t codes[64];    // of so many halves above `lowest`
    alignas(64) float ordered[32];    // for Search: the levels in the order of its answers

    explicit Lookups(const Spec& spec) : table(spec), near(spec.bits <= 4) {
        const float* at = spec.thresholds;
        int count = 0;
        for (; count < 1 << spec.bits && at[count] < HUGE_VALF; ++count) {
            const float halves = 2.0f * at[count];
            near = near && halves == std::floor(halves) && std::fabs(halves) < 4096.0f && halves - 2.0f * at[0] < 63.0f;
        }
        lowest = 2.0f * at[0], highest = 2.0f * at[count - 1] + 1.0f;
        for (int t = 0, code = 0; near && t < 64; ++t) {
            while (code < count && 2.0f * at[code] < lowest + float(t)) ++code;
            codes[t] = uint8_t(code);
        }
        for (int i = 0; table.way == Table::SEARCH && i < std::min(32, 1 << spec.bits); ++i) {
            ordered[i] = spec.levels[table.order[i]];
        }
    }
};

inline const Lookups& lookups(const FakeGrid& grid) { return *reinterpret_cast<const Lookups*>(grid.table); }

struct Wide {
    __m512 part[4];
};

// Consecutive integers.
struct Round {
    __m512 low, high;
    explicit Round(const FakeGrid& grid) : low(_mm512_set1_ps(grid.low)), high(_mm512_set1_ps(grid.high)) {}

    inline __m512 operator()(__m512 v) const {
        __m512 cut = _mm512_min_ps(high, _mm512_max_ps(low, v));  // the second operand where one is NaN
        return _mm512_roundscale_ps(cut, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
};

// Up to 16 levels on a small grid of integers: 2v, rounded up, in one lookup.
struct Near {
    __m512 levels, lowest, highest;
    __m512i codes, first;
    explicit Near(const FakeGrid& grid) : levels(_mm512_loadu_ps(grid.spec.levels)) {
        const Lookups& from = lookups(grid);
        lowest = _mm512_set1_ps(from.lowest), highest = _mm512_set1_ps(from.highest);
        codes = _mm512_load_si512(from.codes), first = _mm512_set1_epi32(int32_t(from.lowest));
    }

    inline __m512 operator()(__m512 v) const {
        __m512 halves = _mm512_max_ps(_mm512_min_ps(_mm512_add_ps(v, v), highest), lowest);
        __m512i t = _mm512_cvt_roundps_epi32(halves, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
        // Byte by byte; only the lowest of each four matters, since a permutation looks at four bits of its index.
        return _mm512_permutexvar_ps(_mm512_permutexvar_epi8(_mm512_sub_epi32(t, first), codes), levels);
    }
};

// Any other table of up to 32 levels: a search, whose answers name the level.
template <int BITS>
struct Search {
    const Table& table;
    Registers<BITS> levels;
    explicit Search(const FakeGrid& grid) : table(lookups(grid).table), levels(lookups(grid).ordered) {}

    inline __m512 operator()(__m512 v) const {
        __m512i found = _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(v, _mm512_set1_ps(table.node[0]), _CMP_GT_OQ), 1);
        if constexpr (BITS > 1) search_step<1>(table, v, found);
        if constexpr (BITS > 2) search_step<2>(table, v, found);
        if constexpr (BITS > 3) search_step<3>(table, v, found);
        if constexpr (BITS > 4) search_step<4>(table, v, found);
        return levels[found];
    }
};

// Any table, through the codes of levels.h.
template <int BITS>
struct Coded {
    const Table& table;
    Registers<BITS> levels;
    explicit Coded(const FakeGrid& grid) : table(lookups(grid).table), levels(grid.spec.levels) {}
};

template <class Way>
inline void find(const Way& way, const Wide& v, Wide& q) {
    for (int i = 0; i < 4; ++i) q.part[i] = way(v.part[i]);
}

template <int BITS>
inline void find(const Coded<BITS>& way, const Wide& v, Wide& q) {
    alignas(64) float buffer[PIECE];
    alignas(64) uint8_t codes[PIECE];
    for (int i = 0; i < 4; ++i) _mm512_store_ps(buffer + 16 * i, v.part[i]);
    quantize_levels<BITS>(buffer, Scaling{1.0f, 1.0f, 0}, way.table, codes);
    for (int i = 0; i < 4; ++i) {
        q.part[i] = way.levels[_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(codes + 16 * i)))];
    }
}

// The scales of 64 elements, or the inverse ones: from place i on, or the same for all.
inline Wide of_places(const float* numbers, bool each, int64_t i) {
    Wide made;
    for (int j = 0; j < 4; ++j) made.part[j] = each ? _mm512_loadu_ps(numbers + i + 16 * j) : _mm512_set1_ps(*numbers);
    return made;
}

// `value`, or the one NaN where `mask`.
inline __m512 or_nan(__m512 value, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(value), mask, _mm512_set1_epi32(0x7FC00000)));
}

inline __mmask16 is_nan(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

// y of 64 elements.
template <class Way>
inline void forward_piece(const Way& way, const Wide& scale, const Wide& inverse, const float* x, float* y, bool stream) {
    Wide v, q;
    for (int j = 0; j < 4; ++j) v.part[j] = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), inverse.part[j]);
    find(way, v, q);
    for (int j = 0; j < 4; ++j) {
        __m512 value = _mm512_mul_ps(q.part[j], scale.part[j]);
        if (std::is_same<Way, Round>::value) value = _mm512_add_ps(value, _mm512_setzero_ps());  // codes know no negative zero
        value = or_nan(value, is_nan(v.part[j]) | is_nan(value));
        if (stream) _mm512_stream_ps(y + 16 * j, value);
        else _mm512_storeu_ps(y + 16 * j, value);
    }
}

// Which of 64 elements lie outside, as bits; their terms are added to 32 lanes (N = 4), or to a sum for each (8).
template <class Way, int N>
inline uint64_t backward_piece(const Way& way, const FakeGrid& grid, const Wide& inverse, const float* x, const float* grad,
                               __m512d (&sums)[N]) {
    Wide v, q;
    uint64_t outside = 0;
    for (int j = 0; j < 4; ++j) v.part[j] = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), inverse.part[j]);
    find(way, v, q);
    for (int j = 0; j < 4; ++j) {
        const __mmask16 below = _mm512_cmp_ps_mask(v.part[j], _mm512_set1_ps(grid.low), _CMP_LT_OQ);
        const __mmask16 beyond = below | _mm512_cmp_ps_mask(v.part[j], _mm512_set1_ps(grid.high), _CMP_GT_OQ);
        outside |= uint64_t(beyond) << (16 * j);
        // A NaN of v is not beyond, so that the difference is one too.
        __m512 term = _mm512_mask_sub_ps(q.part[j], __mmask16(~beyond), q.part[j], v.part[j]);
        term = _mm512_mul_ps(_mm512_loadu_ps(grad + 16 * j), term);
        sums[2 * j % N] = _mm512_add_pd(sums[2 * j % N], _mm512_cvtps_pd(_mm512_castps512_ps256(term)));
        sums[2 * j % N + 1] = _mm512_add_pd(sums[2 * j % N + 1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(term, 1)));
    }
    return outside;
}

}  // namespace

#endif
