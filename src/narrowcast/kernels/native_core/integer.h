// Exact products of int8 matrices: what integer_api.cpp asks of integer.cpp, which is compiled once per instruction set.

#pragma once
#include <cstdint>

namespace nc {

// out[b, row] = x[b] . weight[row], sums in int32.
struct IntegerProduct {
    const int8_t* x;
    const uint8_t* shifted;  // x + 128, a vector every `length` bytes, readable up to a multiple of 64
    int64_t x_stride, length, k;
    const int8_t* weight;
    int64_t weight_stride;
    int32_t* out;
    int64_t out_stride;
};

// Vectors [from, to) times rows [first, end).
using IntegerTile = void (*)(const IntegerProduct&, int64_t from, int64_t to, int64_t first, int64_t end);

extern const IntegerTile integer_plain;
#if defined(__x86_64__)
extern const IntegerTile integer_avx2;
extern const IntegerTile integer_avx512;
#endif

}  // namespace nc
