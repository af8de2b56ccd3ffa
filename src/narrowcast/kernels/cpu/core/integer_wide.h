// Exact products of int8 matrices with VNNI.
//
// It multiplies unsigned bytes with signed ones, so a weight w counts as w + 128, and 128 times the sum of x, the excess of
// a vector, is taken off: sums are int32 that wrap around, so an overflow on the way takes nothing from the result.
//
// Few vectors: 64 elements of a row at a time, rows as they lie in memory. Many: the lanes of a register are 16 rows, four
// elements each, which takes a transposition of the weights but no sums across lanes.

#pragma once

#if defined(__AVX512VNNI__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "integer.h"

namespace {
using namespace nc;

constexpr int64_t MANY = 16;  // measured on Zen 4: rows of a thousand elements and more favour 24, shorter ones 12
constexpr int ROWS = 4;       // of few vectors: so many rows, and FEW vectors, at a time
constexpr int FEW = 6;
constexpr int LANES = 16;     // of many: rows in a register, up to three registers, and VECTORS, at a time
constexpr int64_t PANEL = 3 * LANES;
constexpr int VECTORS = 8;
constexpr int64_t DEPTH = 1024;  // elements of rows that are transposed at a time; less pays for sums that come and go

inline __m512i as_unsigned(__m512i weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(char(0x80))); }

// Of a part that begins at i: which of 64 elements are there.
inline __mmask64 there(int64_t i, int64_t k) { return i + 64 <= k ? ~__mmask64(0) : (__mmask64(1) << (k - i)) - 1; }

// f(0) ... f(N - 1), each argument a constant. Registers in arrays stay registers that way, where a loop that is unrolled
// comes too late for GCC: it keeps them in memory, at half the speed.
template <class F, int... N>
[[gnu::always_inline]] inline void each(std::integer_sequence<int, N...>, F f) {
    (f(std::integral_constant<int, N>()), ...);
}

template <int N, class F>
[[gnu::always_inline]] inline void each(F f) {
    each(std::make_integer_sequence<int, N>(), f);
}

// sums += unsigned times signed bytes, four to a lane. By hand, because GCC 12 takes two registers for the intrinsic's sums.
[[gnu::always_inline]] inline __m512i accumulated(__m512i sums, __m512i weights, __m512i x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
    return sums;
}

template <bool SOME>
inline __m512i load(__mmask64 mask, const int8_t* from) {
    return SOME ? _mm512_maskz_loadu_epi8(mask, from) : _mm512_loadu_si512(from);
}

// The sums of the lanes of four registers.
inline __m128i totals(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

void measure(const IntegerProduct& p, uint32_t* excess) {
    const __m512i none = _mm512_setzero_si512();
    for (int64_t b = 0; b < p.batch; ++b) {
        __m512i sum = none;
        for (int64_t i = 0; i < p.k; i += 64) {
            const __m512i x = _mm512_maskz_loadu_epi8(there(i, p.k), p.x + b * p.x_stride + i);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), x);
        }
        excess[b] = 128u * uint32_t(_mm_cvtsi128_si32(totals(sum, none, none, none)));
    }
}

// -- few vectors ---------------------------------------------------------------------------------------------------------

