// Fake quantization: what fake_api.cpp asks of fake.cpp, which is compiled once per instruction set.
//
// Elements come in runs, in which one scale holds for all or each element has its own; then several runs, one below the
// other, share these, and are done together. What the scales' gradients sum up is summed in fp64 accordingly, per run or per
// element.

#pragma once
#include <cstdint>

#include "core.h"

namespace nc {

struct FakeGrid {
    bool uniform;
    float low, high;  // the outermost levels
    Spec spec;        // of the table, where levels are not uniform
    alignas(64) unsigned char table[16384];  // what an instruction set makes of it
};

struct FakeRun {
    const void* x;
    const void* grad;  // null: forward
    void* out;         // y, or the gradient of x
    int32_t dtype;
    int64_t begin, count;
    const float *scale, *inverse;  // one, or `each`: `count` of them, and readable up to a multiple of 64
    bool each;
    int64_t runs, stride;  // where `each`: so many runs, each `stride` elements behind the one before
    bool fetch;            // as many more follow, to be fetched meanwhile
    bool stream;   // write past the caches; fp32 only
    double* sums;  // one to be set, or where `each` `count` to be added to; for backward only
};

struct FakeKernels {
    void (*prepare)(FakeGrid&);
    void (*run)(const FakeGrid&, const FakeRun&);
};

NC_DECLARE(const FakeKernels, fake);

}  // namespace nc
