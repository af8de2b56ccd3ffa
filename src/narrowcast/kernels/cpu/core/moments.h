// What a step of AdamW is told of one row: the parameter, the gradient, and the rows of both moments.

#pragma once
#include "core.h"

namespace nc {

// Mirrors `Step` in kernels/moments.py, number by number.
struct Step {
    float beta1, take1, beta2, take2, correction, eps, decay, size;
};

struct Moments {
    Floats parameter, grad;  // of one dtype; the parameter is written
    uint8_t *first, *second;
    uint64_t first_key, second_key;
    bool takes_momentum;
    Step step;
};

// Floats of scratch that `count` elements take.
inline int64_t scratch_floats(int64_t count) { return 5 * ((count + 15) / 16 * 16); }

// Elements [begin, begin + count) are whole blocks.
using AdamW = void(const Kernels&, const Spec& first, const Spec& second, const Moments&, int64_t begin, int64_t count,
                   float* scratch);
NC_DECLARE(AdamW, adamw);

}  // namespace nc
