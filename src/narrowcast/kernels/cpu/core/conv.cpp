// Exact convolutions of int8. Compiled once per instruction set.
//
// Lanes are places of the output. Sums are int32 that wrap around: what overflows on the way comes back with the shift.

#include "conv.h"

#include <cmath>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {
using namespace nc;

constexpr int PLACES = 16;  // that are stored together

// The nearest integer to a float of less than 2^22, ties to even, in the low bits of the sum with this.
constexpr float ROUNDING = 12582912.0f;

inline uint32_t byte_of(float value, float inverse, float bias, uint32_t& unknown) {
    const float level = value * inverse + bias;
    uint32_t bits;
    std::memcpy(&bits, &level, 4);
    unknown |= level == level ? 0u : 1u;
    return bits & 0xFFu;
}

bool interleave(const float* const rows[4], int64_t count, float inverse, int shift, uint32_t* __restrict to) {
    const float bias = ROUNDING + float(shift);
    uint32_t unknown = 0;
    if (rows[3]) {
        const float *__restrict a = rows[0], *__restrict b = rows[1], *__restrict c = rows[2], *__restrict d = rows[3];
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t low = byte_of(a[i], inverse, bias, unknown) | byte_of(b[i], inverse, bias, unknown) << 8;
            to[i] = low | byte_of(c[i], inverse, bias, unknown) << 16 | byte_of(d[i], inverse, bias, unknown) << 24;
        }
        return unknown != 0;
    }
    for (int j = 0; j < 4 && rows[j]; ++j) {
        const float* __restrict row = rows[j];
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t byte = byte_of(row[i], inverse, bias, unknown) << (8 * j);
            to[i] = j ? to[i] | byte : byte;
        }
    }
    return unknown != 0;
}

// One place after the other: `sums` of them, of which `stored` says which go to `out`.
[[maybe_unused]] void store(const int32_t* sums, const ConvBlock& b, int row, int vector) {
    float* to = b.out + row * b.out_stride + b.targets[vector];
    for (int lane = 0; lane < PLACES; ++lane) {
        if (!(b.stored[vector] >> lane & 1)) continue;
        float result = float(int32_t(uint32_t(sums[lane]) - uint32_t(b.shift[row]))) * b.factor[row];
        if (b.bias) result = result + b.bias[row];
        *to++ = result;
    }
}

#if defined(__AVX512VNNI__)

constexpr int OUTPUTS = 8, VECTORS = 3;

// Unsigned bytes of x times signed ones of a weight, four to a lane. By hand, because GCC 12 takes two registers for the
// intrinsic's sums.
[[gnu::always_inline]] inline __m512i accumulated(__m512i sums, __m512i x, __m512i weight) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(weight));
    return sums;
}

template <int O, int V>
void block(const ConvBlock& b) {
    __m512i sums[O][V];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[o][v] = _mm512_setzero_si512();
    }
    for (int64_t k = 0; k < b.words; ++k) {
        const uint32_t* from = b.x + b.offsets[k];
        __m512i x[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) x[v] = _mm512_loadu_si512(from + PLACES * v);
#pragma GCC unroll 8
        for (int o = 0; o < O; ++o) {
            const __m512i weight = _mm512_set1_epi32(b.weight[o * b.words + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[o][v] = accumulated(sums[o][v], x[v], weight);
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
        const __m512i shift = _mm512_set1_epi32(b.shift[o]);
        const __m512 factor = _mm512_set1_ps(b.factor[o]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            __m512 result = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[o][v], shift)), factor);
            if (b.bias) result = _mm512_add_ps(result, _mm512_set1_ps(b.bias[o]));
            const __mmask16 which = __mmask16(b.stored[v]);
            const __mmask16 first = __mmask16((1u << __builtin_popcount(which)) - 1);
            _mm512_mask_storeu_ps(b.out + o * b.out_stride + b.targets[v], first, _mm512_maskz_compress_ps(which, result));
        }
    }
}

template <int V>
void rows(const ConvBlock& b) {
    switch (b.outputs) {
        case 8: return block<8, V>(b);
        case 7: return block<7, V>(b);
        case 6: return block<6, V>(b);
        case 5: return block<5, V>(b);
        case 4: return block<4, V>(b);
        case 3: return block<3, V>(b);
        case 2: return block<2, V>(b);
        default: return block<1, V>(b);
    }
}

void multiply(const ConvBlock& b, int vectors) {
    if (vectors == 3) rows<3>(b);
    else if (vectors == 2) rows<2>(b);
    else rows<1>(b);
}

#elif defined(__AVX2__)

constexpr int OUTPUTS = 4, VECTORS = 1;

