// Scales that lose least: what search_api.cpp asks of search.cpp, which is compiled once per instruction set.

#pragma once
#include "core.h"

namespace nc {

// How a block is searched; see kernels/reference/search.py.
struct Search {
    static constexpr int64_t MOST = 64;  // factors
    const float* importance;  // of the row's elements, or null
    const float* factors;
    int64_t factor_count, refinements;
};

struct SearchKernels {
    // Encodes the blocks [first, end) of a row. `scratch` has room for a block, rounded up to a multiple of 64.
    void (*encode)(const Spec&, const Kernels&, Floats row, int64_t first, int64_t end, const Search&, float* scratch,
                   uint8_t* out);
};

NC_DECLARE(const SearchKernels, search);

}  // namespace nc
