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
template <class T>
static inline T min(T a, T b) {
    return a < b ? a : b;
}
template <class T>
static inline T max(T a, T b) {
    return a < b ? b : a;
}
static inline float exp2f(float x) { return __builtin_exp2f(x); }
static inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
static inline float fabsf(float x) { return __builtin_fabsf(x); }
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

static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return by % 32 ? high << by % 32 | low >> (32 - by % 32) : high; }
static inline double __longlong_as_double(long long bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }

// Rounded up. The product of what the kernels multiply, a number and a power of two, is exact; so is what the sum lost.
static inline float __fmaf_ru(float a, float b, float c) {
    const float product = a * b, sum = product + c;
    return product - (double(sum) - c) > 0 ? __builtin_nextafterf(sum, __builtin_inff()) : sum;
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

template <class T>
struct Exchange {
    T value, received;
    int distance;
};

// Of a whole warp, which is what the kernels ask for.
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
    if (mask != ~0u) machine::fail("exchanges numbers within a part of a warp", threadIdx.x);
    Exchange<T> mine = {value, 0, distance};
    machine::wait_in_warp(
        [](void* const* brought) {
            for (int i = 0; i < machine::WARP; ++i) {
                Exchange<T>& one = *(Exchange<T>*)brought[i];
                one.received = ((Exchange<T>*)brought[i ^ one.distance])->value;
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
