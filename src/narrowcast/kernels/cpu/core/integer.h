// Exact products of int8 matrices: what integer_api.cpp asks of integer.cpp, which is compiled once per instruction set.

#pragma once
#include <cstdint>

namespace nc {

// out[b, row] = x[b] . weight[row], sums in int32.
struct IntegerProduct {
    const int8_t* x;
    int64_t x_stride, batch, k;
    const int8_t* weight;
    int64_t weight_stride, rows;
    int32_t* out;
    int64_t out_stride;
    const uint32_t* excess;  // of each vector: what `measure` found
};

// Vectors [from, to) times rows [first, end).
struct IntegerTile {
    int64_t vectors, rows;  // of a tile at most
    void (*multiply)(const IntegerProduct&, int64_t from, int64_t to, int64_t first, int64_t end);
};

struct IntegerKernels {
    int64_t many;  // vectors from which on the second tile is the faster one
    IntegerTile of_few, of_many;
    void (*measure)(const IntegerProduct&, uint32_t* excess);  // null: there is nothing to find out about vectors
};

extern const IntegerKernels integer_plain;
#if defined(__x86_64__)
extern const IntegerKernels integer_avx2;
extern const IntegerKernels integer_avx512;
#endif

}  // namespace nc
