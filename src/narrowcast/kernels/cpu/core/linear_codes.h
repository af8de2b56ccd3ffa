// Codes as vectors of floats, for multiplying: a step of codes is read as a vector of words, and its words as floats.
//
// A step is LANES words of 32 bits, each with EACH codes of neighbouring elements; what `value<J>` returns holds the J-th
// code of every word: elements J, EACH + J, 2 EACH + J, ... of the step. So nothing is shuffled but x, once (linear.h).
// Values are what codes stand for before the scale. A Code says how many bytes a step takes (BYTES), and, where some codes
// are not told apart from others here (CHECKED), `odd` marks words that hold one, with the top bits of its bytes.

#pragma once
#include "scales.h"

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int WIDTH = 4 * LANES;  // bytes of a vector
#define NC_FORCED __attribute__((always_inline)) inline

typedef float Vector __attribute__((vector_size(WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(WIDTH)));
typedef int32_t SignedBits __attribute__((vector_size(WIDTH)));

template <class V>
NC_FORCED V read(const void* at) {
    V value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

NC_FORCED Vector every(float x) {
#if defined(__AVX512F__)
    return (Vector)_mm512_set1_ps(x);
#else
    return Vector{} + x;
#endif
}

// table[index] of a table of LANES floats; only as many low bits of the index count as it takes.
NC_FORCED Vector pick(Vector table, Bits index) {
#if defined(__AVX512F__)
    return (Vector)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#elif defined(__AVX2__)
    return (Vector)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#else
    Vector found;
    for (int i = 0; i < LANES; ++i) found[i] = table[index[i] % LANES];
    return found;
#endif
}

NC_FORCED float sum_lanes(Vector x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int half = LANES / 2; half; half /= 2) {
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    }
    return x[0];
#endif
}

// The sums of four vectors' lanes, each as sum_lanes adds them.
NC_FORCED void sum_quad(const Vector (&x)[4], float* out) {
#if defined(__AVX512F__)
    __m128 q[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x[r]), _mm512_extractf32x8_ps((__m512)x[r], 1));
        q[r] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(q[0], q[1], q[2], q[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(q[0], q[2]), _mm_add_ps(q[1], q[3])));
#else
    for (int r = 0; r < 4; ++r) out[r] = sum_lanes(x[r]);
#endif
}

// (bits & mask) ^ flip
NC_FORCED Bits cut_and_flip(Bits bits, uint32_t mask, uint32_t flip) {
#if defined(__AVX512F__)
    return (Bits)_mm512_ternarylogic_epi32((__m512i)bits, _mm512_set1_epi32(int(mask)), _mm512_set1_epi32(int(flip)), 0x6A);
#else
    return (bits & mask) ^ flip;
#endif
}

// LANES words of four codes of BITS bits, a byte each.
template <int BITS>
NC_FORCED Bits in_bytes(const uint8_t* at) {
    if constexpr (BITS == 8) return read<Bits>(at);
    alignas(64) uint8_t codes[64];
#if defined(__AVX512VBMI__)
    unpack<BITS>(at, codes);
#else
    spread_words<BITS, LANES / 2>(at, codes);
#endif
    return read<Bits>(codes);
}

// Codes whose width divides 8 stay where they are; the others get a byte each.
template <int BITS>
struct Packed {
    static constexpr bool DENSE = 8 % BITS == 0, CHECKED = false, AFFINE_CODES = false;
    static constexpr int FIELD = DENSE ? BITS : 8, EACH = 32 / FIELD, BYTES = WIDTH / FIELD * BITS;

    NC_FORCED Bits words(const uint8_t* at) const {
        if constexpr (DENSE) return read<Bits>(at);
        else return in_bytes<BITS>(at);
    }
};

// Integers: `bits ^ FLIP` minus FLIP. The field is cut out where it lies and given an exponent that makes its lowest bit count
// one; taking away that exponent's one, and FLIP, leaves the number, exactly. A field that reaches into the exponent is
// shifted down first, with all that follow.
template <int BITS, int FLIP, bool AFFINE_>
struct Integers : Packed<BITS> {
    using Base = Packed<BITS>;
    static constexpr bool AFFINE_CODES = AFFINE_;
    explicit Integers(const Spec&) {}

    template <int J>
    NC_FORCED Vector value(Bits words) const {
        constexpr int fit = 23 / Base::FIELD, at = J % fit * Base::FIELD, shift = J / fit * fit * Base::FIELD;
        constexpr uint32_t one = uint32_t(127 + 23 - at) << 23;
        if (shift) words >>= shift;
        return (Vector)cut_and_flip(words, ((1u << BITS) - 1) << at, one ^ uint32_t(FLIP) << at) - float((1u << (23 - at)) + FLIP);
    }
};

