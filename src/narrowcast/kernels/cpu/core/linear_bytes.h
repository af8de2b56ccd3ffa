// Integers multiplied as integers: codes as bytes, x as four bytes of fixed point, exact sums of 32 bits (AVX-512 VNNI).
//
// x becomes integers of 31 bits, relative to its largest magnitude, and these become four digits of 8 bits with a sign,
// X = ((d0 256 + d1) 256 + d2) 256 + d3. One instruction multiplies 64 bytes of codes with 64 digits and adds fours of them. So
// a product is exact but for the rounding of x: 2^-30 of the largest x at most. A code u stands for u - LESS; the sums of
// digits times -LESS are where sums begin. Steps and lanes are those of linear_codes.h: field J of byte i of a step
// is element FIELDS i + J.

#pragma once
#include "linear_rows.h"

#if defined(__AVX512VNNI__)
namespace {

constexpr int DIGITS = 4;
constexpr int64_t MOST_STEPS = 16;  // whose sums fit 32 bits, with the next digit behind

typedef int32_t Sums32 __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));

NC_FORCED Bytes cut(Bytes words, int shift, int mask, int flip) {
    __m512i x = (__m512i)words;
    if (shift > 0) x = _mm512_srli_epi16(x, unsigned(shift));
    if (shift < 0) x = _mm512_slli_epi16(x, unsigned(-shift));
    return (Bytes)_mm512_ternarylogic_epi32(x, _mm512_set1_epi8(char(mask)), _mm512_set1_epi8(char(flip)), 0x6A);
}

template <int BITS>
struct ByteFields : Packed<BITS> {
    static constexpr int FIELDS = ByteFields::DENSE ? 8 / BITS : 1, MASK = (1 << BITS) - 1;
    int less = 0;
    NC_FORCED Bytes field(Bytes words, int j, int flip) const {
        return BITS == 8 && flip == 0 ? words : cut(words, j * BITS, MASK, flip);
    }
};

template <int BITS>
struct ByteIntegers : ByteFields<BITS> {
    explicit ByteIntegers(const Spec&) { this->less = 1 << (BITS - 1); }
    template <int J>
    NC_FORCED Bytes value(Bytes words) const {
        return this->field(words, J, 1 << (BITS - 1));
    }
};

template <int BITS>
struct ByteOffsets : ByteFields<BITS> {  // less the block's zero point
    static constexpr bool AFFINE_CODES = true;
    explicit ByteOffsets(const Spec&) { this->less = -1; }
    template <int J>
    NC_FORCED Bytes value(Bytes words) const {
        return this->field(words, J, 0);
    }
};

struct ByteSigns : ByteFields<1> {  // 2 or 0, less 1
    explicit ByteSigns(const Spec&) { less = 1; }
    template <int J>
    NC_FORCED Bytes value(Bytes words) const {
        return cut(words, J - 1, 2, 2);
    }
};

// f(Code(spec)) for integers; false where there is none for this spec.
template <class F>
inline bool with_bytes(const Spec& spec, const F& f) {
#define NC_WIDTH(E, CODE, N) \
    case (E << 4) + N: return f(CODE<N>(spec)), true;
    switch ((spec.element << 4) + (spec.bits & 15)) {
        NC_WIDTH(INT, ByteIntegers, 2) NC_WIDTH(INT, ByteIntegers, 3) NC_WIDTH(INT, ByteIntegers, 4)
        NC_WIDTH(INT, ByteIntegers, 5) NC_WIDTH(INT, ByteIntegers, 6) NC_WIDTH(INT, ByteIntegers, 7)
        NC_WIDTH(INT, ByteIntegers, 8)
        NC_WIDTH(AFFINE, ByteOffsets, 2) NC_WIDTH(AFFINE, ByteOffsets, 3) NC_WIDTH(AFFINE, ByteOffsets, 4)
        NC_WIDTH(AFFINE, ByteOffsets, 5) NC_WIDTH(AFFINE, ByteOffsets, 6) NC_WIDTH(AFFINE, ByteOffsets, 7)
        NC_WIDTH(AFFINE, ByteOffsets, 8)
        case (SIGN << 4) + 1: return f(ByteSigns(spec)), true;
        default: return false;
    }
#undef NC_WIDTH
}

