// Floats and codes, one piece (up to 64 elements of one block) at a time.
//
// `quantize` turns PIECE floats into PIECE codes, one byte each, high bits zero; `dequantize` turns them back.
// Both run over whole pieces: callers pad. How a code is chosen is written in kernels/reference/codes.py.

#pragma once
#include <type_traits>

#include "bits.h"

namespace {

template <int VALUE>
using Constant = std::integral_constant<int, VALUE>;

// f(the bits of a code, 1 to 8, as a constant).
template <class F>
inline void with_bits(int32_t bits, const F& f) {
    switch (bits) {
        case 1: return f(Constant<1>());
        case 2: return f(Constant<2>());
        case 3: return f(Constant<3>());
        case 4: return f(Constant<4>());
        case 5: return f(Constant<5>());
        case 6: return f(Constant<6>());
        case 7: return f(Constant<7>());
        default: return f(Constant<8>());
    }
}

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even and leaves the integer in the low bits

inline float clamp(float x, float low, float high) {
    x = x < high ? x : high;
    return x > low ? x : low;
}

// Stochastic rounding's random bits for each element of a row; see kernels/reference/draws.py.
struct Dice {
    uint64_t row_key;

    // out[i] = number(the 32 bits of element index + i)
    template <class T, class Number>
    inline void roll_as(int64_t index, T* __restrict out, int64_t n, const Number& number) const {
        while (n > 0) {
            int64_t here = std::min<int64_t>(n, (int64_t(1) << 32) - (index & 0xFFFFFFFF));
            uint64_t key = mix64(row_key + uint64_t(index >> 32));
            uint32_t first = uint32_t(key), second = uint32_t(key >> 32), base = uint32_t(index);
            for (int64_t i = 0; i < here; ++i) {
                uint32_t x = (base + uint32_t(i)) ^ first;
                x = (x ^ (x >> 16)) * 0x7FEB352Du;
                x ^= second;
                x = (x ^ (x >> 15)) * 0x846CA68Bu;
                out[i] = number(x ^ (x >> 16));
            }
            index += here, out += here, n -= here;
        }
    }

    // Numbers in [0, 1).
    void roll(int64_t index, float* out, int64_t n) const {
        roll_as(index, out, n, [](uint32_t bits) { return float(int32_t(bits >> 8)) * 0x1p-24f; });
    }
};

// -- integers -------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

inline __m512i join(__m128i a, __m128i b, __m128i c, __m128i d) {
    __m512i x = _mm512_castsi128_si512(a);
    x = _mm512_inserti32x4(x, b, 1);
    x = _mm512_inserti32x4(x, c, 2);
    return _mm512_inserti32x4(x, d, 3);
}

// 16 elements over the scale, at most `top`, rounded half to even. What is far below comes out far below.
inline __m512i rounded(const float* x, Scaling by, float top) {
    return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(by.inverse)), _mm512_set1_ps(top)));
}

template <int BITS, bool SIGNED_SCALE>
inline void quantize_int(const float* __restrict x, Scaling by, uint8_t* __restrict codes) {
    constexpr int top = (1 << (BITS - 1)) - 1, low = SIGNED_SCALE ? -top - 1 : -top;
    auto part = [&](int i) { return _mm512_cvtsepi32_epi8(rounded(x + 16 * i, by, float(top))); };
    __m512i all = join(part(0), part(1), part(2), part(3));
    if (low > -128) all = _mm512_max_epi8(all, _mm512_set1_epi8(char(low)));
    if (BITS < 8) all = _mm512_and_si512(all, _mm512_set1_epi8(char((1 << BITS) - 1)));
    _mm512_storeu_si512(codes, all);
}

template <int BITS>
inline void quantize_affine(const float* __restrict x, Scaling by, uint8_t* __restrict codes) {
    constexpr int top = (1 << BITS) - 1;
    auto part = [&](int i) {
        __m512i whole = _mm512_max_epi32(rounded(x + 16 * i, by, float(top)), _mm512_set1_epi32(-top));
        whole = _mm512_max_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(by.zero)), _mm512_setzero_si512());
        return _mm512_cvtusepi32_epi8(whole);
    };
    __m512i all = join(part(0), part(1), part(2), part(3));
    _mm512_storeu_si512(codes, BITS < 8 ? _mm512_min_epu8(all, _mm512_set1_epi8(char(top))) : all);
}

#else

template <int BITS, bool SIGNED_SCALE>
inline void quantize_int(const float* __restrict x, Scaling by, uint8_t* __restrict codes) {
    constexpr float top = float((1 << (BITS - 1)) - 1), low = SIGNED_SCALE ? -top - 1 : -top;
    for (int i = 0; i < PIECE; ++i) {
        float y = clamp(x[i] * by.inverse, low, top) + ROUNDER;
        codes[i] = uint8_t(as<uint32_t>(y) & ((1u << BITS) - 1));
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

#endif

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
inline void quantize_affine_randomly(const float* __restrict x, Scaling by, const float* __restrict draws, uint8_t* __restrict codes) {
    constexpr float top = float((1 << BITS) - 1);
    for (int i = 0; i < PIECE; ++i) {
        float y = x[i] * by.inverse, whole = std::floor(y);
        whole += draws[i] < y - whole ? 1.0f : 0.0f;
        codes[i] = uint8_t(clamp(clamp(whole, -top, top) + float(by.zero), 0.0f, top));
    }
}

// What decoding does with a value: writes it, or adds it to what is there.
template <bool ADD>
inline void put(float value, float& out) {
    out = ADD ? out + value : value;
}

template <int BITS, bool ADD>
inline void dequantize_int(const uint8_t* __restrict codes, Scaling by, float* __restrict out) {
#if defined(__AVX512F__)
    if constexpr (BITS <= 4) {  // the integers of up to 16 codes fit into one register, to be looked up
        constexpr int half = 1 << (BITS - 1);
        alignas(64) float integers[16];
        for (int i = 0; i < 16; ++i) integers[i] = float(((i & (2 * half - 1)) ^ half) - half);
        const __m512 table = _mm512_load_ps(integers), scale = _mm512_set1_ps(by.scale);
        for (int i = 0; i < PIECE; i += 16) {
            __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
            __m512 value = _mm512_add_ps(_mm512_mul_ps(_mm512_permutexvar_ps(code, table), scale), _mm512_setzero_ps());
            _mm512_storeu_ps(out + i, ADD ? _mm512_add_ps(_mm512_loadu_ps(out + i), value) : value);
        }
        return;
    }
#endif
    for (int i = 0; i < PIECE; ++i) {
        int32_t code = int8_t(uint8_t(codes[i] << (8 - BITS))) >> (8 - BITS);
        put<ADD>(float(code) * by.scale + 0.0f, out[i]);  // a zero times a negative scale is a zero all the same
    }
}

template <bool ADD>
inline void dequantize_affine(const uint8_t* __restrict codes, Scaling by, float* __restrict out) {
    constexpr float most = 0x1.fffffep+127f;
    for (int i = 0; i < PIECE; ++i) {
        float value = float(int32_t(codes[i]) - by.zero) * by.scale;
        value = value > most ? most : value;  // NaN is neither
        put<ADD>(value < -most ? -most : value, out[i]);
    }
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

}  // namespace
