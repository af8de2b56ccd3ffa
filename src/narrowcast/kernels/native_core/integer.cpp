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

constexpr int ROWS = 4, VECTORS = 4;

// The last bytes of a row, with zeros behind them: whatever x has there does not count.
inline __m512i part(const int8_t* row, int64_t i, int64_t k) {
    if (i + 64 <= k) return _mm512_loadu_si512(row + i);
    return _mm512_maskz_loadu_epi8((uint64_t(1) << (k - i)) - 1, row + i);
}

template <int COUNT>
inline void multiply(const IntegerProduct& p, int64_t b, int64_t row, int rows, const int32_t* excess) {
    __m512i sums[COUNT][ROWS];
    const int8_t* weight[ROWS];
    for (int r = 0; r < ROWS; ++r) weight[r] = p.weight + (row + std::min(r, rows - 1)) * p.weight_stride;
    for (auto& of_vector : sums) std::fill(of_vector, of_vector + ROWS, _mm512_setzero_si512());
    for (int64_t i = 0; i < p.k; i += 64) {
        __m512i w[ROWS];
        for (int r = 0; r < ROWS; ++r) w[r] = part(weight[r], i, p.k);
        for (int v = 0; v < COUNT; ++v) {
            const __m512i x = _mm512_loadu_si512(p.shifted + (b + v) * p.length + i);
            for (int r = 0; r < ROWS; ++r) sums[v][r] = _mm512_dpbusd_epi32(sums[v][r], x, w[r]);
        }
    }
    for (int v = 0; v < COUNT; ++v) {
        for (int r = 0; r < rows; ++r) {
            const uint32_t sum = uint32_t(_mm512_reduce_add_epi32(sums[v][r]));
            p.out[(b + v) * p.out_stride + row + r] = int32_t(sum - uint32_t(excess[r]));
        }
    }
}

void tile(const IntegerProduct& p, int64_t from, int64_t to, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row += ROWS) {
        const int rows = int(std::min<int64_t>(ROWS, end - row));
        int32_t excess[ROWS] = {};
        for (int r = 0; r < rows; ++r) {
            __m512i sum = _mm512_setzero_si512();
            for (int64_t i = 0; i < p.k; i += 64) {
                sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), part(p.weight + (row + r) * p.weight_stride, i, p.k));
            }
            excess[r] = 128 * _mm512_reduce_add_epi32(sum);
        }
        int64_t b = from;
        for (; b + VECTORS <= to; b += VECTORS) multiply<VECTORS>(p, b, row, rows, excess);
        for (; b < to; ++b) multiply<1>(p, b, row, rows, excess);
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
