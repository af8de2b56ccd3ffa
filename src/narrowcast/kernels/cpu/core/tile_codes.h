// Codes of 16 rows as words of a tile. `put` writes the EACH / PER words that one word of codes becomes.

#pragma once
#include "tile_rows.h"

#if defined(__AVX512BF16__)
namespace {

// Weights as floats, decoded and scaled: singles, or pairs.
template <class Code, class Kind_>
struct Floated : Code {
    using Kind = Kind_;
    explicit Floated(const Code& code) : Code(code) {}

    template <int... J>
    NC_FORCED void put(Bits word, Vector scale, Vector zero, float* out, std::integer_sequence<int, J...>) const {
        if constexpr (Kind::PER == 1) (_mm512_store_ps(out + J * PANEL, (__m512)(value_of<J>(word, zero) * scale)), ...);
        else (_mm512_store_si512(out + J * PANEL, pair<J>(word, scale, zero)), ...);
    }

   private:
    template <int J>
    NC_FORCED Vector value_of(Bits word, Vector zero) const {
        const Vector value = Code::template value<J>(word);
        return Code::AFFINE_CODES ? value - zero : value;
    }

    // Elements 2 J and 2 J + 1. Without a scale, floats have no more than 8 significant bits: their lower halves are zeros.
    template <int J>
    NC_FORCED __m512i pair(Bits word, Vector scale, Vector zero) const {
        const Vector first = value_of<2 * J>(word, zero), second = value_of<2 * J + 1>(word, zero);
        if constexpr (!Kind::SCALED) {
            const __m512i upper = _mm512_set1_epi32(int(0xFFFF0000u));
            return _mm512_ternarylogic_epi32(_mm512_srli_epi32((__m512i)first, 16), (__m512i)second, upper, 0xF8);
        }
        alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)(second * scale), (__m512)(first * scale));
        return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), (__m512i)both);
    }
};

// 4 bits: halves of a word are looked up, elements J and J + 4 at the same time. The table lies there twice, for the lowest bit
// of the neighbour is a part of the index.
struct NibblePairs : Packed<4> {
    using Kind = Pair;
    __m512i table;

    explicit NibblePairs(const Spec& spec) : table(twice_in_bf16(spec)) {}

    template <int... J>
    NC_FORCED void put(Bits word, Vector, Vector, float* out, std::integer_sequence<int, J...>) const {
        (_mm512_store_si512(out + J * PANEL, _mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)word, 4 * J), table)), ...);
    }
};

// f(Code) for the codes of a spec as words of a tile; false for floats, which there are none for.
template <class F>
inline bool with_words(const Spec& spec, int32_t way, const F& f) {
    if (spec.element == FP32 || spec.element == FP16 || spec.element == BF16) return false;
    const bool exact = way == Pair::WAY;
    if (exact && crossed(spec)) return f(NibblePairs(spec)), true;
    float levels[256];
    Spec rounded = spec;
    if (exact && spec.element == LEVELS) {
        for (int i = 0; i < 1 << spec.bits; ++i) levels[i] = as<float>(uint32_t(nearest_bf16(spec.levels[i])) << 16);
        rounded.levels = levels;
    }
    if (spec.element == INT && spec.bits == 4) {  // looked up: an instruction less than by arithmetic
        for (int i = 0; i < 16; ++i) levels[i] = float((i ^ 8) - 8);
        rounded.levels = levels, rounded.element = LEVELS;
    }
    with_code(rounded, [&](const auto& code) {
        using Code = std::decay_t<decltype(code)>;
        if constexpr (Code::EACH >= 4) {
            if (exact) f(Floated<Code, Pair>(code));
            else if (way == ScaledPair::WAY) f(Floated<Code, ScaledPair>(code));
            else f(Floated<Code, Single>(code));
        }
    });
    return true;
}

// Steps [step, end) of 32 rows, into a tile.
template <class Code>
__attribute__((noinline)) void decode_tile(const Code& code, const Steps& steps, Panel& panel, int64_t step, int64_t end, float* tile) {
    constexpr int WORDS = Code::EACH / Code::Kind::PER;
    const int words_of_block = LANES / int(steps.blocks);
    for (; step < end; ++step, tile += LANES * WORDS * PANEL) {
        const int64_t block = steps.blocks > 1 ? step * steps.blocks : step / steps.flush;
        for (int half = 0; half < PANEL; half += LANES) {
            Bits words[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; ++r) {
                const uint8_t* at = step < steps.whole ? panel.row[half + r] + step * Code::BYTES : panel.tail[half + r];
                words[r] = code.words(at);
            }
            transpose(words);
            int64_t place = block * PANEL + half;
            float* to = tile + half;
            for (int i = 0; i < LANES; place += PANEL) {
                const Vector scale = Code::Kind::SCALED ? read<Vector>(panel.scales + place) : Vector{};
                const Vector zero = Code::AFFINE_CODES ? read<Vector>(&panel.zeros[size_t(place)]) : Vector{};
                for (const int end_of_block = i + words_of_block; i < end_of_block; ++i, to += WORDS * PANEL) {
                    if constexpr (Code::CHECKED) panel.odd[half / LANES] |= code.odd(words[i]);
                    code.put(words[i], scale, zero, to, std::make_integer_sequence<int, WORDS>());
                }
            }
        }
    }
}

}  // namespace
#endif