// The outputs at 16 places, scaled, of which `stored` says which go to `out`.
[[gnu::always_inline]] inline void store_scaled(const __m256i sums[2], const ConvBlock& b, int row) {
    float* to = b.out + row * b.out_stride + b.targets[0];
    const bool all = b.stored[0] == (1u << PLACES) - 1;
    alignas(32) float results[PLACES];
    for (int v = 0; v < 2; ++v) {
        const __m256i sum = _mm256_sub_epi32(sums[v], _mm256_set1_epi32(b.shift[row]));
        __m256 result = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(b.factor[row]));
        if (b.bias) result = _mm256_add_ps(result, _mm256_set1_ps(b.bias[row]));
        _mm256_storeu_ps((all ? to : results) + 8 * v, result);
    }
    for (int lane = 0; lane < PLACES && !all; ++lane) {
        if (b.stored[0] >> lane & 1) *to++ = results[lane];
    }
}

// Pairs of products as uint8 x int8, added up in int16 for as many words as those hold.
template <int O>
void narrow_block(const ConvBlock& b) {
    __m256i sums[O][2];
    for (int o = 0; o < O; ++o) sums[o][0] = sums[o][1] = _mm256_setzero_si256();
    for (int64_t first = 0; first < b.words; first += b.run) {
        const int64_t last = first + b.run < b.words ? first + b.run : b.words;
        __m256i pairs[O][2];
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) pairs[o][0] = pairs[o][1] = _mm256_setzero_si256();
        for (int64_t k = first; k < last; ++k) {
            const __m256i* from = reinterpret_cast<const __m256i*>(b.x + b.offsets[k]);
            const __m256i x[2] = {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
#pragma GCC unroll 4
            for (int o = 0; o < O; ++o) {
                const __m256i weight = _mm256_set1_epi32(b.weight[o * b.words + k]);
#pragma GCC unroll 2
                for (int v = 0; v < 2; ++v) {
                    pairs[o][v] = _mm256_add_epi16(pairs[o][v], _mm256_maddubs_epi16(x[v], weight));
                }
            }
        }
        for (int o = 0; o < O; ++o) {
            for (int v = 0; v < 2; ++v) {
                sums[o][v] = _mm256_add_epi32(sums[o][v], _mm256_madd_epi16(pairs[o][v], _mm256_set1_epi16(1)));
            }
        }
    }
    for (int o = 0; o < O; ++o) store_scaled(sums[o], b, o);
}

// Pairs of products as int16 x int16: the even bytes of a word, then the odd ones.
template <int O>
void block(const ConvBlock& b) {
    if (b.run) return narrow_block<O>(b);
    __m256i sums[O][2];
    for (int o = 0; o < O; ++o) sums[o][0] = sums[o][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < b.words; ++k) {
        const __m256i* from = reinterpret_cast<const __m256i*>(b.x + b.offsets[k]);
        __m256i even[2], odd[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            const __m256i x = _mm256_loadu_si256(from + v);
            even[v] = _mm256_and_si256(x, _mm256_set1_epi16(0xFF)), odd[v] = _mm256_srli_epi16(x, 8);
        }
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) {
            const __m256i w = _mm256_set1_epi32(b.weight[o * b.words + k]);
            const __m256i evens = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), odds = _mm256_srai_epi16(w, 8);
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                const __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(even[v], evens), _mm256_madd_epi16(odd[v], odds));
                sums[o][v] = _mm256_add_epi32(sums[o][v], pairs);
            }
        }
    }
    for (int o = 0; o < O; ++o) store_scaled(sums[o], b, o);
}

void multiply(const ConvBlock& b, int) {
    if (b.outputs == 4) block<4>(b);
    else if (b.outputs == 3) block<3>(b);
    else if (b.outputs == 2) block<2>(b);
    else block<1>(b);
}

#else

constexpr int OUTPUTS = 4, VECTORS = 1;

void multiply(const ConvBlock& b, int) {
    for (int o = 0; o < b.outputs; ++o) {
        int32_t sums[PLACES] = {};
        for (int64_t k = 0; k < b.words; ++k) {
            const uint32_t* x = b.x + b.offsets[k];
            int8_t w[4];
            std::memcpy(w, b.weight + o * b.words + k, 4);
            for (int lane = 0; lane < PLACES; ++lane) {
                for (int j = 0; j < 4; ++j) sums[lane] += int32_t(x[lane] >> (8 * j) & 0xFFu) * w[j];
            }
        }
        store(sums, b, o, 0);
    }
}

#endif

constexpr ConvKernels KERNELS{OUTPUTS, VECTORS * PLACES, multiply, interleave};

}  // namespace

#define NC_PASTE(a, b) a##b
#define NC_NAMED(isa) NC_PASTE(conv_, isa)

namespace nc {
extern const ConvKernels NC_NAMED(NC_ISA);
const ConvKernels NC_NAMED(NC_ISA) = KERNELS;
}  // namespace nc
