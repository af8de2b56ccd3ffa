// Weights and x as pairs of bf16, which one instruction multiplies and adds up in fp32 (AVX-512 BF16).
//
// It takes denormals for zero. So vectors far from one are brought nearer to it by a power of two, which what they are multiplied
// to is divided by, and rows with scales far from one are multiplied in fp32.

#pragma once
#include "linear_codes.h"

#if defined(__AVX512BF16__)
#include <vector>

namespace {

constexpr float FAR = 0x1p16f;        // x beyond this, or below its inverse, is brought nearer to one
constexpr float FAR_SCALE = 0x1p40f;  // rows with scales beyond this, or below its inverse, take the plain way

inline uint16_t nearest_bf16(float x) { return uint16_t(x == x ? (as<uint32_t>(x) + 0x7FFF + (as<uint32_t>(x) >> 16 & 1)) >> 16 : 0x7FC0); }

inline float nearer(uint32_t most) {
    if (most >= 0x7F800000u || most == 0 || (most < as<uint32_t>(FAR) && most >= as<uint32_t>(1.0f / FAR))) return 1.0f;
    const uint32_t exponent = std::min(std::max(most >> 23, 2u), 252u);
    return as<float>((254u - exponent) << 23);
}

// Whether no level is so large or so small that its products with x near one could overflow or vanish.
inline bool levels_near_one(const Spec& spec) {
    for (int i = 0; spec.element == LEVELS && i < 1 << spec.bits; ++i) {
        const float magnitude = std::fabs(spec.levels[i]);
        if (magnitude > 0x1p20f || (magnitude != 0.0f && magnitude < 0x1p-20f)) return false;
    }
    return true;
}

// Pairs of 4-bit codes are elements i and i + 4 of eight.
inline bool crossed(const Spec& spec) { return spec.bits == 4 && (spec.element == INT || spec.element == LEVELS); }

inline void cross(std::vector<uint16_t>& x) {
    for (size_t i = 0; i < x.size(); i += 8) {
        uint16_t eight[8];
        std::memcpy(eight, &x[i], 16);
        for (size_t j = 0; j < 8; ++j) x[i + j] = eight[j / 2 + 4 * (j % 2)];
    }
}

// What sixteen codes stand for, in bf16; twice, for the neighbour's lowest bit is a part of an index of five bits.
inline __m512i twice_in_bf16(const Spec& spec) {
    uint16_t levels[32];
    for (int i = 0; i < 32; ++i) levels[i] = nearest_bf16(spec.element == INT ? float((i % 16 ^ 8) - 8) : spec.levels[i % 16]);
    return _mm512_loadu_si512(levels);
}

// Which scales are far from one, or no numbers.
inline __mmask16 far_from_one(__m512 scales) {
    const __m512 size = _mm512_abs_ps(scales);
    const __mmask16 near = _mm512_cmp_ps_mask(size, _mm512_set1_ps(FAR_SCALE), _CMP_LE_OQ) &
                           _mm512_cmp_ps_mask(size, _mm512_set1_ps(1.0f / FAR_SCALE), _CMP_GE_OQ);
    return __mmask16(~(near | _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_EQ_OQ)));
}

// bf16 near one, and what it was multiplied with for that.
inline float bring_near_one(const uint16_t* x, int64_t numel, uint16_t* near) {
    uint16_t most = 0;
    for (int64_t i = 0; i < numel; ++i) most = std::max(most, uint16_t(x[i] & 0x7FFF));
    const float by = nearer(uint32_t(most) << 16);
    if (by == 1.0f) std::memcpy(near, x, size_t(numel) * 2);
    else for (int64_t i = 0; i < numel; ++i) near[i] = uint16_t(as<uint32_t>(as<float>(uint32_t(x[i]) << 16) * by) >> 16);
    return by;
}

}  // namespace
#endif
