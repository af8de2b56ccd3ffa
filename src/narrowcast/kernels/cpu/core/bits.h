// Codes and the little-endian bit stream: 64 codes of BITS bits are 8 * BITS bytes.
//
// Eight codes in eight bytes are squeezed together in three steps (pairs, fours, eights), all words at once; what is
// left is to drop the empty top bytes of each word.

#pragma once
#include <cstring>

#include "floats.h"

namespace {

// Eight bytes of which each holds a code, as one number of 8 * BITS bits. Word is uint64_t or a vector of them.
template <int BITS, class Word>
inline Word squeeze(Word x) {
    x = (x & 0x00FF00FF00FF00FFull) | ((x & 0xFF00FF00FF00FF00ull) >> (8 - BITS));
    x = (x & 0x0000FFFF0000FFFFull) | ((x & 0xFFFF0000FFFF0000ull) >> (16 - 2 * BITS));
    return (x & 0x00000000FFFFFFFFull) | ((x & 0xFFFFFFFF00000000ull) >> (32 - 4 * BITS));
}

// Inverse of `squeeze`.
template <int BITS>
inline uint64_t spread(uint64_t x) {
    constexpr uint64_t four = (1ull << (4 * BITS)) - 1, two = ((1ull << (2 * BITS)) - 1) * 0x100000001ull;
    constexpr uint64_t one = ((1ull << BITS) - 1) * 0x0001000100010001ull;
    x = (x & four) | ((x & (four << (4 * BITS))) << (32 - 4 * BITS));
    x = (x & two) | ((x & (two << (2 * BITS))) << (16 - 2 * BITS));
    return (x & one) | ((x & (one << BITS)) << (8 - BITS));
}

// WORDS numbers of 8 * BITS bits, one behind the other, to eight codes each.
template <int BITS, int WORDS>
inline void spread_words(const uint8_t* in, uint8_t* codes) {
    uint8_t local[WORDS * BITS + 8];
    std::memcpy(local, in, WORDS * BITS);
    for (int word = 0; word < WORDS; ++word) {
        uint64_t x;
        std::memcpy(&x, local + BITS * word, 8);
        x = spread<BITS>(x);
        std::memcpy(codes + 8 * word, &x, 8);
    }
}

#if defined(__AVX512VBMI__)
typedef uint64_t Words __attribute__((vector_size(64)));

template <int BITS>
struct ByteOrder {
    alignas(64) uint8_t pack[64], unpack[64];
    constexpr ByteOrder() : pack(), unpack() {
        for (int i = 0; i < 64; ++i) {
            pack[i] = uint8_t(i < 8 * BITS ? i / BITS * 8 + i % BITS : 0);
            unpack[i] = uint8_t(i % 8 < BITS ? i / 8 * BITS + i % 8 : 0);
        }
    }
};

// The low BYTES bytes (a multiple of 8) of a register, in plain stores.
template <int BYTES>
inline void store_low(__m512i x, uint8_t* out) {
    if constexpr (BYTES & 32) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(x));
        x = _mm512_shuffle_i64x2(x, x, 0x4E);
        out += 32;
    }
    if constexpr (BYTES & 16) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(x));
        x = _mm512_shuffle_i64x2(x, x, 0x39);
        out += 16;
    }
    if constexpr (BYTES & 8) _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(x));
}
#endif

// 64 codes (only their low BITS bits count, the others must be zero) to 8 * BITS bytes.
template <int BITS>
inline void pack(const uint8_t* codes, uint8_t* out) {
    if constexpr (BITS == 8) {
        std::memcpy(out, codes, 64);
    } else {
#if defined(__AVX512VBMI__)
        __m512i bytes = _mm512_loadu_si512(codes);
        if constexpr (BITS == 1) {
            uint64_t bits = _mm512_test_epi8_mask(bytes, bytes);
            std::memcpy(out, &bits, 8);
        } else if constexpr (BITS == 2) {
            __m512i fours = _mm512_madd_epi16(_mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x0401)), _mm512_set1_epi32(0x00100001));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(fours));
        } else if constexpr (BITS == 4) {
            __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(pairs));
        } else {
            static constexpr ByteOrder<BITS> order;
            bytes = (__m512i)squeeze<BITS>((Words)bytes);
            store_low<8 * BITS>(_mm512_permutexvar_epi8(_mm512_load_si512(order.pack), bytes), out);
        }
#else
        uint8_t local[64 + 8];
        for (int word = 0; word < 8; ++word) {
            uint64_t x;
            std::memcpy(&x, codes + 8 * word, 8);
            x = squeeze<BITS, uint64_t>(x);
            std::memcpy(local + BITS * word, &x, 8);
        }
        std::memcpy(out, local, 8 * BITS);
#endif
    }
}

// 8 * BITS bytes to 64 codes.
template <int BITS>
inline void unpack(const uint8_t* in, uint8_t* codes) {
    if constexpr (BITS == 8) {
        std::memcpy(codes, in, 64);
    } else {
#if defined(__AVX512VBMI__)
        if constexpr (BITS == 1) {
            uint64_t bits;
            std::memcpy(&bits, in, 8);
            _mm512_storeu_si512(codes, _mm512_maskz_set1_epi8(bits, 1));
            return;
        }
        static constexpr ByteOrder<BITS> order;
        alignas(64) static constexpr uint8_t shifts[8] = {0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS};
        __m512i bytes = _mm512_maskz_loadu_epi8((1ull << (8 * BITS)) - 1, in);
        bytes = _mm512_permutexvar_epi8(_mm512_load_si512(order.unpack), bytes);
        uint64_t at;
        std::memcpy(&at, shifts, 8);
        bytes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(int64_t(at)), bytes);
        _mm512_storeu_si512(codes, _mm512_and_si512(bytes, _mm512_set1_epi8((1 << BITS) - 1)));
#else
        spread_words<BITS, 8>(in, codes);
#endif
    }
}

}  // namespace
