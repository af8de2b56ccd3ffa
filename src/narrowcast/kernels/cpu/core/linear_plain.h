// One row decoded into a buffer and multiplied, for what no faster way takes; and results on their way out.

#pragma once
#include "linear_rows.h"

namespace {

// -- the plain way ------------------------------------------------------------------------------------------------------------------

inline float dot(const float* a, const float* b, int64_t n) {
    Vector sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        for (int j = 0; j < 4; ++j) sums[j] += read<Vector>(a + i + j * LANES) * read<Vector>(b + i + j * LANES);
    }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// One row times the vectors [first, end), into y[GROUP_ROWS first], ...; a vector lies at x + b * x_stride, as it came or widened.
inline void plainly(const Spec& spec, const Product& product, const uint8_t* row, Floats x, int64_t x_stride, int64_t first,
             int64_t end, float* y) {
    alignas(64) float weights[SPAN], buffer[SPAN];
    const int64_t size = x.dtype == F32 ? 4 : 2;
    for (int64_t b = first; b < end; ++b) y[b * GROUP_ROWS] = 0.0f;
    for (int64_t begin = 0; begin < spec.numel; begin += SPAN) {
        const int64_t n = std::min(SPAN, spec.numel - begin);
        // `decode` writes element i of the row to out[i].
        product.decode(spec, row, begin, n, weights - begin, F32);
        for (int64_t b = first; b < end; ++b) {
            const Floats some{static_cast<const uint8_t*>(x.data) + b * x_stride * size, x.dtype};
            y[b * GROUP_ROWS] += dot(weights, load(some, begin, n, buffer), n);
        }
    }
}

// -- results ------------------------------------------------------------------------------------------------------------------------

// Rounded to nearest even, past the largest number to infinity, as torch does.
inline void put_result(float y, void* out, int32_t dtype, int64_t at) {
    if (dtype == F32) {
        static_cast<float*>(out)[at] = y;
        return;
    }
    const uint32_t bits = as<uint32_t>(y), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
    uint32_t code = dtype == F16 ? Half::narrow(y) : Brain::narrow(y);
    const uint32_t beyond = dtype == F16 ? 0x477FF000u : 0x7F7F8000u, infinity = dtype == F16 ? 0x7C00u : 0x7F80u;
    if (magnitude >= beyond && magnitude <= 0x7F800000u) code = infinity | sign;
    static_cast<Half16*>(out)[at] = uint16_t(code);
}

#if defined(__AVX512F__)
// The same for the first `rows` of sixteen results.
inline void put_results(__m512 y, int64_t rows, void* out, int32_t dtype, int64_t at) {
    const __mmask16 there = rows >= LANES ? 0xFFFF : __mmask16((1u << rows) - 1);
    if (dtype == F32) {
        _mm512_mask_storeu_ps(static_cast<float*>(out) + at, there, y);
    } else if (dtype == F16) {
        const __m256i code = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_mask_storeu_epi16(static_cast<Half16*>(out) + at, there, code);
    } else {
        const __m512i bits = _mm512_castps_si512(y), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i code = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
        code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
        _mm512_mask_cvtepi32_storeu_epi16(static_cast<Half16*>(out) + at, there, code);
    }
}
#endif

// Rows [first, first + rows) of all vectors; y is [vector][GROUP_ROWS].
inline void finish(const Product& product, int64_t first, int64_t rows, const float* y) {
    float bias[GROUP_ROWS] = {}, buffer[GROUP_ROWS];
    if (product.bias.data) std::memcpy(bias, load(product.bias, first, rows, buffer), size_t(rows) * 4);
    for (int64_t b = 0; b < product.batch; ++b) {
        const int64_t at = b * product.out_stride + first;
#if defined(__AVX512F__)
        static_assert(GROUP_ROWS == LANES, "a vector has the results of a group");
        const __m512 some = _mm512_loadu_ps(y + b * GROUP_ROWS);
        const __m512 value = product.bias.data ? _mm512_add_ps(some, _mm512_loadu_ps(bias)) : some;
        put_results(value, rows, product.out, product.x.dtype, at);
#else
        for (int64_t r = 0; r < rows; ++r) {
            const float value = product.bias.data ? y[b * GROUP_ROWS + r] + bias[r] : y[b * GROUP_ROWS + r];
            put_result(value, product.out, product.x.dtype, at + r);
        }
#endif
    }
}

}  // namespace
