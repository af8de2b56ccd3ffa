// Exact convolutions of int8. Compiled once per instruction set.
//
// Lanes are places of the output. Sums are int32 that wrap around: what overflows on the way comes back with the shift.

#include "conv.h"

#include "conv_levels.h"

namespace {
using namespace nc;

void measure(const int8_t* __restrict weight, int64_t count, int32_t& sum, int32_t& largest) {
    int32_t total = 0;
    int8_t least = 0, most = 0;
    for (int64_t i = 0; i < count; ++i) {
        total += weight[i];
        least = weight[i] < least ? weight[i] : least;
        most = weight[i] > most ? weight[i] : most;
    }
    sum = total;
    largest = -int32_t(least) > int32_t(most) ? -int32_t(least) : int32_t(most);
}

void widen(const int8_t* __restrict weight, int64_t words, int32_t* __restrict to) {
    int16_t* __restrict pairs = reinterpret_cast<int16_t*>(to);
    for (int64_t i = 0; i < words; ++i) {
        pairs[4 * i] = weight[4 * i], pairs[4 * i + 1] = weight[4 * i + 2];
        pairs[4 * i + 2] = weight[4 * i + 1], pairs[4 * i + 3] = weight[4 * i + 3];
    }
}

#if defined(__AVX512VNNI__)

constexpr int LANES = 16, OUTPUTS = 8, VECTORS = 3;
constexpr int64_t LEAST_RUN = 0;

// Unsigned bytes of x times signed ones of a weight, four to a lane. By hand, because GCC 12 takes two registers for the
// intrinsic's sums.
[[gnu::always_inline]] inline __m512i accumulated(__m512i sums, __m512i x, __m512i weight) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(weight));
    return sums;
}

// Rows [row, row + O) at vectors [first, first + V).
template <int O, int V>
void block(const ConvStrip& s, int64_t row, int64_t first) {
    __m512i sums[O][V];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[o][v] = _mm512_setzero_si512();
    }
    const uint32_t* from[V];
    for (int v = 0; v < V; ++v) from[v] = s.x + s.places[first + v];
    const int32_t* weights = s.weight + row * s.words;
    for (int64_t k = 0; k < s.words; ++k) {
        __m512i x[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) x[v] = _mm512_loadu_si512(from[v] + s.offsets[k]);
#pragma GCC unroll 8
        for (int o = 0; o < O; ++o) {
            const __m512i weight = _mm512_set1_epi32(weights[o * s.words + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[o][v] = accumulated(sums[o][v], x[v], weight);
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
        const __m512i shift = _mm512_set1_epi32(s.shift[row + o]);
        const __m512 factor = _mm512_set1_ps(s.factor[row + o]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            __m512 result = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[o][v], shift)), factor);
            if (s.bias) result = _mm512_add_ps(result, _mm512_set1_ps(s.bias[row + o]));
            float* to = s.out + (row + o) * s.out_stride + s.targets[first + v];
            const __mmask16 which = __mmask16(s.stored[first + v]);
            const __mmask16 count = __mmask16((1u << __builtin_popcount(which)) - 1);
            if (which == 0xFFFF) _mm512_storeu_ps(to, result);
            else _mm512_mask_storeu_ps(to, count, _mm512_maskz_compress_ps(which, result));
        }
    }
}

#elif defined(__AVX2__)

constexpr int LANES = 8, OUTPUTS = 4, VECTORS = 2;
constexpr int64_t LEAST_RUN = 2;

// sums += pairs of products. By hand, because GCC 12 moves sums between registers and memory otherwise, at half the speed.
[[gnu::always_inline]] inline void add_bytes(__m256i& sums, __m256i x, __m256i weight) {
    __m256i products;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(x), "x"(weight));
}

[[gnu::always_inline]] inline void add_pairs(__m256i& sums, __m256i x, __m256i weight) {
    __m256i products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(x), "x"(weight));
}

// Adds the products of words [k, end) to sums in int16. Pairs of products, uint8 x int8, fit as long as they are few.
template <int O, int V>
[[gnu::always_inline]] inline void add_narrow(const ConvStrip& s, const uint32_t* const (&from)[V], const int32_t* weights,
                                              int64_t k, int64_t end, __m256i (&pairs)[O][V]) {
    for (; k < end; ++k) {
        __m256i x[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) x[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[v] + s.offsets[k]));
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) {
            const __m256i weight = _mm256_set1_epi32(weights[o * s.words + k]);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) add_bytes(pairs[o][v], x[v], weight);
        }
    }
}

template <int O, int V>
[[gnu::always_inline]] inline void sum_narrow(const ConvStrip& s, const uint32_t* const (&from)[V], int64_t row,
                                              __m256i (&sums)[O][V]) {
    for (int64_t k = 0; k < s.words; k += s.run) {
        __m256i pairs[O][V];
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) {
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) pairs[o][v] = _mm256_setzero_si256();
        }
        const int64_t end = k + s.run < s.words ? k + s.run : s.words;
        add_narrow<O, V>(s, from, s.weight + row * s.words, k, end, pairs);
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) {
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) add_pairs(sums[o][v], pairs[o][v], _mm256_set1_epi16(1));
        }
    }
}

