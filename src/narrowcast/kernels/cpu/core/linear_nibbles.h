// Tables of 16 levels on AVX2, a step of 64 codes at once: the bytes of their floats are looked up, then put together.
//
// Looking up floats takes two permutations and a choice for eight of them. A shuffle looks up one byte of 32 floats; four of
// them make a float, and two do where every level's lower half is zero, as that of small integers is. Which element comes to
// lie in which lane is the same. Codes that are integers gain nothing by this: their floats are made by arithmetic as fast.

#pragma once
#include "linear_codes.h"

namespace {

// Whether a Code has `values`, all of a step, in place of `value`.
template <class Code>
constexpr bool AT_ONCE = false;

#if defined(__AVX2__) && !defined(__AVX512F__)

template <int PLANES>
struct Nibbles : Packed<4> {
    static_assert(PLANES == 2 || PLANES == 4, "the upper bytes of a float, or all");
    __m256i plane[PLANES];  // byte 4 - PLANES + p of 16 floats, twice

    explicit Nibbles(const float* levels) {
        alignas(32) uint8_t bytes[PLANES][32];
        for (int i = 0; i < 32; ++i) {
            const uint32_t bits = as<uint32_t>(levels[i % 16]);
            for (int p = 0; p < PLANES; ++p) bytes[p][i] = uint8_t(bits >> 8 * (4 - PLANES + p));
        }
        for (int p = 0; p < PLANES; ++p) plane[p] = read<__m256i>(bytes[p]);
    }

    NC_FORCED __m256i look_up(int p, __m256i index) const { return _mm256_shuffle_epi8(plane[p], index); }

    // out[J]: elements J, 8 + J, 16 + J, ... of a step.
    NC_FORCED void values(Bits words, Vector (&out)[8]) const {
        // Within 16 bytes, so that interleaving brings byte q of word m into lane m.
        const __m256i order = PLANES == 2 ? _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15))
                                          : _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        const __m256i bytes = _mm256_shuffle_epi8((__m256i)words, order), low = _mm256_set1_epi8(15);
        const __m256i nibble[2] = {_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)};
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) {
            const __m256i third = look_up(PLANES - 2, nibble[n]), last = look_up(PLANES - 1, nibble[n]);
            const __m256i upper[2] = {_mm256_unpacklo_epi8(third, last), _mm256_unpackhi_epi8(third, last)};
            if constexpr (PLANES == 2) {
#pragma GCC unroll 2
                for (int h = 0; h < 2; ++h) {
                    out[4 * h + n] = (Vector)_mm256_slli_epi32(upper[h], 16);
                    out[4 * h + 2 + n] = (Vector)_mm256_and_si256(upper[h], _mm256_set1_epi32(int(0xFFFF0000u)));
                }
            } else {
                const __m256i first = look_up(0, nibble[n]), second = look_up(1, nibble[n]);
                const __m256i lower[2] = {_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second)};
#pragma GCC unroll 2
                for (int h = 0; h < 2; ++h) {
                    out[4 * h + n] = (Vector)_mm256_unpacklo_epi16(lower[h], upper[h]);
                    out[4 * h + 2 + n] = (Vector)_mm256_unpackhi_epi16(lower[h], upper[h]);
                }
            }
        }
    }
};

template <int PLANES>
constexpr bool AT_ONCE<Nibbles<PLANES>> = true;

// f(Nibbles) for tables of 16 levels; false where the spec is of others.
template <class F>
inline bool with_nibbles(const Spec& spec, const F& f) {
    if (spec.element != LEVELS || spec.bits != 4) return false;
    uint32_t lower = 0;
    for (int i = 0; i < 16; ++i) lower |= as<uint32_t>(spec.levels[i]) & 0xFFFFu;
    if (lower) f(Nibbles<4>(spec.levels));
    else f(Nibbles<2>(spec.levels));
    return true;
}

#endif

// f(Code(spec)) for the Code that the spec names.
template <class F>
inline void with_code(const Spec& spec, const F& f) {
#define NC_WIDTH(E, CODE, N) \
    case (E << 4) + N: return f(CODE<N>(spec));
#define NC_WIDTHS(E, CODE) \
    NC_WIDTH(E, CODE, 2) NC_WIDTH(E, CODE, 3) NC_WIDTH(E, CODE, 4) NC_WIDTH(E, CODE, 5) NC_WIDTH(E, CODE, 6) \
    NC_WIDTH(E, CODE, 7) NC_WIDTH(E, CODE, 8)
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (with_nibbles(spec, f)) return;
#endif
    switch ((spec.element << 4) + (spec.bits & 15)) {
        NC_WIDTHS(INT, TwosComplement)
        NC_WIDTHS(AFFINE, Offsets)
        NC_WIDTHS(LEVELS, Looked)
        NC_WIDTH(LEVELS, Looked, 1)
        case (SIGN << 4) + 1: return f(Signs(spec));
        case (E4M3 << 4) + 8: return f(CodesE4M3(spec));
        case (E5M2 << 4) + 8: return f(CodesE5M2(spec));
        case BF16 << 4: return f(Brains(spec));
        case FP16 << 4: return f(Wide<true>(spec));
        default: return f(Wide<false>(spec));
    }
#undef NC_WIDTHS
#undef NC_WIDTH
}

}  // namespace