// -- x as digits ----------------------------------------------------------------------------------------------------------------

// How prepared x lies: the digits of every step, [field][digit][64], then the beginnings of every flush, [digit][lane].
inline int64_t digits_bytes(const Steps& steps) { return steps.all * steps.size * DIGITS; }

inline int64_t flush_end(const Steps& steps, int64_t step) {
    return std::min({(step / steps.flush + 1) * steps.flush, step + MOST_STEPS, steps.all});
}

inline int64_t flushes(const Steps& steps) {
    int64_t count = 0;
    for (int64_t step = 0; step < steps.all; step = flush_end(steps, step)) ++count;
    return count;
}

// One step of x as digits; adds them up by lanes.
template <int FIELDS>
void deal_digits(const float* x, float by, int8_t* out, Sums32 (&sums)[DIGITS]) {
    alignas(64) int8_t digits[DIGITS][64 * FIELDS];
    for (int i = 0; i < 64 * FIELDS; ++i) {
        // Half of every lower digit, so that digits from 0 to 255 less 128 come out by shifting.
        const uint32_t whole = uint32_t(int32_t(std::nearbyint(x[i] * by))) + 0x808080u;
        digits[0][i] = int8_t(whole >> 24);
        for (int d = 1; d < DIGITS; ++d) digits[d][i] = int8_t((whole >> (24 - 8 * d) & 0xFF) ^ 0x80);
    }
    for (int d = 0; d < DIGITS; ++d) {
        for (int j = 0; j < FIELDS; ++j) {
            int8_t* to = out + (j * DIGITS + d) * 64;
            for (int i = 0; i < 64; ++i) to[i] = digits[d][FIELDS * i + j];
            sums[d] = (Sums32)_mm512_dpbusd_epi32((__m512i)sums[d], _mm512_set1_epi8(1), _mm512_loadu_si512(to));
        }
    }
}

// The exponent that makes `most` 30 bits long, or 0 where such fixed point is not for x.
inline float fixed_point(uint32_t most) {
    if (most == 0) return 1.0f;
    if (most < as<uint32_t>(0x1p-64f) || most >= as<uint32_t>(0x1p64f)) return 0.0f;
    return as<float>((127u + 29u + 127u - (most >> 23)) << 23);
}

template <class Code>
void prepare_digits(const Code& code, const Spec& spec, const Steps& steps, const float* x, float by, void* out) {
    int8_t* digits = static_cast<int8_t*>(out);
    int32_t* begins = reinterpret_cast<int32_t*>(digits + digits_bytes(steps));
    alignas(64) float last[64 * 8] = {};
    for (int64_t step = 0; step < steps.all; begins += DIGITS * LANES) {
        Sums32 sums[DIGITS] = {};
        for (const int64_t end = flush_end(steps, step); step < end; ++step) {
            const float* from = x + step * steps.size;
            if (step == steps.whole) {
                std::memcpy(last, from, size_t(spec.numel - step * steps.size) * 4);
                from = last;
            }
            deal_digits<Code::FIELDS>(from, by, digits + step * steps.size * DIGITS, sums);
        }
        for (int d = 0; d < DIGITS; ++d) {
            sums[d] *= -code.less;
            std::memcpy(begins + d * LANES, &sums[d], 64);
        }
    }
}

// -- ROWS_ rows times BATCH vectors -----------------------------------------------------------------------------------------------

template <class Code, int ROWS_, int BATCH>
struct ByteSums {
    Sums32 sum[ROWS_][BATCH][DIGITS];