template <int BITS>
using TwosComplement = Integers<BITS, 1 << (BITS - 1), false>;
template <int BITS>
using Offsets = Integers<BITS, 0, true>;  // less the block's zero point

// One or minus one.
struct Signs : Packed<1> {
    explicit Signs(const Spec&) {}
    template <int J>
    NC_FORCED Vector value(Bits words) const {
        return (Vector)cut_and_flip(words << (31 - J), 0x80000000u, 0x3F800000u);
    }
};

// Codes that are places in a table.
template <int BITS>
struct Looked : Packed<BITS> {
    using Base = Packed<BITS>;
    const float* levels;
#if defined(__AVX512F__)
    Registers<BITS < 4 ? 4 : BITS> table;
    explicit Looked(const Spec& spec) : levels(spec.levels), table(repeated(spec).at) {}
#elif defined(__AVX2__)
    Vector low, high;
    explicit Looked(const Spec& spec)
        : levels(spec.levels), low(read<Vector>(repeated(spec).at)), high(read<Vector>(repeated(spec).at + 8)) {}
#else
    explicit Looked(const Spec& spec) : levels(spec.levels) {}
#endif

    // Small tables are repeated up to 16 entries, so that the neighbour's bits in an index do not matter.
    struct Entries {
        float at[BITS > 4 ? 1 << BITS : 16];
    };
    static Entries repeated(const Spec& spec) {
        Entries all;
        constexpr int count = BITS > 4 ? 1 << BITS : 16;
        for (int i = 0; i < count; ++i) all.at[i] = spec.levels[i % (1 << BITS)];
        return all;
    }

    template <int J>
    NC_FORCED Vector value(Bits words) const {
        if (J) words >>= J * Base::FIELD;
#if defined(__AVX512F__)
        return (Vector)table[(__m512i)words];
#elif defined(__AVX2__)
        if constexpr (BITS > 4) return (Vector)_mm256_i32gather_ps(levels, (__m256i)(words & ((1u << BITS) - 1)), 4);
        return (Vector)_mm256_blendv_ps((__m256)pick(low, words), (__m256)pick(high, words), (__m256)(words << 28));
#else
        Vector found;
        words &= (1u << BITS) - 1;
        for (int i = 0; i < LANES; ++i) found[i] = levels[words[i]];
        return found;
#endif
    }
};

// Floats of a byte: sign and magnitude are put where fp32 has them, and the product corrects the bias, subnormals too. The
// codes from ODD on (infinity, NaN) would come out finite.
template <int MANTISSA, int BIAS, int ODD>
struct Narrowed : Packed<8> {
    static constexpr bool CHECKED = true;
    explicit Narrowed(const Spec&) {}

    NC_FORCED Bits odd(Bits words) const { return (words & 0x7F7F7F7Fu) + uint32_t(0x80 - ODD) * 0x01010101u; }

    template <int J>
    NC_FORCED Vector value(Bits words) const {
        if (J < 3) words <<= 24 - 8 * J;
        words = (Bits)((SignedBits)words >> (1 + MANTISSA)) & (0x80000000u | (0x7Fu << (23 - MANTISSA)));
        return (Vector)words * as<float>(uint32_t(127 + 127 - BIAS) << 23);
    }
};

using CodesE4M3 = Narrowed<3, 7, 0x7F>;
using CodesE5M2 = Narrowed<2, 15, 0x7C>;

struct Brains {
    static constexpr bool CHECKED = false, AFFINE_CODES = false;
    static constexpr int EACH = 2, BYTES = WIDTH;
    explicit Brains(const Spec&) {}
    NC_FORCED Bits words(const uint8_t* at) const { return read<Bits>(at); }
    template <int J>
    NC_FORCED Vector value(Bits words) const {
        return (Vector)(J ? words & 0xFFFF0000u : words << 16);
    }
};

template <bool HALF>
struct Wide {
    static constexpr bool CHECKED = false, AFFINE_CODES = false;
    static constexpr int EACH = 1, BYTES = HALF ? WIDTH / 2 : WIDTH;
    explicit Wide(const Spec&) {}
    NC_FORCED Bits words(const uint8_t* at) const {
        if constexpr (!HALF) return read<Bits>(at);
        alignas(64) float floats[LANES];
        widen_half(reinterpret_cast<const Half16*>(at), floats, LANES);
        return read<Bits>(floats);
    }
    template <int J>
    NC_FORCED Vector value(Bits words) const {
        return (Vector)words;
    }
};

}  // namespace
