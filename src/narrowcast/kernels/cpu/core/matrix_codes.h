// A row's codes as lines of bf16, each weight scaled, then rounded to nearest. `put` writes the lines of one step of codes, which are
// `apart` elements from each other; `place(j, k)` says which element of the step position k of line j has.

#pragma once
#include "brain_pairs.h"
#include "linear_plain.h"

#if defined(__AMX_BF16__)
namespace {

// What a step of codes takes of its row's scales and zero points.
struct Scales {
    const float *scales, *zeros;
    bool several;
    Bits lanes;
};

// Any codes: line j has elements 2 j of all words, then elements 2 j + 1.
template <class Code>
struct Lines : Code {
    explicit Lines(const Code& code) : Code(code) {}

    static int place(int j, int k) { return Code::EACH * (k % LANES) + 2 * j + k / LANES; }

    NC_FORCED void put(Bits words, const Scales& row, uint16_t* out, int64_t apart) const {
        const Vector scale = for_lanes(row.scales, row.several, row.lanes);
        const Vector zero = Code::AFFINE_CODES ? for_lanes(row.zeros, row.several, row.lanes) : Vector{};
        put(words, scale, zero, out, apart, std::make_integer_sequence<int, Code::EACH / 2>());
    }

   private:
    template <int J>
    NC_FORCED __m512 weight(Bits words, Vector scale, Vector zero) const {
        const Vector value = Code::template value<J>(words);
        return (__m512)((Code::AFFINE_CODES ? value - zero : value) * scale);
    }
    template <int... J>
    NC_FORCED void put(Bits words, Vector scale, Vector zero, uint16_t* out, int64_t apart, std::integer_sequence<int, J...>) const {
        (_mm512_store_si512(out + J * apart, (__m512i)_mm512_cvtne2ps_pbh(weight<2 * J + 1>(words, scale, zero), weight<2 * J>(words, scale, zero))), ...);
    }
};

// Up to 5 bits, with one scale for a step, or two: what the codes stand for in a block is looked up in a table of 32. Line j has the j-th
// code of every 16 bits. Fewer than 32 levels are repeated, so that the neighbour's bits in an index do not matter; of two blocks' tables,
// 16 levels each, the highest bit of an index says which.
template <int BITS, bool TWO>
struct LookedLines : Packed<BITS> {
    static constexpr int FIELD = Packed<BITS>::FIELD, LINES_EACH = 16 / FIELD;
    __m512 low, high;

    explicit LookedLines(const Spec& spec) {
        constexpr int HALF = 1 << (BITS - 1);
        float levels[32];
        for (int i = 0; i < 32; ++i) levels[i] = spec.element == INT ? float((i % (2 * HALF) ^ HALF) - HALF) : spec.levels[i % (2 * HALF)];
        low = _mm512_loadu_ps(levels), high = _mm512_loadu_ps(levels + 16);
    }

    static int place(int j, int k) { return LINES_EACH * k + j; }

    NC_FORCED void put(Bits words, const Scales& row, uint16_t* out, int64_t apart) const {
        const __m512 first = _mm512_mul_ps(low, _mm512_set1_ps(row.scales[0])), second = _mm512_mul_ps(high, _mm512_set1_ps(row.scales[TWO]));
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(second, first);
#pragma GCC unroll 8
        for (int j = 0; j < LINES_EACH; ++j) {
            __m512i index = _mm512_srli_epi16((__m512i)words, FIELD * j);
            if (TWO) {
                const __m512i block = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
                index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15), block, 0xEA);  // index & 15 | block
            }
            _mm512_store_si512(out + j * apart, _mm512_permutexvar_epi16(index, table));
        }
    }
};

// f(Code) for the codes of a spec as lines; false for floats, which there are none for.
template <class F>
inline bool with_lines(const Spec& spec, const Steps& steps, const F& f) {
    if (spec.element == FP32 || spec.element == FP16 || spec.element == BF16) return false;
    if (spec.element == INT || spec.element == LEVELS) {
        if (spec.bits == 4 && steps.blocks == 2) return f(LookedLines<4, true>(spec)), true;
        if (steps.blocks == 1) switch (spec.bits) {
            case 2: return f(LookedLines<2, false>(spec)), true;
            case 3: return f(LookedLines<3, false>(spec)), true;
            case 4: return f(LookedLines<4, false>(spec)), true;
            case 5: return f(LookedLines<5, false>(spec)), true;
        }
    }
    with_code(spec, [&](const auto& code) {
        using Code = std::decay_t<decltype(code)>;
        if constexpr (Code::EACH >= 4) f(Lines<Code>(code));
    });
    return true;
}

}  // namespace
#endif
