// Floats in, floats out: conversions between fp32 and the other float formats, 64 elements at a time.
//
// Every cast rounds half to even, saturates finite values and keeps infinities and NaN, which become the one canonical
// NaN of their format. Loops are written for the compiler to vectorise: no branches, integers where rounding matters.

#pragma once
#include <cmath>
#include <cstring>

#include "core.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
using namespace nc;

// Encoded rows may start at any byte.
typedef uint16_t Half16 __attribute__((aligned(1), may_alias));

constexpr int64_t PIECE = 64;  // elements handled at a time; a multiple of every vector width

template <class To, class From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// condition ? yes : no without a branch, so that loops vectorise whatever the compiler thinks of the two sides.
inline uint32_t select(bool condition, uint32_t yes, uint32_t no) { return no ^ ((yes ^ no) & (0u - uint32_t(condition))); }

// A float format with MANTISSA stored bits and this exponent bias, in the low bits of an integer. TOP is the code of its
// largest finite number, NAN_CODE its NaN; a format without infinities has INF_CODE == NAN_CODE.
template <int MANTISSA, int BIAS, uint32_t TOP, uint32_t INF_CODE, uint32_t NAN_CODE, int BITS>
struct Narrow {
    static constexpr int SHIFT = 23 - MANTISSA;
    static constexpr uint32_t REBIAS = uint32_t(127 - BIAS) << 23;
    static constexpr uint32_t SMALLEST_NORMAL = REBIAS + (1u << 23);  // fp32 bits of 2^(1 - BIAS)
    // Adding this number leaves exactly the subnormal's bits at the bottom of the fp32 mantissa.
    static constexpr uint32_t MAGIC = uint32_t(127 + 23 + 1 - BIAS - MANTISSA) << 23;
    static constexpr uint32_t SIGN_BIT = 1u << (BITS - 1);