// Adds elements [begin, end) of vectors [b, b + COUNT) times `rows` rows, ROWS at most: in parts of 64, or the REST of one.
template <int COUNT, bool REST>
inline void add_rows(const IntegerProduct& p, int64_t begin, int64_t end, int64_t b, int64_t row, int rows) {
    const int8_t* weight[ROWS];
    for (int r = 0; r < ROWS; ++r) weight[r] = p.weight + (row + std::min(r, rows - 1)) * p.weight_stride;
    const int8_t* x = p.x + b * p.x_stride;
    const __mmask64 mask = REST ? there(begin, end) : ~__mmask64(0);
    __m512i sums[COUNT * ROWS];
    each<COUNT * ROWS>([&](auto j) { sums[j] = _mm512_setzero_si512(); });
    for (int64_t i = begin; i < end; i += 64) {
        __m512i w[ROWS];
        each<ROWS>([&](auto r) { w[r] = as_unsigned(load<REST>(mask, weight[r] + i)); });
        each<COUNT>([&](auto v) {
            const __m512i part = load<REST>(mask, x + v * p.x_stride + i);
            each<ROWS>([&](auto r) { sums[v * ROWS + r] = accumulated(sums[v * ROWS + r], w[r], part); });
        });
    }
    const __mmask8 stored = __mmask8((1 << rows) - 1);
    each<COUNT>([&](auto v) {
        int32_t* out = p.out + (b + v) * p.out_stride + row;
        const __m128i found = totals(sums[v * ROWS], sums[v * ROWS + 1], sums[v * ROWS + 2], sums[v * ROWS + 3]);
        const __m128i before = begin ? _mm_maskz_loadu_epi32(stored, out) : _mm_set1_epi32(int32_t(0u - p.excess[b + v]));
        _mm_mask_storeu_epi32(out, stored, _mm_add_epi32(before, found));
    });
}

template <int COUNT>
inline void of_rows(const IntegerProduct& p, int64_t b, int64_t row, int rows) {
    const int64_t whole = p.k / 64 * 64;
    if (whole) add_rows<COUNT, false>(p, 0, whole, b, row, rows);
    if (whole < p.k) add_rows<COUNT, true>(p, whole, p.k, b, row, rows);
}

void of_few(const IntegerProduct& p, int64_t from, int64_t to, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row += ROWS) {
        const int rows = int(std::min<int64_t>(ROWS, end - row));
        int64_t b = from;
        for (; b + FEW <= to; b += FEW) of_rows<FEW>(p, b, row, rows);
        switch (to - b) {
            case 5: of_rows<5>(p, b, row, rows); break;
            case 4: of_rows<4>(p, b, row, rows); break;
            case 3: of_rows<3>(p, b, row, rows); break;
            case 2: of_rows<2>(p, b, row, rows); break;
            case 1: of_rows<1>(p, b, row, rows); break;
            default: break;
        }
    }
}

// -- many vectors --------------------------------------------------------------------------------------------------------

// 16 registers of 16 numbers of 32 bits: columns become rows.
inline void transpose(__m512i (&m)[LANES]) {
    __m512i t[LANES];
    each<8>([&](auto i) {
        constexpr int j = 2 * i;
        t[j] = _mm512_unpacklo_epi32(m[j], m[j + 1]), t[j + 1] = _mm512_unpackhi_epi32(m[j], m[j + 1]);
    });
    each<4>([&](auto i) {
        constexpr int j = 4 * i;
        m[j] = _mm512_unpacklo_epi64(t[j], t[j + 2]), m[j + 1] = _mm512_unpackhi_epi64(t[j], t[j + 2]);
        m[j + 2] = _mm512_unpacklo_epi64(t[j + 1], t[j + 3]), m[j + 3] = _mm512_unpackhi_epi64(t[j + 1], t[j + 3]);
    });
    each<4>([&](auto j) {
        t[j] = _mm512_shuffle_i32x4(m[j], m[j + 4], 0x88), t[j + 4] = _mm512_shuffle_i32x4(m[j], m[j + 4], 0xDD);
        t[j + 8] = _mm512_shuffle_i32x4(m[j + 8], m[j + 12], 0x88);
        t[j + 12] = _mm512_shuffle_i32x4(m[j + 8], m[j + 12], 0xDD);
    });
    each<8>([&](auto j) {
        m[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88), m[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xDD);
    });
}

// Elements [begin, end) of 16 rows, the last one again for those that are not there; 16 times 4 bytes every `width` bytes.
inline void pack(const IntegerProduct& p, int64_t row, int64_t last, int64_t begin, int64_t end, uint8_t* to,
                 int64_t width) {
    for (int64_t i = begin; i < end; i += 64) {
        __m512i part[LANES];
        each<LANES>([&](auto r) {
            const int8_t* from = p.weight + std::min(row + r, last) * p.weight_stride + i;
            part[r] = as_unsigned(_mm512_maskz_loadu_epi8(there(i, end), from));
        });
        transpose(part);
        for (int j = 0; j < LANES && i + 4 * j < end; ++j, to += width) _mm512_store_si512(to, part[j]);
    }
}

