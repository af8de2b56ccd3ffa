// Exact convolutions of int8: what conv_api.cpp asks of conv.cpp, which is compiled once per instruction set.
//
// The input is laid out first, as words of four channels of a pixel, unsigned bytes. With a stride, columns and rows that a
// window skips lie apart, in a phase of their own. So the pixels that neighbouring outputs multiply with the same weight lie
// side by side, and a register holds them: nothing is copied for a window. Rows of a phase follow each other, too, and outputs
// that would lie over the end of a row are computed and not stored.

#pragma once
#include <cstdint>

namespace nc {

// Outputs at `lanes` places, of `outputs` rows of weights.
struct ConvBlock {
    const uint32_t* x;      // the first place's first pixel; readable for `lanes` places beyond every offset
    const int64_t* offsets;  // of each word of a window from there
    int64_t words;           // of a window
    const int32_t* weight;   // a row after the other, `words` each, four signed bytes to a word
    int outputs;
    const int32_t* shift;  // of each row: to be taken off its sums
    const float* factor;   // of each row
    const float* bias;     // of each row, or null
    const uint64_t* stored;  // of each 16 places, which ones
    const int64_t* targets;  // of each 16 places, where the first one that is stored goes
    float* out;
    int64_t out_stride;  // from row to row
    int64_t run;         // words whose products, in pairs, add up within an int16; 0 where those of one word may not
};

struct ConvKernels {
    int outputs, lanes;  // of a block at most
    void (*multiply)(const ConvBlock&, int vectors);  // of 16 places each
    // Four rows of levels times a scale, null for none, as words of level + shift. Whether one of them is a NaN.
    bool (*interleave)(const float* const rows[4], int64_t count, float inverse, int shift, uint32_t* to);
};

extern const ConvKernels conv_plain;
#if defined(__x86_64__)
extern const ConvKernels conv_avx2;
extern const ConvKernels conv_avx512;
#endif

}  // namespace nc
