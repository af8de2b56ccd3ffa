// Exact convolutions of int8: what conv_api.cpp asks of conv.cpp, which is compiled once per instruction set.
//
// The input is laid out first, as words of four channels of a pixel, unsigned bytes. With a stride, columns and rows that a
// window skips lie apart, in a phase of their own. So the pixels that neighbouring outputs multiply with the same weight lie
// side by side, and a register holds them: nothing is copied for a window.

#pragma once
#include <cstdint>

namespace nc {

// How floats become bytes: level + shift, for a shift that leaves no byte negative.
struct ConvGrid {
    bool uniform;         // levels are consecutive integers
    float inverse;        // of the scale
    float low, high;      // where numbers are cut: the outermost levels, or, of a table, halves
    int32_t origin;       // what is taken off an integer to make it a byte, or, of a table, a place in `lookup`
    int32_t places;       // of a table
    uint8_t lookup[512];  // the byte of so many halves above `low`
};

// The outputs of a group at some places of an image. Places come in vectors of as many as a register has lanes.
struct ConvStrip {
    const uint32_t* x;
    int64_t vectors;
    const int64_t* places;   // of each vector: its first pixel in x; readable for a whole vector at every offset from there
    const uint32_t* stored;  // of each vector: which lanes
    const int64_t* targets;  // of each vector: where the first lane that is stored goes
    const int64_t* offsets;  // of each word of a window from the place
    int64_t words;           // of a window
    const int32_t* weight;   // a row after the other, four signed bytes to a word; where `run` is 0, as `widen` leaves them
    int64_t outputs;
    const int32_t* shift;  // of each row: to be taken off its sums
    const float* factor;   // of each row
    const float* bias;     // of each row, or null
    float* out;
    int64_t out_stride;  // from row to row
    int64_t run;         // words whose products, in pairs, add up within an int16; 0 where few do
};

struct ConvKernels {
    int lanes;
    int64_t least_run;  // shorter runs count as none; 0 where sums are int32 from the start
    // The bytes of up to four rows of floats, null for none, as words. Whether one of the floats is a NaN.
    bool (*quantize)(const ConvGrid&, const float* const rows[4], int64_t count, uint32_t* to);
    // The sum of weights and the largest magnitude.
    void (*measure)(const int8_t* weight, int64_t count, int32_t& sum, int32_t& largest);
    // Words of weights as two words each: bytes 0 and 2 as int16, then bytes 1 and 3.
    void (*widen)(const int8_t* weight, int64_t words, int32_t* to);
    void (*multiply)(const ConvStrip&);
};

extern const ConvKernels conv_plain;
#if defined(__x86_64__)
extern const ConvKernels conv_avx2;
extern const ConvKernels conv_avx512;
#endif

}  // namespace nc
