// Exact products of int8 matrices. Compiled once per instruction set.
//
// VNNI multiplies unsigned bytes with signed ones, so x comes with 128 added: (x + 128) . w - 128 * sum(w) = x . w, and since
// int32 wraps around, an overflow on the way takes nothing from the result. Elsewhere a loop that compilers vectorise does.

#include "integer.h"

#include <algorithm>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
using namespace nc;

#if defined(__AVX512VNNI__)

constexpr int ROWS = 4, VECTORS = 6;

// The sum of all lanes, wrapping around as unsigned numbers do; _mm512_reduce_add_epi32 adds signed ones.
inline uint32_t total(__m512i lanes) {
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return uint32_t(_mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1))));
}

// Vectors [b, b + COUNT) times `rows` rows; `excess` is 128 times their sums, found out by the FIRST call for these rows.
// Every loop over sums is unrolled by word of command, or else they would live in memory.
template <int COUNT, bool FIRST>
inline void multiply(const IntegerProduct& p, int64_t b, int64_t row, int rows, uint32_t (&excess)[ROWS]) {
    const int8_t* weight[ROWS];
    for (int r = 0; r < ROWS; ++r) weight[r] = p.weight + (row + std::min(r, rows - 1)) * p.weight_stride;
    const uint8_t* x = p.shifted + b * p.length;
    __m512i products[COUNT * ROWS], sums[ROWS], w[ROWS];
#pragma GCC unroll 32
    for (int j = 0; j < COUNT * ROWS; ++j) products[j] = _mm512_setzero_si512();
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_setzero_si512();
    for (int64_t i = 0; i < p.k; i += 64) {
        // Zeros behind a row's end: whatever x has there does not count.
        const __mmask64 there = i + 64 <= p.k ? ~__mmask64(0) : (__mmask64(1) << (p.k - i)) - 1;
#pragma GCC unroll 32
        for (int r = 0; r < ROWS; ++r) {
            w[r] = _mm512_maskz_loadu_epi8(there, weight[r] + i);
            if (FIRST) sums[r] = _mm512_dpbusd_epi32(sums[r], _mm512_set1_epi8(1), w[r]);
        }
#pragma GCC unroll 32
        for (int j = 0; j < COUNT * ROWS; ++j) {
            const __m512i part = _mm512_loadu_si512(x + j / ROWS * p.length + i);
            products[j] = _mm512_dpbusd_epi32(products[j], part, w[j % ROWS]);
        }
    }
    uint32_t found[COUNT * ROWS];
#pragma GCC unroll 32
    for (int r = 0; r < ROWS; ++r) excess[r] = FIRST ? 128u * total(sums[r]) : excess[r];
#pragma GCC unroll 32
    for (int j = 0; j < COUNT * ROWS; ++j) found[j] = total(products[j]) - excess[j % ROWS];
    for (int v = 0; v < COUNT; ++v) {
        for (int r = 0; r < rows; ++r) p.out[(b + v) * p.out_stride + row + r] = int32_t(found[v * ROWS + r]);
    }
}

void tile(const IntegerProduct& p, int64_t from, int64_t to, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row += ROWS) {
        const int rows = int(std::min<int64_t>(ROWS, end - row));
        uint32_t excess[ROWS];
        int64_t b = from + 1;
        multiply<1, true>(p, from, row, rows, excess);
        for (; b + VECTORS <= to; b += VECTORS) multiply<VECTORS, false>(p, b, row, rows, excess);
        for (; b < to; ++b) multiply<1, false>(p, b, row, rows, excess);
    }
}

#else

void tile(const IntegerProduct& p, int64_t from, int64_t to, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
        const int8_t* __restrict weight = p.weight + row * p.weight_stride;
        for (int64_t b = from; b < to; ++b) {
            const int8_t* __restrict x = p.x + b * p.x_stride;
            int32_t sum = 0;
            for (int64_t i = 0; i < p.k; ++i) sum += int32_t(x[i]) * int32_t(weight[i]);
            p.out[b * p.out_stride + row] = sum;
        }
    }
}

#endif

}  // namespace

#define NC_PASTE(a, b) a##b
#define NC_NAMED(isa) NC_PASTE(integer_, isa)

namespace nc {
extern const IntegerTile NC_NAMED(NC_ISA);
const IntegerTile NC_NAMED(NC_ISA) = ::tile;
}  // namespace nc
