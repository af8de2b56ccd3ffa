// The C ABI of the native core, and the table of functions that each instruction set provides.
//
// What the operations mean is written in kernels/reference/; this core returns the same bytes. It knows nothing of
// torch: rows come as pointers and strides, and everything that depends on the format alone comes ready in a Spec.

#pragma once
#include <algorithm>
#include <cstdint>

// What is compiled once for each instruction set has the set's name behind its own: `kernels_avx2`. DECLARE says what there
// is, CHOOSE takes the one for a CPU (0, 1, 2: plain, avx2, avx512), NAMED_BY_ISA is the name in the file that is compiled thrice.
#if defined(__x86_64__)
#define NC_DECLARE(type, name) extern type name##_plain, name##_avx2, name##_avx512
#define NC_CHOOSE(name, isa) ((isa) == 2 ? name##_avx512 : (isa) == 1 ? name##_avx2 : name##_plain)
#else
#define NC_DECLARE(type, name) extern type name##_plain
#define NC_CHOOSE(name, isa) ((void)(isa), name##_plain)
#endif
#define NC_JOINED(name, isa) name##_##isa
#define NC_SPELLED(name, isa) NC_JOINED(name, isa)
#define NC_NAMED_BY_ISA(name) NC_SPELLED(name, NC_ISA)

#define NC_EXPORT extern "C" __attribute__((visibility("default")))

namespace nc {

enum Element : int32_t { FP32, FP16, BF16, E4M3, E5M2, SIGN, INT, AFFINE, LEVELS };
enum Scale : int32_t { NO_SCALE, SCALE_FP32, SCALE_BF16, SCALE_FP16, SCALE_E8M0 };
enum Dtype : int32_t { F32, F16, B16, F64 };

// A codec and the layout of one row. Mirrors `Spec` in binding.py, field by field.
struct Spec {
    int32_t element, bits, scale, stochastic;
    int32_t signed_scale, reserved;
    float step, limit;
    int64_t numel, blocks, block_size;
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

// `static`, as is what follows it: of an inline function that several files emit, the linker keeps one, whatever CPU it is for.
static inline Floats row_of(const void* data, int32_t dtype, int64_t stride, int64_t row) {
    constexpr int64_t bytes[] = {4, 2, 2, 8};
    return Floats{static_cast<const uint8_t*>(data) + row * stride * bytes[dtype], dtype};
}

// What no part of a row writes: the gap before the scales and the padding at the end.
static inline void clear_gaps(const Spec& spec, uint8_t* out) {
    std::fill(out + spec.codes_bytes, out + spec.scales_offset, uint8_t(0));
    std::fill(out + spec.zeros_offset + (spec.element == AFFINE ? spec.blocks : 0), out + spec.row_bytes, uint8_t(0));
}

// What the scales of up to SIZE blocks depend on, and the scales themselves, side by side so that loops over blocks
// vectorise. Combining two measurements of one block is exact and, but for `sum`, in any order.
struct Batch {
    static constexpr int SIZE = 64;
    uint32_t key[SIZE];                // largest (magnitude, sign): fp32 bits rotated left by one
    int32_t low[SIZE], high[SIZE];     // smallest and largest element, as ordered integers; zero counts as one
    double sum[SIZE];                  // of magnitudes
    float scale[SIZE], inverse[SIZE];  // NaN and 0 where a block is not finite
    int32_t zero[SIZE];
};

// One block's scale as it is applied.
struct Scaling {
    float scale, inverse;
    int32_t zero;
};

// Elements [begin, begin + count) of a row are always a whole number of blocks, a piece of one large block that starts
// at a multiple of CHUNK, or (for plain casts) any piece that starts at a multiple of CHUNK.
constexpr int64_t CHUNK = 65536;

struct Kernels {
    // Whole blocks, measured, settled and quantized.
    void (*encode)(const Spec&, Floats row, int64_t begin, int64_t count, uint8_t* out, uint64_t key);
    // The same in three steps, for a block that is larger than CHUNK.
    void (*measure)(const Spec&, Floats row, int64_t begin, int64_t count, Batch&, int64_t slot);
    void (*settle)(const Spec&, Batch&, int64_t block, int64_t blocks, int64_t last_count, uint8_t* out);
    void (*quantize)(const Spec&, Floats row, int64_t begin, int64_t count, Scaling, uint8_t* out, uint64_t key);
    // Whole blocks of one batch, of at most 2048 elements, whose scales are known.
    void (*quantize_batch)(const Spec&, Floats row, int64_t begin, int64_t count, const Batch&, uint8_t* out);
    void (*decode)(const Spec&, const uint8_t* data, int64_t begin, int64_t count, void* out, int32_t dtype);
    void (*decode_sum)(const Spec&, const uint8_t* data, int64_t stride, int64_t ranks, Floats own, int64_t own_rank,
                       int64_t divisor, int64_t begin, int64_t count, void* out, int32_t dtype);
    // Sums whole blocks into `scratch` [count] and encodes them from there.
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
    int32_t way = 0;         // as a Tiler's `way` says
};

struct Multiplier {
    int64_t (*prepared)(const Spec&);
    void (*prepare)(const Spec&, Floats x, float* out, float* gain);
    void (*linear)(const Spec&, const Product&, int64_t first, int64_t end);
};

// The same for many vectors: rows are decoded into tiles first. `way` says of what kind, 0 where there are none for a format; `packed`
// is how many floats x takes as `pack` leaves it, `vectors` of it at a time; `together` how many rows a call of `tiles` does best with.
struct Tiler {
    int64_t vectors;
    int32_t (*way)(const Spec&, const Product&);
    int64_t (*packed)(const Spec&, const Product&);
    void (*pack)(const Spec&, const Product&, int64_t first, float* packed, float* gain);
    int64_t (*together)(const Spec&, const Product&, int64_t rows, int32_t threads);
    void (*tiles)(const Spec&, const Product&, int64_t first, int64_t end);
};

NC_DECLARE(const Kernels, kernels);
NC_DECLARE(const Tiler, tiler);
NC_DECLARE(const Tiler, matrix);
NC_DECLARE(const Multiplier, multiplier);

// The finalizer of splitmix64; keys for stochastic rounding are chains of it.
inline uint64_t mix64(uint64_t z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

}  // namespace nc