    static inline uint32_t narrow(float x) {
        uint32_t bits = as<uint32_t>(x), magnitude = bits & 0x7FFFFFFFu;
        uint32_t sign = (bits >> 31) << (BITS - 1);
        uint32_t normal = ((magnitude + ((1u << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) - REBIAS) >> SHIFT;
        uint32_t subnormal = as<uint32_t>(as<float>(magnitude) + as<float>(MAGIC)) - MAGIC;
        uint32_t code = select(magnitude < SMALLEST_NORMAL, subnormal, normal);
        code = select(magnitude >= TOP_BITS, TOP, code) | sign;
        code = select(magnitude == 0x7F800000u, INF_CODE == NAN_CODE ? NAN_CODE : INF_CODE | sign, code);
        return select(magnitude > 0x7F800000u, NAN_CODE, code);
    }

    static inline float widen(uint32_t code) {
        uint32_t magnitude = code & (SIGN_BIT - 1), sign = (code & SIGN_BIT) << (32 - BITS);
        uint32_t normal = (magnitude << SHIFT) + REBIAS;
        float small = float(int32_t(magnitude)) * as<float>(uint32_t(127 + 1 - BIAS - MANTISSA) << 23);
        uint32_t bits = select(magnitude < (1u << MANTISSA), as<uint32_t>(small), normal) | sign;
        if (INF_CODE != NAN_CODE) bits = select(magnitude == INF_CODE, 0x7F800000u | sign, bits);
        bool nan = INF_CODE != NAN_CODE ? magnitude > INF_CODE : magnitude == NAN_CODE;
        return as<float>(select(nan, 0x7FC00000u, bits));
    }

   private:
    // fp32 bits of the largest finite number
    static constexpr uint32_t TOP_BITS = (TOP << SHIFT) + REBIAS;
};

using Half = Narrow<10, 15, 0x7BFF, 0x7C00, 0x7E00, 16>;
using Fp8E4M3 = Narrow<3, 7, 0x7E, 0x7F, 0x7F, 8>;
using Fp8E5M2 = Narrow<2, 15, 0x7B, 0x7C, 0x7F, 8>;

struct Brain {
    static inline uint32_t narrow(float x) {
        uint32_t bits = as<uint32_t>(x), magnitude = bits & 0x7FFFFFFFu;
        uint32_t code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        uint32_t sign = (bits >> 16) & 0x8000u;
        code = select(magnitude >= 0x7F7F0000u, 0x7F7Fu | sign, code);
        code = select(magnitude == 0x7F800000u, 0x7F80u | sign, code);
        return select(magnitude > 0x7F800000u, 0x7FC0u, code);
    }
    static inline float widen(uint32_t code) {
        uint32_t bits = code << 16;
        return as<float>(select((bits & 0x7FFFFFFFu) > 0x7F800000u, 0x7FC00000u, bits));
    }
};

inline float canonical(float x) {
    uint32_t bits = as<uint32_t>(x);
    return as<float>(select((bits & 0x7FFFFFFFu) > 0x7F800000u, 0x7FC00000u, bits));
}

inline float from_double(double x) {
    float y = float(x);
    bool overflowed = std::fabs(x) < HUGE_VAL && std::fabs(y) == HUGE_VALF;
    y = overflowed ? std::copysign(3.40282346638528859812e38f, y) : y;
    return canonical(y);
}

// fp16 has instructions of its own where F16C is there; they leave saturation and NaN to us.
inline void widen_half(const Half16* in, float* out, int64_t n) {
#if defined(__AVX512F__)
    for (; n >= 16; n -= 16, in += 16, out += 16) {
        __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
        x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
        _mm512_storeu_ps(out, x);
    }
#elif defined(__F16C__)
    for (; n >= 8; n -= 8, in += 8, out += 8) {
        const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
        const __m256 canonical = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
        _mm256_storeu_ps(out, _mm256_blendv_ps(x, canonical, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    }
#endif
    for (int64_t i = 0; i < n; ++i) out[i] = Half::widen(in[i]);
}

inline void narrow_half(const float* in, Half16* out, int64_t n) {
#if defined(__AVX512F__)
    const __m512i most = _mm512_set1_epi32(0x7FFFFFFF), infinity = _mm512_set1_epi32(0x7F800000);
    for (; n >= 16; n -= 16, in += 16, out += 16) {
        __m512i bits = _mm512_loadu_si512(in);
        __m512i magnitude = _mm512_and_si512(bits, most);
        // Cut finite magnitudes at 65504; leave infinity and NaN to the instruction, then make NaN the canonical one.
        __m512i cut = _mm512_or_si512(_mm512_min_epu32(magnitude, _mm512_set1_epi32(0x477FE000)), _mm512_andnot_si512(most, bits));
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmplt_epu32_mask(magnitude, infinity), cut);
        __m256i code = _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        code = _mm256_mask_mov_epi16(code, _mm512_cmpgt_epu32_mask(magnitude, infinity), _mm256_set1_epi16(0x7E00));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), code);
    }
#endif
    for (int64_t i = 0; i < n; ++i) out[i] = uint16_t(Half::narrow(in[i]));
}

// n floats of any dtype as fp32. fp32 itself is used where it lies.
inline const float* load(const Floats& row, int64_t begin, int64_t n, float* buffer) {
    begin -= row.origin;
    switch (row.dtype) {
        case F32: return static_cast<const float*>(row.data) + begin;
        case F16: widen_half(static_cast<const Half16*>(row.data) + begin, buffer, n); break;
        case B16: {
            const Half16* in = static_cast<const Half16*>(row.data) + begin;
            for (int64_t i = 0; i < n; ++i) buffer[i] = Brain::widen(in[i]);
            break;
        }
        default: {
            const double* in = static_cast<const double*>(row.data) + begin;
            for (int64_t i = 0; i < n; ++i) buffer[i] = from_double(in[i]);
        }
    }
    return buffer;
}

// Asks memory for elements that will be wanted soon.
inline void fetch(const Floats& row, int64_t begin, int64_t n) {
    const int64_t size = row.dtype == F32 ? 4 : row.dtype == F64 ? 8 : 2;
    const char* at = static_cast<const char*>(row.data) + (begin - row.origin) * size;
    for (int64_t line = 0; line < n * size; line += 64) __builtin_prefetch(at + line);
}

// n fp32 values into an output of any dtype.
inline void store(const float* in, void* out, int32_t dtype, int64_t begin, int64_t n) {
    switch (dtype) {
        case F32: std::memcpy(static_cast<float*>(out) + begin, in, size_t(n) * 4); break;
        case F16: narrow_half(in, static_cast<Half16*>(out) + begin, n); break;
        case B16: {
            Half16* to = static_cast<Half16*>(out) + begin;
            for (int64_t i = 0; i < n; ++i) to[i] = uint16_t(Brain::narrow(in[i]));
            break;
        }
        default: {
            double* to = static_cast<double*>(out) + begin;
            for (int64_t i = 0; i < n; ++i) to[i] = double(in[i]);
        }
    }
}

}  // namespace
