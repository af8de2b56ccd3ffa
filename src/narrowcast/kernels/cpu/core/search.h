// Scales that lose least: what search_api.cpp asks of search.cpp, which is compiled once per instruction set.

#pragma once
#include <algorithm>

#include "core.h"

namespace nc {

// How a block is searched; see kernels/reference/search.py.
struct Search {
    static constexpr int64_t MOST = 64;  // factors
    const float* importance;  // of the row's elements, or null
    float gain;
    const float* factors;
    int64_t factor_count, refinements;
};

struct SearchKernels {
    // Encodes the blocks [first, end) of a row. `scratch` has room for `scratch_floats` of them.
    void (*encode)(const Spec&, const Kernels&, Floats row, int64_t first, int64_t end, const Search&, float* scratch,
                   uint8_t* out);
};

// Room for a batch or a large block, and for one block and its weights, continued to whole pieces of 64.
inline int64_t scratch_floats(int64_t block_size) { return std::max<int64_t>(block_size, 2048) + 2 * ((block_size + 63) / 64 * 64); }

NC_DECLARE(const SearchKernels, search);

}  // namespace nc
