// A grid as fake quantization's kernels take it.

#pragma once
#include <algorithm>
#include <cmath>

#include "fake.h"

namespace nc {

inline const FakeKernels& fake_kernels(int32_t isa) { return NC_CHOOSE(fake, isa); }

// Levels [count] ascend, thresholds are one less. The table is kept here: not to be copied.
struct PreparedGrid {
    FakeGrid grid;
    alignas(64) float padded[2][256];

    PreparedGrid(const FakeKernels& kernels, const float* levels, const float* thresholds, int32_t count, bool uniform) {
        grid.uniform = uniform, grid.low = levels[0], grid.high = levels[count - 1], grid.spec = Spec{};
        if (!uniform) {
            while ((1 << grid.spec.bits) < count || grid.spec.bits == 0) ++grid.spec.bits;
            std::fill(padded[0], padded[0] + 256, NAN);
            std::fill(padded[1], padded[1] + 256, HUGE_VALF);
            std::copy(levels, levels + count, padded[0]);
            std::copy(thresholds, thresholds + count - 1, padded[1]);
            grid.spec.element = LEVELS, grid.spec.levels = padded[0], grid.spec.thresholds = padded[1];
        }
        kernels.prepare(grid);
    }
    PreparedGrid(const PreparedGrid&) = delete;
};

}  // namespace nc
