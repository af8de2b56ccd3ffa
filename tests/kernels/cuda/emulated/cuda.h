// The words of CUDA that kernels/cuda uses, for a compiler of the host. `machine.h` runs the threads.
#pragma once

#include "machine.h"

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local /* one thread of the host runs all of a block, and a local one is static */

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline float exp2f(float x) { return __builtin_exp2f(x); }
static inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float sqrtf(float x) { return __builtin_sqrtf(x); }
static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

template <class T>
static inline T __ldg(const T* p) {
    return *p;
}
template <class T>
static inline T __ldcs(const T* p) {
    return *p;
}

static inline void __syncthreads() { machine::wait_at_barrier(0, blockDim.x); }
static inline void __syncwarp() {
    machine::wait_in_warp([](void* const*) {}, nullptr);
}

struct Exchange {
    float value, received;
    int distance;
};

// Of a whole warp, which is what the kernels ask for.
static inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
    if (mask != ~0u) machine::fail("exchanges numbers within a part of a warp", threadIdx.x);
    Exchange mine = {value, 0, distance};
    machine::wait_in_warp(
        [](void* const* brought) {
            for (int i = 0; i < machine::WARP; ++i) {
                Exchange& one = *(Exchange*)brought[i];
                one.received = ((Exchange*)brought[i ^ one.distance])->value;
            }
        },
        &mine);
    return mine.received;
}

// A launch as the driver does it: `values` are the addresses of the arguments.
template <class... Types>
struct Launch {
    static void (*kernel)(Types...);
    static void* const* values;

    template <int... I>
    struct Places {};
    template <int N, int... I>
    struct Count : Count<N - 1, N - 1, I...> {};
    template <int... I>
    struct Count<0, I...> {
        typedef Places<I...> type;
    };
    template <int... I>
    static void call(Places<I...>) {
        kernel(*(Types*)values[I]...);
    }
    static void body() { call(typename Count<sizeof...(Types)>::type()); }
};
template <class... Types>
void (*Launch<Types...>::kernel)(Types...);
template <class... Types>
void* const* Launch<Types...>::values;

template <class... Types>
static void (*launch_of(void (*kernel)(Types...), void* const* values))() {
    Launch<Types...>::kernel = kernel, Launch<Types...>::values = values;
    return Launch<Types...>::body;
}
