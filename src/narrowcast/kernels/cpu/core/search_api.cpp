// The C ABI of encoding with searched scales: whole blocks, given to threads. A block is searched by one thread.

#include <vector>

#include "search.h"
#include "threads.h"

using namespace nc;

NC_EXPORT int32_t nc_encode_searched(
    const Spec* of_rows, const void* data, int32_t dtype, int64_t stride, int64_t rows, const float* importance,
    float gain, const float* factors, int64_t factor_count, int64_t refinements, uint8_t* out, int64_t out_stride, int32_t threads,
    int32_t isa) {
    const Kernels& encoding = NC_CHOOSE(kernels, isa);
    const SearchKernels& searching = NC_CHOOSE(search, isa);
    const Search how{importance, gain, factors, std::min(factor_count, Search::MOST), refinements};
    const Spec& spec = *of_rows;
    const int64_t size = spec.block_size;
    const int64_t blocks = std::max<int64_t>(1, CHUNK / size), parts = ceil_div(spec.blocks, blocks);
    return parallel(rows * parts, threads, [&](int64_t task) {
        const int64_t row = task / parts, first = task % parts * blocks, end = std::min(spec.blocks, first + blocks);
        uint8_t* to = out + row * out_stride;
        if (first == 0) clear_gaps(spec, to);
        std::vector<float> scratch(static_cast<size_t>(scratch_floats(size)));
        searching.encode(spec, encoding, row_of(data, dtype, stride, row), first, end, how, scratch.data(), to);
    });
}
