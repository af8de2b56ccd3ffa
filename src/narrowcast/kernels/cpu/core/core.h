// The C ABI of the native core, and the table of functions that each instruction set provides.
//
// What the operations mean is written in kernels/reference/; this core returns the same bytes. It knows nothing of
// torch: rows come as pointers and strides, and everything that depends on the format alone comes ready in a Spec.

#pragma once
#include <cstdint>

namespace nc {

enum Element : int32_t { FP32, FP16, BF16, E4M3, E5M2, SIGN, INT, AFFINE, LEVELS };
enum Scale : int32_t { NO_SCALE, SCALE_FP32, SCALE_BF16, SCALE_FP16, SCALE_E8M0 };
enum Dtype : int32_t { F32, F16, B16, F64 };

// A codec and the layout of one row. Mirrors `Spec` in binding.py, field by field.
struct Spec {
    int32_t element, bits, scale, stochastic;
    int32_t signed_scale, reserved;
    float step, limit;
    int64_t numel, groups, group_size;
    int64_t codes_bytes, scales_offset, zeros_offset, row_bytes;
    const float* levels;      // [1 << bits], ascending, then NaN
    const float* thresholds;  // [1 << bits], ascending, then infinity
};

// Part of a row of floats of any dtype; data[0] is the row's element `origin`.
struct Floats {
    const void* data;
    int32_t dtype;
    int64_t origin = 0;
};

// What the scales of up to SIZE groups depend on, and the scales themselves, side by side so that loops over groups
// vectorise. Combining two measurements of one group is exact and, but for `sum`, in any order.
struct Batch {
    static constexpr int SIZE = 64;
    uint32_t key[SIZE];                // largest (magnitude, sign): fp32 bits rotated left by one
    int32_t low[SIZE], high[SIZE];     // smallest and largest element, as ordered integers; zero counts as one
    double sum[SIZE];                  // of magnitudes
    float scale[SIZE], inverse[SIZE];  // NaN and 0 where a group is not finite
    int32_t zero[SIZE];
};

// One group's scale as it is applied.
struct Scaling {
    float scale, inverse;
    int32_t zero;
};

// Elements [begin, begin + count) of a row are always a whole number of groups, a piece of one large group that starts
// at a multiple of CHUNK, or (for plain casts) any piece that starts at a multiple of CHUNK.
constexpr int64_t CHUNK = 65536;

struct Kernels {
    // Whole groups, measured, settled and quantized.
    void (*encode)(const Spec&, Floats row, int64_t begin, int64_t count, uint8_t* out, uint64_t key);
    // The same in three steps, for a group that is larger than CHUNK.
    void (*measure)(const Spec&, Floats row, int64_t begin, int64_t count, Batch&, int64_t slot);
    void (*settle)(const Spec&, Batch&, int64_t group, int64_t groups, int64_t last_count, uint8_t* out);
    void (*quantize)(const Spec&, Floats row, int64_t begin, int64_t count, Scaling, uint8_t* out, uint64_t key);
    // Whole groups of one batch, of at most 2048 elements, whose scales are known.
    void (*quantize_batch)(const Spec&, Floats row, int64_t begin, int64_t count, const Batch&, uint8_t* out);
    void (*decode)(const Spec&, const uint8_t* data, int64_t begin, int64_t count, void* out, int32_t dtype);
    void (*decode_sum)(const Spec&, const uint8_t* data, int64_t stride, int64_t ranks, Floats own, int64_t own_rank,
                       int64_t divisor, int64_t begin, int64_t count, void* out, int32_t dtype);
    // Sums whole groups into `scratch` [count] and encodes them from there.
    void (*decode_sum_encode)(const Spec&, const uint8_t* data, int64_t stride, int64_t ranks, Floats own,
                              int64_t own_rank, int64_t divisor, int64_t begin, int64_t count, float* scratch,
                              uint8_t* out, uint64_t key);
};

// One multiplication of vectors x with encoded rows, in the rows' order: out[b, row] = x[b] . row + bias[row].
struct Product {
    const uint8_t* data;
    int64_t stride;
    Floats x;                // and out's dtype
    int64_t x_stride, batch;
    const float* prepared;   // x as `prepare` leaves it, each vector `prepared(spec)` floats
    const float* gain;       // what each vector's results are to be multiplied with
    Floats bias;             // data may be null
    void* out;
    int64_t out_stride;
    void (*decode)(const Spec&, const uint8_t* data, int64_t begin, int64_t count, void* out, int32_t dtype);
};

struct Multiplier {
    int64_t (*prepared)(const Spec&);
    void (*prepare)(const Spec&, Floats x, float* out, float* gain);
    void (*linear)(const Spec&, const Product&, int64_t first, int64_t end);
};

extern const Kernels kernels_plain;
extern const Multiplier multiplier_plain;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Multiplier multiplier_avx2;
extern const Multiplier multiplier_avx512;
#endif

// The finalizer of splitmix64; keys for stochastic rounding are chains of it.
inline uint64_t mix64(uint64_t z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

}  // namespace nc
