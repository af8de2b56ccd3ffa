// Numbers in memory: scales, biases and results, by the kinds that the compiler is told.
//
//   X       0 fp32, 1 fp16, 2 bf16: x and y.   BIAS  -1 none, else the same numbers
//   SCALE   0 none, 1 fp32, 2 bf16, 3 fp16, 4 e8m0.   BLOCK  elements per scale, 0 where a row has one or none
//   UNROLL  chunks whose loads are under way while one is worked on.   RESIDENT  threads that a processor should hold

constexpr int AHEAD = UNROLL;

template <int KIND>
__device__ __forceinline__ float number(const void* p, i64 i) {
    if (KIND == 0) return ((const float*)p)[i];
    const u32 bits = ((const u16*)p)[i];
    return KIND == 1 ? half_value(bits) : __uint_as_float(bits << 16);
}

constexpr int SCALE_BYTES = SCALE == 4 ? 1 : SCALE == 1 ? 4 : 2;

__device__ __forceinline__ float e8m0_value(u32 e) { return __uint_as_float(e == 255 ? 0x7FC00000u : e << 23); }

// A scale as it lies in memory, and what it is worth. A kernel that reads ahead keeps the first: the second waits for it.
__device__ __forceinline__ u32 scale_bits(const u8* scales, u32 i) {
    if (SCALE == 0) return 0;
    if (SCALE == 4) return __ldg(scales + i);
    return SCALE == 1 ? __ldg((const u32*)scales + i) : __ldg((const u16*)scales + i);
}

__device__ __forceinline__ float scale_value(u32 bits) {
    if (SCALE == 0) return 1.0f;
    if (SCALE == 4) return e8m0_value(bits);
    return SCALE == 1 ? __uint_as_float(bits) : SCALE == 3 ? half_value(bits) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ float scale_at(const u8* scales, u32 i) { return scale_value(scale_bits(scales, i)); }

// A scale that lies in shared memory.
__device__ __forceinline__ float scale_here(const u8* p) {
    return scale_value(SCALE == 4 ? *p : SCALE == 1 ? *(const u32*)p : *(const u16*)p);
}

__device__ __forceinline__ u32 half_of_x(float value) { return X == 1 ? half_bits(value) : bfloat_bits(value); }

__device__ __forceinline__ void store(void* y, i64 i, float value) {
    if (X == 0) ((float*)y)[i] = value;
    else ((u16*)y)[i] = half_of_x(value);
}

__device__ __forceinline__ float with_bias(float value, const void* bias, int row) {
    return BIAS < 0 ? value : value + number<(BIAS < 0 ? 0 : BIAS)>(bias, row);
}