// Pairs of products as int16 x int16, which never overflow: bytes 0 and 2 of a word, then 1 and 3.
template <int O, int V>
[[gnu::always_inline]] inline void sum_wide(const ConvStrip& s, const uint32_t* const (&from)[V], int64_t row,
                                            __m256i (&sums)[O][V]) {
    const int32_t* weights = s.weight + row * s.words * 2;
    for (int64_t k = 0; k < s.words; ++k) {
        __m256i even[V], odd[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[v] + s.offsets[k]));
            even[v] = _mm256_and_si256(x, _mm256_set1_epi16(0xFF)), odd[v] = _mm256_srli_epi16(x, 8);
        }
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) {
            const __m256i evens = _mm256_set1_epi32(weights[(o * s.words + k) * 2]);
            const __m256i odds = _mm256_set1_epi32(weights[(o * s.words + k) * 2 + 1]);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) add_pairs(sums[o][v], even[v], evens);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) add_pairs(sums[o][v], odd[v], odds);
        }
    }
}

// The lanes that `which` names moved to the front, and stored.
void store_some(float* to, __m256 result, uint32_t which) {
    const uint64_t bytes = _pdep_u64(which, 0x0101010101010101u) * 0xFF;
    const __m128i lanes = _mm_cvtsi64_si128(int64_t(_pext_u64(0x0706050403020100u, bytes)));
    const __m256i count = _mm256_set1_epi32(__builtin_popcount(which));
    const __m256i there = _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    _mm256_maskstore_ps(to, there, _mm256_permutevar8x32_ps(result, _mm256_cvtepu8_epi32(lanes)));
}

// Rows [row, row + O) at vectors [first, first + V).
template <int O, int V>
void block(const ConvStrip& s, int64_t row, int64_t first) {
    __m256i sums[O][V];
    const uint32_t* from[V];
    for (int v = 0; v < V; ++v) from[v] = s.x + s.places[first + v];
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[o][v] = _mm256_setzero_si256();
    }
    if (s.run) sum_narrow<O, V>(s, from, row, sums);
    else sum_wide<O, V>(s, from, row, sums);
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
        const __m256i shift = _mm256_set1_epi32(s.shift[row + o]);
        const __m256 factor = _mm256_set1_ps(s.factor[row + o]);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
            __m256 result = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(sums[o][v], shift)), factor);
            if (s.bias) result = _mm256_add_ps(result, _mm256_set1_ps(s.bias[row + o]));
            float* to = s.out + (row + o) * s.out_stride + s.targets[first + v];
            if (s.stored[first + v] == 0xFF) _mm256_storeu_ps(to, result);
            else store_some(to, result, s.stored[first + v]);
        }
    }
}

#else

constexpr int LANES = 8, OUTPUTS = 1, VECTORS = 1;
constexpr int64_t LEAST_RUN = 0;

template <int O, int V>
void block(const ConvStrip& s, int64_t row, int64_t first) {
    uint32_t sums[LANES] = {};
    const int8_t* weight = reinterpret_cast<const int8_t*>(s.weight + row * s.words);
    for (int64_t k = 0; k < s.words; ++k, weight += 4) {
        const uint32_t* x = s.x + s.places[first] + s.offsets[k];
        for (int lane = 0; lane < LANES; ++lane) {
            for (int j = 0; j < 4; ++j) sums[lane] += uint32_t(int32_t(x[lane] >> (8 * j) & 0xFFu) * weight[j]);
        }
    }
    float* to = s.out + row * s.out_stride + s.targets[first];
    for (int lane = 0; lane < LANES; ++lane) {
        if (!(s.stored[first] >> lane & 1)) continue;
        const float result = float(int32_t(sums[lane] - uint32_t(s.shift[row]))) * s.factor[row];
        *to++ = s.bias ? result + s.bias[row] : result;
    }
}

#endif

constexpr int64_t PANEL = 16384;  // bytes of weights that stay in the first-level cache, beside the words of a block

// Up to O rows of [row, end), V vectors.
template <int O, int V>
void some_rows(const ConvStrip& s, int64_t row, int64_t end, int64_t first) {
    if constexpr (O > 1) {
        if (end - row < O) return some_rows<O - 1, V>(s, row, end, first);
    }
    block<O, V>(s, row, first);
}

// Rows [row, end), up to V vectors from `first` on.
template <int V>
void some_vectors(const ConvStrip& s, int64_t row, int64_t end, int64_t first) {
    if constexpr (V > 1) {
        if (s.vectors - first < V) return some_vectors<V - 1>(s, row, end, first);
    }
    for (; row < end; row += OUTPUTS) some_rows<OUTPUTS, V>(s, row, end, first);
}

void multiply(const ConvStrip& s) {
    const int64_t bytes = s.words * (LEAST_RUN && !s.run ? 8 : 4), rows = PANEL / bytes / OUTPUTS * OUTPUTS;
    const int64_t panel = rows > OUTPUTS ? rows : OUTPUTS;
    for (int64_t row = 0; row < s.outputs; row += panel) {
        const int64_t end = row + panel < s.outputs ? row + panel : s.outputs;
        for (int64_t first = 0; first < s.vectors; first += VECTORS) some_vectors<VECTORS>(s, row, end, first);
    }
}

constexpr ConvKernels KERNELS{LANES, LEAST_RUN, quantize, measure, widen, multiply};

}  // namespace

#define NC_PASTE(a, b) a##b
#define NC_NAMED(isa) NC_PASTE(conv_, isa)

namespace nc {
extern const ConvKernels NC_NAMED(NC_ISA);
const ConvKernels NC_NAMED(NC_ISA) = KERNELS;
}  // namespace nc
