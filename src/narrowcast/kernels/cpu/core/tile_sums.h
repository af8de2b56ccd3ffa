// A tile of 32 rows times a group of vectors, whose sums stay in registers.

#pragma once
#include "tile_x.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int AHEAD = 3;  // lines of a group that are asked for ahead

// Where the sums of a tile come from and go to: y is [vector][row].
template <int VECTORS>
NC_FORCED void load_sums(const float* y, __m512 (&sum)[VECTORS][2]) {
#pragma GCC unroll 14
    for (int b = 0; b < VECTORS; ++b) {
        sum[b][0] = _mm512_load_ps(y + b * PANEL);
        sum[b][1] = _mm512_load_ps(y + b * PANEL + LANES);
    }
}

template <int VECTORS>
NC_FORCED void store_sums(const __m512 (&sum)[VECTORS][2], float* y) {
#pragma GCC unroll 14
    for (int b = 0; b < VECTORS; ++b) {
        _mm512_store_ps(y + b * PANEL, sum[b][0]);
        _mm512_store_ps(y + b * PANEL + LANES, sum[b][1]);
    }
}

// x lies in the order in which it is read, and large batches in the third-level cache.
template <int VECTORS>
NC_FORCED void fetch(const float* x) {
#pragma GCC unroll 14
    for (int b = 0; b < VECTORS; ++b) __builtin_prefetch(x + (AHEAD * VECTORS + b) * LINE, 0, 3);
}

// Codes that the next tile is decoded from. They are asked for a few at a time while this tile is multiplied: all at once, while
// it was decoded, they held up its own loads. (Those of a tile farther off would be driven out of the cache again by x.)
struct Coming {
    const uint8_t* const* row;
    int64_t offset;           // in a row
    int64_t next, end, each;  // cache lines: the first of each row, then the second; how many for a line of a group

    NC_FORCED void fetch() {
        for (const int64_t until = std::min(next + each, end); next < until; ++next) {
            __builtin_prefetch(row[next % PANEL] + offset + next / PANEL * 64, 0, 2);
        }
    }
};

// What a group is multiplied with.
struct Tile {
    const float* words;
    const float* scales;  // of the first segment, [segment][row]; for pairs
    int64_t lines, segment;
};

template <class Kind>
NC_FORCED __m512 add_product(__m512 sum, __m512 weight, __m512 x) {
    if constexpr (Kind::PER == 1) return _mm512_fmadd_ps(weight, x, sum);
    else return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)x);
}

// Lines of words times lines of x, which both move on.
template <class Kind, int VECTORS>
NC_FORCED void add_lines(const float*& words, int64_t lines, const float*& x, __m512 (&sum)[VECTORS][2], Coming& coming) {
    for (const float* end = x + lines * VECTORS * LINE; x < end; x += VECTORS * LINE) {
        fetch<VECTORS>(x);
        coming.fetch();
#pragma GCC unroll 4
        for (int i = 0; i < LINE; ++i, words += PANEL) {
            const __m512 first = _mm512_load_ps(words), second = _mm512_load_ps(words + LANES);
#pragma GCC unroll 14
            for (int b = 0; b < VECTORS; ++b) {
                const __m512 one = _mm512_set1_ps(x[b * LINE + i]);
                sum[b][0] = add_product<Kind>(sum[b][0], first, one);
                sum[b][1] = add_product<Kind>(sum[b][1], second, one);
            }
        }
    }
}

template <class Kind, int VECTORS>
__attribute__((noinline)) void add_scaled(const Tile& tile, const float* x, float* y, Coming& of_all) {
    __m512 sum[VECTORS][2];
    load_sums(y, sum);
    const float* words = tile.words;
    Coming coming = of_all;
    add_lines<Kind>(words, tile.lines, x, sum, coming);
    of_all.next = coming.next;
    store_sums(sum, y);
}

// The same, and the sums of every segment are multiplied with its scales.
template <int VECTORS>
__attribute__((noinline)) void add_unscaled(const Tile& tile, const float* x, float* y, Coming& of_all) {
    const float *words = tile.words, *scales = tile.scales;
    Coming coming = of_all;
    for (int64_t lines = tile.lines; lines > 0; lines -= tile.segment, scales += PANEL) {
        __m512 sum[VECTORS][2] = {};
        add_lines<Pair>(words, std::min(lines, tile.segment), x, sum, coming);
        const __m512 first = _mm512_load_ps(scales), second = _mm512_load_ps(scales + LANES);
#pragma GCC unroll 14
        for (int b = 0; b < VECTORS; ++b) {
            float* total = y + b * PANEL;
            _mm512_store_ps(total, _mm512_fmadd_ps(sum[b][0], first, _mm512_load_ps(total)));
            _mm512_store_ps(total + LANES, _mm512_fmadd_ps(sum[b][1], second, _mm512_load_ps(total + LANES)));
        }
    }
    of_all.next = coming.next;
}

template <class Kind, int... N>
inline void add_group(int64_t vectors, const Tile& tile, const float* x, float* y, Coming& coming, std::integer_sequence<int, N...>) {
    using Way = void (*)(const Tile&, const float*, float*, Coming&);
    if constexpr (Kind::SCALED) {
        static constexpr Way ways[] = {add_scaled<Kind, N + 1>...};
        ways[vectors - 1](tile, x, y, coming);
    } else {
        static constexpr Way ways[] = {add_unscaled<N + 1>...};
        ways[vectors - 1](tile, x, y, coming);
    }
}

}  // namespace
#endif
