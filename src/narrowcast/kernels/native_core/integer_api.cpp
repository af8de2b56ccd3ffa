// The C ABI of exact integer products: tiles of vectors and rows, given to threads.

#include <vector>

#include "integer.h"
#include "threads.h"

namespace {
using namespace nc;

constexpr int64_t SIDE = 64;  // vectors and rows of a tile: both stay in the second-level cache for k of a few thousand

IntegerTile tile_of([[maybe_unused]] int32_t isa) {
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
        // One more cache line, so that vectors of 4096 bytes do not all want the same places of a cache.
        const int64_t length = ceil_div(k, 64) * 64 + 64, across = ceil_div(rows, SIDE);
        std::vector<uint8_t> shifted(isa == 2 ? size_t(batch * length) : 0);
        for (int64_t b = 0; isa == 2 && b < batch; ++b) {
            for (int64_t i = 0; i < k; ++i) shifted[size_t(b * length + i)] = uint8_t(x[b * x_stride + i]) ^ 0x80;
        }
        const IntegerProduct product{x, shifted.data(), x_stride, length, k, weight, weight_stride, out, out_stride};
        return parallel_in_team(ceil_div(batch, SIDE) * across, threads, [&](int64_t task) {
            const int64_t from = task / across * SIDE, first = task % across * SIDE;
            tile_of(isa)(product, from, std::min(batch, from + SIDE), first, std::min(rows, first + SIDE));
        });
    } catch (...) {
        return 1;
    }
}
