// Rows of 4-bit codes times few vectors of bf16: codes are looked up as bf16 and multiplied in pairs (AVX-512 BF16).
//
// For codes whose values are exact in bf16. Steps and lanes are those of linear_codes.h, with two elements in a lane: vector J of a
// step has elements 8 i + J and 8 i + J + 4 in lane i, as x has.

#pragma once
#include "brain_pairs.h"
#include "linear_rows.h"

#if defined(__AVX512BF16__)
namespace {

inline bool exact_pairs(const Spec& spec, int32_t dtype) {
    if (dtype != B16 || !crossed(spec) || !levels_near_one(spec) || !__builtin_cpu_supports("avx512bf16")) return false;
    uint32_t lower = 0;
    for (int i = 0; spec.element == LEVELS && i < 16; ++i) lower |= as<uint32_t>(spec.levels[i]) & 0xFFFFu;
    return lower == 0;
}

// Element 8 i + J is the lower half of lane i of vector J, and 8 i + J + 4 the upper one.
inline void prepare_pairs(const Spec& spec, const Steps& steps, const void* x, float* out, float* gain) {
    std::vector<uint16_t> near(size_t(steps.all * steps.size));
    *gain = 1.0f / bring_near_one(static_cast<const uint16_t*>(x), spec.numel, near.data());
    for (int64_t step = 0; step < steps.all; ++step) {
        uint16_t dealt[8 * LANES];
        const uint16_t* from = &near[size_t(step * steps.size)];
        for (int j = 0; j < 4; ++j) {
            for (int i = 0; i < 2 * LANES; ++i) dealt[j * 2 * LANES + i] = from[i / 2 * 8 + j + i % 2 * 4];
        }
        std::memcpy(out + step * 4 * LANES, dealt, sizeof dealt);
    }
}

// The quad of rows from `first` on times BATCH vectors.
template <int BATCH>
__attribute__((noinline)) void multiply_pairs(__m512i table, const Steps& steps, const RowGroup& group, int first, const float* x,
                                              int64_t x_stride, float* y, int64_t ahead) {
    __m512 total[ROWS][BATCH] = {};
    const bool several = steps.blocks > 1;
    const float* scales = &group.scales[size_t(first * group.stride)];
    int64_t step = 0;
    for (int64_t block = 0; step < steps.all; block += steps.blocks) {
        __m512 sum[ROWS][BATCH] = {};
        for (const int64_t end = std::min(step + steps.flush, steps.all); step < end; ++step) {
            __m512i words[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const uint8_t* at = step < steps.whole ? group.row[first + r] + step * 64 : group.tail[first + r];
                __builtin_prefetch(at + ahead, 0, 2);
                words[r] = _mm512_loadu_si512(at);
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    const __m512bh weight = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(words[r], unsigned(4 * j)), table);
#pragma GCC unroll 2
                    for (int b = 0; b < BATCH; ++b) {
                        const __m512bh some = (__m512bh)_mm512_loadu_ps(x + b * x_stride + (step * 4 + j) * LANES);
                        sum[r][b] = _mm512_dpbf16_ps(sum[r][b], weight, some);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const __m512 scale = (__m512)for_lanes(scales + r * group.stride + block, several, group.lanes);
#pragma GCC unroll 2
            for (int b = 0; b < BATCH; ++b) total[r][b] = _mm512_fmadd_ps(scale, sum[r][b], total[r][b]);
        }
    }
    for (int b = 0; b < BATCH; ++b) {
        const Vector of[ROWS] = {(Vector)total[0][b], (Vector)total[1][b], (Vector)total[2][b], (Vector)total[3][b]};
        sum_quad(of, y + b * GROUP_ROWS);
    }
}

}  // namespace
#endif