    template <int J>
    NC_FORCED void column(const Code& code, const Bytes (&words)[ROWS_], const int8_t* x, int64_t x_stride) {
        Bytes weight[ROWS_];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_; ++r) {
            weight[r] = code.template value<J>(words[r]);
        }
#pragma GCC unroll 4
        for (int b = 0; b < BATCH; ++b) {
#pragma GCC unroll 4
            for (int d = 0; d < DIGITS; ++d) {
                const __m512i some = _mm512_loadu_si512(x + b * x_stride + (J * DIGITS + d) * 64);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS_; ++r) {
                    sum[r][b][d] = (Sums32)_mm512_dpbusd_epi32((__m512i)sum[r][b][d], (__m512i)weight[r], some);
                }
            }
        }
    }

    template <int... J>
    NC_FORCED void step(const Code& code, const uint8_t* const (&at)[ROWS_], const int8_t* x, int64_t x_stride,
                        std::integer_sequence<int, J...>) {
        Bytes words[ROWS_];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_; ++r) words[r] = (Bytes)code.words(at[r]);
        (column<J>(code, words, x, x_stride), ...);
    }

    NC_FORCED void begin(const int8_t* begins, int64_t x_stride, const Vector (&zero)[ROWS_]) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_; ++r) {
#pragma GCC unroll 4
            for (int b = 0; b < BATCH; ++b) {
#pragma GCC unroll 4
                for (int d = 0; d < DIGITS; ++d) {
                    sum[r][b][d] = read<Sums32>(begins + b * x_stride + d * 64);
                    if (Code::AFFINE_CODES) sum[r][b][d] *= -__builtin_convertvector(zero[r], Sums32);
                }
            }
        }
    }

    NC_FORCED Vector whole(int r, int b) const {
        const Sums32(&d)[DIGITS] = sum[r][b];
        return __builtin_convertvector(d[0] * 256 + d[1], Vector) * 65536.0f + __builtin_convertvector(d[2] * 256 + d[3], Vector);
    }
};

// FLUSH is steps.flush where that is 1 or 2, as with blocks of up to two steps, for it makes a loop less; else 0.
template <class Code, int ROWS_, int BATCH, int FLUSH>
__attribute__((noinline)) void multiply_bytes(const Code& code, const Steps& steps, const RowGroup& group, int first, const void* x,
                                              int64_t x_stride, float* y, int64_t ahead) {
    const int8_t *digits = static_cast<const int8_t*>(x), *begins = digits + digits_bytes(steps);
    ByteSums<Code, ROWS_, BATCH> sums;
    Vector total[ROWS_][BATCH] = {}, scale[ROWS_], zero[ROWS_];
    const float *scales[ROWS_], *zeros[ROWS_];
    const uint8_t* rows[ROWS_];
    for (int r = 0; r < ROWS_; ++r) {
        rows[r] = group.row[first + r];
        scales[r] = group.scales.data() + (first + r) * group.stride;
        zeros[r] = group.zeros.data() + (first + r) * group.stride;
    }
    const bool several = steps.blocks > 1;
    const int64_t all = steps.all, whole = steps.whole, flush = steps.flush, blocks = steps.blocks;
    const Bits lanes = group.lanes;
    auto step_of = [&](int64_t step) __attribute__((always_inline)) {
        const uint8_t* at[ROWS_];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_; ++r) {
            at[r] = step < whole ? rows[r] + step * Code::BYTES : group.tail[first + r];
            __builtin_prefetch(at[r] + ahead, 0, 2);
        }
        const int8_t* some = digits + step * (64 * Code::FIELDS * DIGITS);
        sums.step(code, at, some, x_stride, std::make_integer_sequence<int, Code::FIELDS>());
    };
    int64_t step = 0;
    for (int64_t block = 0; step < all; block += blocks) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_; ++r) {
            scale[r] = for_lanes(scales[r] + block, several, lanes);
            if (Code::AFFINE_CODES) zero[r] = for_lanes(zeros[r] + block, several, lanes);
        }
        const int64_t block_end = std::min(step + flush, all);
        do {
            sums.begin(begins, x_stride, zero);
            begins += DIGITS * 64;
            if (FLUSH) step_of(step++);
            if (FLUSH == 2 && step < all) step_of(step++);
            if (!FLUSH) for (const int64_t end = std::min(step + MOST_STEPS, block_end); step < end; ++step) step_of(step);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS_; ++r) {
#pragma GCC unroll 4
                for (int b = 0; b < BATCH; ++b) total[r][b] += scale[r] * sums.whole(r, b);
            }
        } while (!FLUSH && step < block_end);
    }
    for (int b = 0; b < BATCH; ++b) {
        if constexpr (ROWS_ == ROWS) {
            const Vector of[ROWS] = {total[0][b], total[1][b], total[2][b], total[3][b]};
            sum_quad(of, y + b * GROUP_ROWS + first);
        } else {
            for (int r = 0; r < ROWS_; ++r) y[b * GROUP_ROWS + first + r] = sum_lanes(total[r][b]);
        }
    }
}

}  // namespace
#endif
