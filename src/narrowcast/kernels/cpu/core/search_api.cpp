// The C ABI of encoding with searched scales: whole groups, given to threads. A group is searched by one thread.

#include <vector>

#include "search.h"
#include "threads.h"

namespace {
using namespace nc;

struct Machine {
    const Kernels& encoding;
    const SearchKernels& searching;
};

Machine machine([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
    if (isa == 2) return {kernels_avx512, search_avx512};
    if (isa == 1) return {kernels_avx2, search_avx2};
#endif
    return {kernels_plain, search_plain};
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t nc_encode_searched(
    const Spec* of_rows, const void* data, int32_t dtype, int64_t stride, int64_t rows, const float* importance,
    const float* factors, int64_t factor_count, int64_t refinements, uint8_t* out, int64_t out_stride, int32_t threads,
    int32_t isa) {
    static constexpr int64_t bytes[] = {4, 2, 2, 8};
    const Machine m = machine(isa);
    const Search how{importance, factors, std::min(factor_count, Search::MOST), refinements};
    const Spec& spec = *of_rows;
    const int64_t size = spec.group_size;
    const int64_t groups = std::max<int64_t>(1, CHUNK / size), parts = ceil_div(spec.groups, groups);
    return parallel(rows * parts, threads, [&](int64_t task) {
        const int64_t row = task / parts, first = task % parts * groups, end = std::min(spec.groups, first + groups);
        const Floats from{static_cast<const uint8_t*>(data) + row * stride * bytes[dtype], dtype};
        uint8_t* to = out + row * out_stride;
        if (first == 0) {
            std::fill(to + spec.codes_bytes, to + spec.scales_offset, uint8_t(0));
            std::fill(to + spec.zeros_offset + (spec.element == AFFINE ? spec.groups : 0), to + spec.row_bytes, uint8_t(0));
        }
        std::vector<float> scratch(static_cast<size_t>(scratch_floats(size)));
        m.searching.encode(spec, m.encoding, from, first, end, how, scratch.data(), to);
    });
}
