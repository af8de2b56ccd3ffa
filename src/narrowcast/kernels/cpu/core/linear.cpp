// x W^T + bias with W as encoded rows: four rows at a time, as floats in registers. Compiled once per instruction set.
//
// The sum of one output is that of LANES lanes. In a lane, the products of one block's codes with x are added up in order,
// then the sum times the scale is added to the total; at the end lanes are added in halves. Nothing in this depends on
// the batch, on the other rows or on threads. Unlike in the rest of the core, products and sums may be fused: x times a
// code rounds once.
//
// Integers go through linear_bytes.h where there are instructions for it. What the rest goes through is here; linear_x.h prepares x.
//
// Blocks that do not fill vectors (of 24 elements), tables of huge or tiny levels, and rows with infinities in fp8 or steps
// near the largest number take the plain way: decoded into a buffer, then multiplied.

#include <memory>

#include "linear_plain.h"
#include "linear_x.h"

namespace {

// -- four rows times BATCH vectors ----------------------------------------------------------------------------------------------

template <class Code, int BATCH>
struct Sums {
    Vector sum[ROWS][BATCH], total[ROWS][BATCH], zero[ROWS];
    Bits odd[ROWS];

    template <int J>
    NC_FORCED void column(const Code& code, const Bits (&words)[ROWS], const float* x, int64_t x_stride) {
        Vector weight[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            weight[r] = code.template value<J>(words[r]);
            if (Code::AFFINE_CODES) weight[r] -= zero[r];
        }
#pragma GCC unroll 4
        for (int b = 0; b < BATCH; ++b) {
            const Vector some = read<Vector>(x + b * x_stride + J * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sum[r][b] += weight[r] * some;
        }
    }

    // The same for all columns of a step, row by row.
    NC_FORCED void columns(const Code& code, const Bits (&words)[ROWS], const float* x, int64_t x_stride) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            Vector weight[Code::EACH];
            code.values(words[r], weight);
#pragma GCC unroll 8
            for (int j = 0; j < Code::EACH; ++j) {
#pragma GCC unroll 4
                for (int b = 0; b < BATCH; ++b) sum[r][b] += weight[j] * read<Vector>(x + b * x_stride + j * LANES);
            }
        }
    }

    template <int... J>
    NC_FORCED void step(const Code& code, const uint8_t* const (&at)[ROWS], const float* x, int64_t x_stride,
                        std::integer_sequence<int, J...>) {
        Bits words[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            words[r] = code.words(at[r]);
            if constexpr (Code::CHECKED) odd[r] |= code.odd(words[r]);
        }
        if constexpr (AT_ONCE<Code>) columns(code, words, x, x_stride);
        else (column<J>(code, words, x, x_stride), ...);
    }
};

template <class Code, int BATCH>
__attribute__((noinline)) void multiply(const Code& code, const Steps& steps, RowGroup& group, int first, const float* x, int64_t x_stride, float* y,
                                        int64_t ahead) {
    Sums<Code, BATCH> sums{};
    const bool several = steps.blocks > 1;
    int64_t step = 0;
    for (int64_t block = 0; step < steps.all; block += steps.blocks) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            if (Code::AFFINE_CODES) sums.zero[r] = for_lanes(&group.zeros[size_t((first + r) * group.stride + block)], several, group.lanes);
#pragma GCC unroll 4
            for (int b = 0; b < BATCH; ++b) sums.sum[r][b] = Vector{};
        }
        for (const int64_t end = std::min(step + steps.flush, steps.all); step < end; ++step) {
            const uint8_t* at[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                at[r] = step < steps.whole ? group.row[first + r] + step * Code::BYTES : group.tail[first + r];
                __builtin_prefetch(at[r] + ahead, 0, 2);
            }
            sums.step(code, at, x + step * steps.size, x_stride, std::make_integer_sequence<int, Code::EACH>());
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const Vector scale = for_lanes(&group.scales[size_t((first + r) * group.stride + block)], several, group.lanes);
#pragma GCC unroll 4
            for (int b = 0; b < BATCH; ++b) sums.total[r][b] += scale * sums.sum[r][b];
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int b = 0; b < BATCH; ++b) y[b * GROUP_ROWS + r] = sum_lanes(sums.total[r][b]);
        if constexpr (Code::CHECKED) {
            for (int i = 0; i < LANES; ++i) group.plain[first + r] |= (sums.odd[r][i] & 0x80808080u) != 0;
        }
    }
}

// -- groups of rows ----------------------------------------------------------------------------------------------------------------

