// The C ABI of exact integer products: tiles of vectors and rows, given to threads.

#include <vector>

#include "integer.h"
#include "threads.h"

namespace {
using namespace nc;

const IntegerKernels& kernels([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
    if (isa == 2) return integer_avx512;
    if (isa == 1) return integer_avx2;
#endif
    return integer_plain;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t nc_integer_linear(
    const int8_t* x, int64_t x_stride, int64_t batch, int64_t k, const int8_t* weight, int64_t weight_stride, int64_t rows,
    int32_t* out, int64_t out_stride, int32_t threads, int32_t isa) {
    try {
        const IntegerKernels& known = kernels(isa);
        const IntegerTile& tile = batch < known.many ? known.of_few : known.of_many;
        IntegerProduct product{x, x_stride, batch, k, weight, weight_stride, rows, out, out_stride, nullptr};
        std::vector<uint32_t> excess(known.measure ? size_t(batch) : 0);
        if (known.measure) known.measure(product, excess.data());
        product.excess = excess.data();
        const int64_t across = ceil_div(rows, tile.rows);
        return parallel_in_team(ceil_div(batch, tile.vectors) * across, threads, [&](int64_t task) {
            const int64_t from = task / across * tile.vectors, first = task % across * tile.rows;
            tile.multiply(product, from, std::min(batch, from + tile.vectors), first, std::min(rows, first + tile.rows));
        });
    } catch (...) {
        return 1;
    }
}