// Adds elements [begin, end) of vectors [b, b + COUNT) times a panel of COLUMNS registers of rows: in fours, or the REST of
// one, behind which x counts as zeros.
template <int COLUMNS, int COUNT, bool REST>
inline void add_panel(const IntegerProduct& p, const uint8_t* panel, int64_t begin, int64_t end, int64_t b, int64_t row,
                      __mmask16 last) {
    const int8_t* x = p.x + b * p.x_stride + begin;
    int32_t* out = p.out + b * p.out_stride + row;
    __m512i sums[COUNT * COLUMNS];
    each<COUNT * COLUMNS>([&](auto j) {
        const int column = j % COLUMNS;
        const __mmask16 mask = column == COLUMNS - 1 ? last : 0xFFFF;
        sums[j] = begin ? _mm512_maskz_loadu_epi32(mask, out + j / COLUMNS * p.out_stride + column * LANES)
                        : _mm512_set1_epi32(int32_t(0u - p.excess[b + j / COLUMNS]));
    });
    for (int64_t i = 0; i < end - begin; i += 4, panel += COLUMNS * 64) {
        __m512i w[COLUMNS];
        each<COLUMNS>([&](auto c) { w[c] = _mm512_load_si512(panel + c * 64); });
        each<COUNT>([&](auto v) {
            int32_t four = 0;
            std::memcpy(&four, x + v * p.x_stride + i, REST ? size_t(end - begin) : 4);
            const __m512i all = _mm512_set1_epi32(four);
            each<COLUMNS>([&](auto c) { sums[v * COLUMNS + c] = accumulated(sums[v * COLUMNS + c], w[c], all); });
        });
    }
    each<COUNT * COLUMNS>([&](auto j) {
        const int column = j % COLUMNS;
        const __mmask16 mask = column == COLUMNS - 1 ? last : 0xFFFF;
        _mm512_mask_storeu_epi32(out + j / COLUMNS * p.out_stride + column * LANES, mask, sums[j]);
    });
}

template <int COLUMNS, bool REST>
inline void add_columns(const IntegerProduct& p, int64_t begin, int64_t past, int64_t from, int64_t to, int64_t first,
                        int64_t end) {
    alignas(64) uint8_t panel[(REST ? 4 : DEPTH) * LANES * COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) pack(p, first + c * LANES, end - 1, begin, past, panel + 64 * c, 64 * COLUMNS);
    const __mmask16 last = __mmask16((1u << (end - first - LANES * (COLUMNS - 1))) - 1);
    int64_t b = from;
    for (; b + VECTORS <= to; b += VECTORS) add_panel<COLUMNS, VECTORS, REST>(p, panel, begin, past, b, first, last);
    if (b + 4 <= to) add_panel<COLUMNS, 4, REST>(p, panel, begin, past, b, first, last), b += 4;
    for (; b < to; ++b) add_panel<COLUMNS, 1, REST>(p, panel, begin, past, b, first, last);
}

template <int COLUMNS>
inline void of_columns(const IntegerProduct& p, int64_t from, int64_t to, int64_t first, int64_t end) {
    const int64_t whole = p.k / 4 * 4;
    for (int64_t begin = 0; begin < whole; begin += DEPTH) {
        add_columns<COLUMNS, false>(p, begin, std::min(whole, begin + DEPTH), from, to, first, end);
    }
    if (whole < p.k) add_columns<COLUMNS, true>(p, whole, p.k, from, to, first, end);
}

void of_many(const IntegerProduct& p, int64_t from, int64_t to, int64_t first, int64_t end) {
    if (end - first > 2 * LANES) of_columns<3>(p, from, to, first, end);
    else if (end - first > LANES) of_columns<2>(p, from, to, first, end);
    else of_columns<1>(p, from, to, first, end);
}

}  // namespace

#endif
