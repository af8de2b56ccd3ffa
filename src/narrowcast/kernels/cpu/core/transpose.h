// Sixteen vectors of words as the columns of sixteen others.

#pragma once
#include "linear_codes.h"

#if defined(__AVX512BF16__)
namespace {

// Word i of row r and word r of row i change places.
NC_FORCED void transpose(Bits (&at)[LANES]) {
    __m512i a[LANES], b[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)at[i], (__m512i)at[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)at[i], (__m512i)at[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i first = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), second = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xDD);
        const __m512i third = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), last = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xDD);
        at[i] = (Bits)_mm512_shuffle_i32x4(first, third, 0x88);
        at[i + 8] = (Bits)_mm512_shuffle_i32x4(first, third, 0xDD);
        at[i + 4] = (Bits)_mm512_shuffle_i32x4(second, last, 0x88);
        at[i + 12] = (Bits)_mm512_shuffle_i32x4(second, last, 0xDD);
    }
}

}  // namespace
#endif