// A group of rows at a time: multiply(steps, group, first, y) gives the outputs of the quad that begins at row `first` of the group, but
// for those that want the plain way. y is [vector][GROUP_ROWS].
template <class Multiply>
void in_groups(const Spec& spec, const Product& product, int64_t first, int64_t end, int64_t step_bytes, Range within,
               const Multiply& multiply) {
    const Steps steps = Steps::of(spec);
    RowGroup group(spec, steps);
    std::vector<float> y(size_t(product.batch * GROUP_ROWS));
    auto plain = [&](int64_t r, int64_t from, int64_t to) {
        plainly(spec, product, group.row[r], product.x, product.x_stride, from, to, &y[size_t(r)]);
    };
    for (int64_t row = first; row < end; row += GROUP_ROWS) {
        const int64_t rows = std::min<int64_t>(GROUP_ROWS, end - row);
        group.take(spec, steps, product.data + row * product.stride, product.stride, rows, step_bytes, within);
        for (int quad = 0; quad < rows; quad += ROWS) multiply(steps, group, quad, y.data());
        for (int64_t b = 0; b < product.batch; ++b) {
            for (int r = 0; r < GROUP_ROWS; ++r) y[size_t(b * GROUP_ROWS + r)] *= product.gain[b];
            for (int64_t r = 0; r < rows && product.gain[b] == 0.0f; ++r) plain(r, b, b + 1);
        }
        for (int64_t r = 0; r < rows; ++r) {
            if (group.plain[r]) plain(r, 0, product.batch);
        }
        finish(product, row, rows, y.data());
    }
}

template <class Code>
void direct_rows(const Code& code, const Spec& spec, const Product& product, int64_t first, int64_t end) {
    const int64_t length = prepared(spec), ahead = fetch_ahead(product.stride);
    const Range within{0.0f, finite_scale(spec)};
    in_groups(spec, product, first, end, Code::BYTES, within, [&](const Steps& steps, RowGroup& group, int quad, float* y) {
        for (int64_t b = 0, next; b < product.batch; b = next) {
            const float* x = product.prepared + b * length;
            const int64_t left = product.batch - b;
            float* of = y + b * GROUP_ROWS + quad;
            next = b + (left >= 4 ? 4 : left >= 2 ? 2 : 1);
            if (left >= 4) multiply<Code, 4>(code, steps, group, quad, x, length, of, ahead);
            else if (left >= 2) multiply<Code, 2>(code, steps, group, quad, x, length, of, ahead);
            else multiply<Code, 1>(code, steps, group, quad, x, length, of, ahead);
        }
    });
}

#if defined(__AVX512VNNI__)
template <class Code>
void byte_rows(const Code& code, const Spec& spec, const Product& product, int64_t first, int64_t end) {
    const int64_t length = prepared(spec), ahead = fetch_ahead(product.stride);
    auto some = [&](auto rows, auto batch, const Steps& steps, const RowGroup& group, int row, int64_t b, float* y) {
        auto by = multiply_bytes<Code, rows(), batch(), 0>;
        if (steps.flush == 1) by = multiply_bytes<Code, rows(), batch(), 1>;
        if (steps.flush == 2) by = multiply_bytes<Code, rows(), batch(), 2>;
        by(code, steps, group, row, product.prepared + b * length, 4 * length, y + b * GROUP_ROWS, ahead);
    };
    constexpr Constant<1> one;
    constexpr Constant<2> two;
    constexpr Constant<ROWS> four;
    in_groups(spec, product, first, end, Code::BYTES, {0.0f, 0x1p60f}, [&](const Steps& steps, RowGroup& group, int quad, float* y) {
        int64_t b = 0;
        for (; b + 2 <= product.batch; b += 2) {
            for (int row = 0; row < ROWS; row += 2) some(two, two, steps, group, quad + row, b, y);
        }
        if (b < product.batch) some(four, one, steps, group, quad, b, y);
    });
}
#endif

#if defined(__AVX512BF16__)
void pair_rows(const Spec& spec, const Product& product, int64_t first, int64_t end) {
    const int64_t length = prepared(spec), ahead = fetch_ahead(product.stride);
    const __m512i table = twice_in_bf16(spec);
    in_groups(spec, product, first, end, 64, {1.0f / FAR_SCALE, FAR_SCALE}, [&](const Steps& steps, RowGroup& group, int quad, float* y) {
        auto x = [&](int64_t b) { return product.prepared + b * length; };
        auto of = [&](int64_t b) { return y + b * GROUP_ROWS + quad; };
        int64_t b = 0;
        for (; b + 2 <= product.batch; b += 2) multiply_pairs<2>(table, steps, group, quad, x(b), length, of(b), ahead);
        if (b < product.batch) multiply_pairs<1>(table, steps, group, quad, x(b), length, of(b), ahead);
    });
}
#endif

void linear(const Spec& spec, const Product& product, int64_t first, int64_t end) {
    const Steps steps = Steps::of(spec);
#if defined(__AVX512BF16__)
    if (steps.direct && exact_pairs(spec, product.x.dtype)) return pair_rows(spec, product, first, end);
#endif
#if defined(__AVX512VNNI__)
    if (steps.direct && with_bytes(spec, [&](const auto& code) { byte_rows(code, spec, product, first, end); })) return;
#endif
    if (steps.direct) {
        return with_code(spec, [&](const auto& code) { direct_rows(code, spec, product, first, end); });
    }
    const int64_t length = prepared(spec);
    std::vector<float> y(size_t(product.batch * GROUP_ROWS));
    for (int64_t row = first; row < end; ++row) {
        const uint8_t* data = product.data + row * product.stride;
        plainly(spec, product, data, Floats{product.prepared, F32}, length, 0, product.batch, y.data());
        finish(product, row, 1, y.data());
    }
}

}  // namespace

namespace nc {
const Multiplier NC_NAMED_BY_ISA(multiplier) = {::prepared, ::prepare, ::linear};
}  // namespace nc
