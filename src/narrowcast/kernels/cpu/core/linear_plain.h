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

// One row times the vectors [first, end), into y[ROWS first], ...; a vector lies at x + b * x_stride, as it came or widened.
inline void plainly(const Spec& spec, const Product& product, const uint8_t* row, Floats x, int64_t x_stride, int64_t first,
             int64_t end, float* y) {
    alignas(64) float weights[SPAN], buffer[SPAN];
    const int64_t size = x.dtype == F32 ? 4 : 2;
    for (int64_t b = first; b < end; ++b) y[b * ROWS] = 0.0f;
    for (int64_t begin = 0; begin < spec.numel; begin += SPAN) {
        const int64_t n = std::min(SPAN, spec.numel - begin);
        // `decode` writes element i of the row to out[i].
        product.decode(spec, row, begin, n, weights - begin, F32);
        for (int64_t b = first; b < end; ++b) {
            const Floats some{static_cast<const uint8_t*>(x.data) + b * x_stride * size, x.dtype};
            y[b * ROWS] += dot(weights, load(some, begin, n, buffer), n);
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

inline void finish(const Product& product, int64_t first, int64_t rows, const float* y) {
    float bias[ROWS] = {}, buffer[ROWS];
    if (product.bias.data) std::memcpy(bias, load(product.bias, first, rows, buffer), size_t(rows) * 4);
    for (int64_t b = 0; b < product.batch; ++b) {
        for (int64_t r = 0; r < rows; ++r) {
            const float value = product.bias.data ? y[b * ROWS + r] + bias[r] : y[b * ROWS + r];
            put_result(value, product.out, product.x.dtype, b * product.out_stride + first + r);
        }
    }
}

}  // namespace
