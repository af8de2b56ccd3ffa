// Exact products of int8 matrices. Compiled once per instruction set.
//
// With VNNI, integer_wide.h multiplies. Elsewhere a loop that compilers vectorise does.

#include "integer.h"

#include "integer_wide.h"

namespace {
using namespace nc;

#if defined(__AVX512VNNI__)

constexpr IntegerKernels KERNELS{MANY, {MANY, 64, of_few}, {256, PANEL, of_many}, measure};

#else

void tile(const IntegerProduct& p, int64_t from, int64_t to, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
        const int8_t* __restrict weight = p.weight + row * p.weight_stride;
        for (int64_t b = from; b < to; ++b) {
            const int8_t* __restrict x = p.x + b * p.x_stride;
            int32_t sum = 0;
            for (int64_t i = 0; i < p.k; ++i) sum += int32_t(x[i]) * int32_t(weight[i]);
            p.out[b * p.out_stride + row] = sum;
        }
    }
}

// Vectors and rows of a tile stay in the second-level cache for k of a few thousand.
constexpr IntegerKernels KERNELS{0, {64, 64, tile}, {64, 64, tile}, nullptr};

#endif

}  // namespace

#define NC_PASTE(a, b) a##b
#define NC_NAMED(isa) NC_PASTE(integer_, isa)

namespace nc {
extern const IntegerKernels NC_NAMED(NC_ISA);
const IntegerKernels NC_NAMED(NC_ISA) = KERNELS;
}  // namespace nc
