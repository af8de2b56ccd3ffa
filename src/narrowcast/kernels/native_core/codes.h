// Floats and codes, one piece (up to 64 elements of one group) at a time.
//
// `quantize` turns PIECE floats into PIECE codes, one byte each, high bits zero; `dequantize` turns them back.
// Both run over whole pieces: callers pad. How a code is chosen is written in ../reference.py.

#pragma once
#include "bits.h"

namespace {

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits

inline float clamp(float x, float low, float high) {
    x = x < high ? x : high;
    return x > low ? x : low;
}

// Stochastic rounding's number in [0, 1) for each element of a row; see reference.uniform.
struct Dice {
    uint64_t row_key;

    void roll(int64_t index, float* out, int64_t n) const {
        while (n > 0) {
            int64_t here = std::min<int64_t>(n, (int64_t(1) << 32) - (index & 0xFFFFFFFF));
            uint64_t key = mix64(row_key + uint64_t(index >> 32));
            uint32_t first = uint32_t(key), second = uint32_t(key >> 32), base = uint32_t(index);
            for (int64_t i = 0; i < here; ++i) {
                uint32_t x = (base + uint32_t(i)) ^ first;
                x = (x ^ (x >> 16)) * 0x7FEB352Du;
                x ^= second;
                x = (x ^ (x >> 15)) * 0x846CA68Bu;
                x ^= x >> 16;
                out[i] = float(int32_t(x >> 8)) * 0x1p-24f;
            }
            index += here, out += here, n -= here;
        }
    }
};

// -- integers -------------------------------------------------------------------------------------------------------

template <int BITS, bool SIGNED_SCALE>
inline void quantize_int(const float* __restrict x, Scaling by, uint8_t* __restrict codes) {
    constexpr float top = float((1 << (BITS - 1)) - 1), low = SIGNED_SCALE ? -top - 1 : -top;
    for (int i = 0; i < PIECE; ++i) {
        float y = clamp(x[i] * by.inverse, low, top) + ROUNDER;
        codes[i] = uint8_t(as<uint32_t>(y) & ((1u << BITS) - 1));
    }
}

template <int BITS>
inline void quantize_int_randomly(const float* __restrict x, Scaling by, const float* __restrict draws, uint8_t* __restrict codes) {
    constexpr float top = float((1 << (BITS - 1)) - 1);
    for (int i = 0; i < PIECE; ++i) {
        float y = x[i] * by.inverse, whole = std::floor(y);
        whole += draws[i] < y - whole ? 1.0f : 0.0f;
        codes[i] = uint8_t(int32_t(clamp(whole, -top, top)) & ((1 << BITS) - 1));
    }
}

template <int BITS>
inline void quantize_affine(const float* __restrict x, Scaling by, const float* __restrict draws, uint8_t* __restrict codes) {
    constexpr float top = float((1 << BITS) - 1);
    for (int i = 0; i < PIECE; ++i) {
        float y = x[i] * by.inverse, whole = std::floor(y);
        whole += draws[i] < y - whole ? 1.0f : 0.0f;
        codes[i] = uint8_t(clamp(clamp(whole, -top, top) + float(by.zero), 0.0f, top));
    }
}

template <int BITS>
inline void quantize_affine(const float* __restrict x, Scaling by, uint8_t* __restrict codes) {
    constexpr float top = float((1 << BITS) - 1);
    for (int i = 0; i < PIECE; ++i) {
        float whole = (clamp(x[i] * by.inverse, -top, top) + ROUNDER) - ROUNDER;
        codes[i] = uint8_t(as<uint32_t>(clamp(whole + float(by.zero), 0.0f, top) + ROUNDER));
    }
}

// What decoding does with a value: writes it, or adds it to what is there.
template <bool ADD>
inline void put(float value, float& out) {
    out = ADD ? out + value : value;
}

template <int BITS, bool ADD>
inline void dequantize_int(const uint8_t* __restrict codes, Scaling by, float* __restrict out) {
    for (int i = 0; i < PIECE; ++i) {
        int32_t code = int8_t(uint8_t(codes[i] << (8 - BITS))) >> (8 - BITS);
        put<ADD>(float(code) * by.scale + 0.0f, out[i]);  // a zero times a negative scale is a zero all the same
    }
}

template <bool ADD>
inline void dequantize_affine(const uint8_t* __restrict codes, Scaling by, float* __restrict out) {
    for (int i = 0; i < PIECE; ++i) put<ADD>(float(int32_t(codes[i]) - by.zero) * by.scale, out[i]);
}

// -- signs -----------------------------------------------------------------------------------------------------------

inline void quantize_sign(const float* __restrict x, uint8_t* __restrict codes) {
    for (int i = 0; i < PIECE; ++i) codes[i] = uint8_t(as<uint32_t>(x[i]) >> 31);
}

template <bool ADD>
inline void dequantize_sign(const uint8_t* __restrict codes, Scaling by, float* __restrict out) {
    for (int i = 0; i < PIECE; ++i) put<ADD>(as<float>(as<uint32_t>(by.scale) ^ (uint32_t(codes[i]) << 31)), out[i]);
}

// -- narrow floats, plain or scaled ------------------------------------------------------------------------------------

template <class Format>
inline void quantize_float(const float* __restrict x, float inverse, uint8_t* __restrict codes) {
    for (int i = 0; i < PIECE; ++i) codes[i] = uint8_t(Format::narrow(x[i] * inverse));
}

template <class Format, bool ADD>
inline void dequantize_float(const uint8_t* __restrict codes, float scale, float* __restrict out) {
    for (int i = 0; i < PIECE; ++i) put<ADD>(Format::widen(codes[i]) * scale, out[i]);
}

// -- levels: the code of y is how many thresholds lie below it -----------------------------------------------------------

#if defined(__AVX512VBMI__)

// A table of 1 << BITS floats in registers.
template <int BITS>
struct Registers {
    static constexpr int COUNT = BITS <= 4 ? 1 : 1 << (BITS - 4);
    __m512 part[COUNT];

    explicit Registers(const float* table) {
        for (int i = 0; i < COUNT; ++i) {
            part[i] = _mm512_maskz_loadu_ps(BITS < 4 ? (1u << (1 << BITS)) - 1 : 0xFFFF, table + 16 * i);
        }
    }

    inline __m512 operator[](__m512i index) const {
        if constexpr (BITS <= 4) return _mm512_permutexvar_ps(index, part[0]);
        __m512 found[COUNT > 1 ? COUNT / 2 : 1];
        for (int i = 0; i < COUNT / 2; ++i) found[i] = _mm512_permutex2var_ps(part[2 * i], index, part[2 * i + 1]);
        for (int bit = 5, left = COUNT / 2; left > 1; ++bit, left /= 2) {
            __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(1 << bit));
            for (int i = 0; i < left / 2; ++i) found[i] = _mm512_mask_mov_ps(found[2 * i], upper, found[2 * i + 1]);
        }
        return found[0];
    }
};

// One step of a binary search: the thresholds that it may compare with, in the order of the index so far.
template <int STEP>
inline void search(const float* nodes, __m512 y, __m512i& index) {
    const Registers<STEP> table(nodes + (1 << STEP) - 1);
    __mmask16 above = _mm512_cmp_ps_mask(y, table[index], _CMP_GT_OQ);
    index = _mm512_add_epi32(index, index);
    index = _mm512_mask_add_epi32(index, above, index, _mm512_set1_epi32(1));
}

template <int BITS>
inline void quantize_levels(const float* __restrict x, Scaling by, const float* __restrict nodes, uint8_t* __restrict codes) {
    for (int i = 0; i < PIECE; i += 16) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(by.inverse));
        __m512i index = _mm512_setzero_si512();
        search<0>(nodes, y, index);
        if constexpr (BITS > 1) search<1>(nodes, y, index);
        if constexpr (BITS > 2) search<2>(nodes, y, index);
        if constexpr (BITS > 3) search<3>(nodes, y, index);
        if constexpr (BITS > 4) search<4>(nodes, y, index);
        if constexpr (BITS > 5) search<5>(nodes, y, index);
        if constexpr (BITS > 6) search<6>(nodes, y, index);
        if constexpr (BITS > 7) search<7>(nodes, y, index);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(index));
    }
}

template <int BITS, bool ADD>
inline void dequantize_levels(const uint8_t* __restrict codes, Scaling by, const float* __restrict levels, float* __restrict out) {
    const Registers<BITS> table(levels);
    for (int i = 0; i < PIECE; i += 16) {
        __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        __m512 value = _mm512_mul_ps(table[index], _mm512_set1_ps(by.scale));
        _mm512_storeu_ps(out + i, ADD ? _mm512_add_ps(_mm512_loadu_ps(out + i), value) : value);
    }
}

#else

template <int BITS>
inline void quantize_levels(const float* __restrict x, Scaling by, const float* __restrict nodes, uint8_t* __restrict codes) {
    for (int i = 0; i < PIECE; ++i) {
        float y = x[i] * by.inverse;
        uint32_t index = 0;
        for (int step = 0; step < BITS; ++step) index = 2 * index + (y > nodes[(1u << step) - 1 + index] ? 1 : 0);
        codes[i] = uint8_t(index);
    }
}

template <int BITS, bool ADD>
inline void dequantize_levels(const uint8_t* __restrict codes, Scaling by, const float* __restrict levels, float* __restrict out) {
    for (int i = 0; i < PIECE; ++i) put<ADD>(levels[codes[i]] * by.scale, out[i]);
}

#endif

}  // namespace
