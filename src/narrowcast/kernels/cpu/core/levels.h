// Codes that are places in a table: the code of y is how many thresholds lie below it.
//
// Ways to count, which agree exactly. Where every threshold is a multiple of a half (the integer grids of additive powers of
// two) 2y is rounded up to an integer and looked up; where levels are powers of two, y's exponent says which; otherwise a
// binary search goes down the thresholds.

#pragma once
#include "codes.h"

namespace {

// What a table's codes are found with, derived from its thresholds.
struct Table {
    enum Way { SEARCH, BYTES, MAGNITUDES, INTEGERS, POWERS };
    static constexpr int REACH = 2047;  // thresholds of a grid lie within +- REACH halves

    Way way = SEARCH;
    int32_t lowest = 0, highest = 0;           // for INTEGERS: lookup[t - lowest] is the code of t halves, t = ceil(2y)
    int32_t zero = 0;                          // for MAGNITUDES and POWERS: the code of 0, half way up the table
    alignas(64) uint8_t below[128];            // for MAGNITUDES: thresholds below 16 c, for each cell c of 16 halves,
    alignas(64) uint8_t first[128], last[128]; // and those in it, a bit for each half: the first eight, the last eight
    alignas(64) uint8_t lookup[2 * REACH + 2];
    alignas(64) float node[256];               // for SEARCH: step s compares with node[(1 << s) - 1 + (bits so far)]
    alignas(64) uint8_t order[256];            // for SEARCH: the code, from its bits in the order in which they were found

    explicit Table(const Spec& spec) {
        if (spec.element != LEVELS) return;
        const int count = 1 << spec.bits;
        int thresholds = 0;
        bool integers = true;
        for (; thresholds < count && spec.thresholds[thresholds] < HUGE_VALF; ++thresholds) {
            float halves = 2.0f * spec.thresholds[thresholds];
            // A threshold of zero tells 2 (x / scale) from x (2 / scale), which is what the fast ways take, where x / scale
            // vanishes.
            integers = integers && halves != 0.0f && std::fabs(halves) < float(REACH) && halves == std::floor(halves);
        }
#if defined(__AVX512VBMI__)
        if (!integers && powers(spec, thresholds)) {
            way = POWERS, zero = thresholds / 2;
            return;
        }
#endif
        if (integers) use_grid(spec, thresholds);
        else use_search(spec, count);
    }

   private:
    // Whether the thresholds are +-0.5, +-1.5, +-3, +-6, ...: those between 0 and the powers of two from 1 on.
    static bool powers(const Spec& spec, int thresholds) {
        bool so = thresholds % 2 == 0 && thresholds >= 4;
        float expected = 0.5f;
        for (int i = thresholds / 2; so && i < thresholds; ++i) {
            so = spec.thresholds[i] == expected && spec.thresholds[thresholds - 1 - i] == -expected;
            expected = i == thresholds / 2 ? 1.5f : 2.0f * expected;
        }
        return so;
    }

    void use_grid(const Spec& spec, int thresholds) {
        auto half = [&](int i) { return int32_t(2.0f * spec.thresholds[i]); };
        lowest = half(0), highest = half(thresholds - 1) + 1;
        way = INTEGERS;
#if defined(__AVX512VBMI__)
        bool symmetric = true;
        for (int i = 0; i < thresholds; ++i) symmetric = symmetric && half(i) == -half(thresholds - 1 - i);
        if (lowest >= -128 && highest <= 127) lowest = -128, highest = 127, way = BYTES;
        else if (symmetric && thresholds % 2 == 0) return use_magnitudes(spec, thresholds);
        else {  // a wide grid that is not symmetric, such as an unsigned one
            way = SEARCH;
            return use_search(spec, 1 << spec.bits);
        }
#endif
        int32_t from = lowest;
        for (int code = 0; code <= thresholds; ++code) {
            int32_t to = code < thresholds ? half(code) : highest;
            std::memset(lookup + (from - lowest), code, size_t(to - from + 1));
            from = to + 1;
        }
    }

    void use_magnitudes(const Spec& spec, int thresholds) {
        way = MAGNITUDES, zero = thresholds / 2;
        std::memset(first, 0, sizeof first);
        std::memset(last, 0, sizeof last);
        int next = zero;
        for (int cell = 0; cell < 128; ++cell) {
            below[cell] = uint8_t(next - zero);
            for (; next < thresholds; ++next) {
                int32_t place = int32_t(2.0f * spec.thresholds[next]) - 16 * cell;
                if (place >= 16) break;
                (place < 8 ? first : last)[cell] |= uint8_t(1 << (place & 7));
            }
        }
    }

    // Bit s of the number that a search finds is its answer at step s: the code's bits from the top.
    void use_search(const Spec& spec, int count) {
        for (int found = 0; found < count; ++found) {
            int code = 0;
            for (int step = 0; step < spec.bits; ++step) {
                int stride = 1 << (spec.bits - 1 - step);
                if (found < 1 << step) node[(1 << step) - 1 + found] = spec.thresholds[code + stride - 1];
                code += found >> step & 1 ? stride : 0;
            }
            order[found] = uint8_t(code);
        }
    }
};

#if defined(__AVX512VBMI__)

// A table of 1 << BITS floats in registers.
template <int BITS>
struct Registers {
    static constexpr int COUNT = BITS <= 4 ? 1 : 1 << (BITS - 4);
    __m512 part[COUNT];

    explicit Registers(const float* table) {
        constexpr __mmask16 there = BITS < 4 ? (1u << (1 << BITS)) - 1 : 0xFFFF;
        for (int i = 0; i < COUNT; ++i) part[i] = _mm512_maskz_loadu_ps(there, table + 16 * i);
    }

    inline __m512 operator[](__m512i index) const {
        if constexpr (BITS <= 4) return _mm512_permutexvar_ps(index, part[0]);
        __m512 found[COUNT > 1 ? COUNT / 2 : 1];
        for (int i = 0; i < COUNT / 2; ++i) found[i] = _mm512_permutex2var_ps(part[2 * i], index, part[2 * i + 1]);
        for (int bit = 5, left = COUNT / 2; left > 1; ++bit, left /= 2) {
            __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(1 << bit));
            for (int i = 0; i < left / 2; ++i) found[i] = _mm512_mask_mov_ps(found[2 * i], upper, found[2 * i + 1]);
        }
        return found[0];
    }
};

// A table of 256 bytes.
inline __m512i look_up_256(const uint8_t* table, __m512i index) {
    auto half = [&](const uint8_t* at) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(at), index, _mm512_load_si512(at + 64));
    };
    return _mm512_mask_mov_epi8(half(table), _mm512_movepi8_mask(index), half(table + 128));
}

// Rounded up. What is too large for an integer would come out negative; what is too small does so anyway.
inline __m512i ceil_of_product(const float* x, __m512 by) {
    __m512 product = _mm512_min_ps(_mm512_mul_ps(_mm512_loadu_ps(x), by), _mm512_set1_ps(0x1p30f));
    return _mm512_cvt_roundps_epi32(product, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
}

// Halves that fit into a signed byte; what is beyond is beyond every threshold, so saturation does no harm.
inline __m512i count_bytes(const float* x, Scaling by, const Table& table) {
    const __m512 halves = _mm512_set1_ps(2.0f * by.inverse);
    auto part = [&](int i) { return _mm512_cvtsepi32_epi8(ceil_of_product(x + 16 * i, halves)); };
    __m512i t = join(part(0), part(1), part(2), part(3));
    // lookup[0] is for t = -128: flip the top bit.
    return look_up_256(table.lookup, _mm512_xor_si512(t, _mm512_set1_epi8(char(0x80))));
}

inline __m512i look_up(const uint8_t* table, __m512i index) {  // of 128 bytes
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
}

// A symmetric grid: the magnitude's place, counted from the code of zero in the direction of the sign: the thresholds below
// its cell of 16 halves, and those of its cell below itself. A tie goes to the lower level, which for a negative y is the
// one farther out: hence one half more.
inline __m512i count_magnitudes(const float* x, Scaling by, const Table& table) {
    const __m512 halves = _mm512_set1_ps(2.0f * by.inverse);
    __mmask64 negative = 0;
    __m128i cells[4], inside[4];
    for (int i = 0; i < 4; ++i) {
        __m512i t = ceil_of_product(x + 16 * i, halves);
        __mmask16 below_zero = _mm512_movepi32_mask(t);
        t = _mm512_abs_epi32(t);
        t = _mm512_mask_add_epi32(t, below_zero, t, _mm512_set1_epi32(1));
        t = _mm512_min_epu32(t, _mm512_set1_epi32(Table::REACH));
        cells[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(t, 4));
        inside[i] = _mm512_cvtepi32_epi8(t);
        negative |= __mmask64(below_zero) << (16 * i);
    }
    const __m512i cell = join(cells[0], cells[1], cells[2], cells[3]);
    const __m512i half = _mm512_and_si512(join(inside[0], inside[1], inside[2], inside[3]), _mm512_set1_epi8(15));
    // The bits below half h of a cell: 2^h - 1, in two bytes.
    const __m512i under_first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m512i under_last = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 7, 15, 31, 63, 127));
    __m512i first = _mm512_and_si512(look_up(table.first, cell), _mm512_shuffle_epi8(under_first, half));
    __m512i last = _mm512_and_si512(look_up(table.last, cell), _mm512_shuffle_epi8(under_last, half));
    __m512i place = _mm512_add_epi8(_mm512_popcnt_epi8(first), _mm512_popcnt_epi8(last));
    place = _mm512_add_epi8(place, look_up(table.below, cell));
    __m512i zero = _mm512_set1_epi8(char(table.zero));
    return _mm512_mask_sub_epi8(_mm512_add_epi8(zero, place), negative, zero, place);
}

// Powers of two: past 1.5 * 2^e the next one is nearer, which a carry into the exponent tells. One more unit in the last place
// for a negative y sends its ties to the lower level, farther out.
inline __m512i count_powers(const float* x, Scaling by, const Table& table) {
    const __m512 halves = _mm512_set1_ps(2.0f * by.inverse);
    __mmask64 negative = 0, past_half = 0;
    __m128i exponent[4];
    for (int i = 0; i < 4; ++i) {
        __m512i bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), halves));
        __m512i magnitude = _mm512_add_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)), _mm512_srli_epi32(bits, 31));
        negative |= __mmask64(_mm512_movepi32_mask(bits)) << (16 * i);
        past_half |= __mmask64(_mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x3F800000))) << (16 * i);
        exponent[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x3FFFFF)), 23));
    }
    __m512i one = _mm512_set1_epi8(1), zero = _mm512_set1_epi8(char(table.zero));
    __m512i place = _mm512_subs_epu8(join(exponent[0], exponent[1], exponent[2], exponent[3]), _mm512_set1_epi8(char(128)));
    place = _mm512_min_epu8(_mm512_mask_add_epi8(place, past_half, place, one), zero);
    return _mm512_mask_sub_epi8(_mm512_add_epi8(zero, place), negative, zero, place);
}

template <int STEP>
inline void search_step(const Table& table, __m512 y, __m512i& found) {
    const Registers<STEP> nodes(table.node + (1 << STEP) - 1);
    __mmask16 above = _mm512_cmp_ps_mask(y, nodes[found], _CMP_GT_OQ);
    found = _mm512_mask_add_epi32(found, above, found, _mm512_set1_epi32(1 << STEP));
}

template <int BITS>
inline __m512i search(const float* x, Scaling by, const Table& table) {
    auto part = [&](int i) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), _mm512_set1_ps(by.inverse));
        __m512i found = _mm512_maskz_set1_epi32(_mm512_cmp_ps_mask(y, _mm512_set1_ps(table.node[0]), _CMP_GT_OQ), 1);
        if constexpr (BITS > 1) search_step<1>(table, y, found);
        if constexpr (BITS > 2) search_step<2>(table, y, found);
        if constexpr (BITS > 3) search_step<3>(table, y, found);
        if constexpr (BITS > 4) search_step<4>(table, y, found);
        if constexpr (BITS > 5) search_step<5>(table, y, found);
        if constexpr (BITS > 6) search_step<6>(table, y, found);
        if constexpr (BITS > 7) search_step<7>(table, y, found);
        return _mm512_cvtepi32_epi8(found);
    };
    __m512i found = join(part(0), part(1), part(2), part(3));
    if constexpr (BITS <= 6) return _mm512_permutexvar_epi8(found, _mm512_load_si512(table.order));
    return look_up_256(table.order, found);
}

template <int BITS>
inline void quantize_levels(const float* __restrict x, Scaling by, const Table& table, uint8_t* __restrict codes) {
    __m512i found;
    switch (table.way) {
        case Table::BYTES: found = count_bytes(x, by, table); break;
        case Table::MAGNITUDES: found = count_magnitudes(x, by, table); break;
        case Table::POWERS: found = count_powers(x, by, table); break;
        default: found = search<BITS>(x, by, table);
    }
    _mm512_storeu_si512(codes, found);
}

template <int BITS, bool ADD>
inline void dequantize_levels(const uint8_t* __restrict codes, Scaling by, const float* __restrict levels, float* __restrict out) {
    const Registers<BITS> table(levels);
    for (int i = 0; i < PIECE; i += 16) {
        __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        __m512 value = _mm512_mul_ps(table[index], _mm512_set1_ps(by.scale));
        _mm512_storeu_ps(out + i, ADD ? _mm512_add_ps(_mm512_loadu_ps(out + i), value) : value);
    }
}

#else

template <int BITS>
inline void quantize_levels(const float* __restrict x, Scaling by, const Table& table, uint8_t* __restrict codes) {
    if (table.way == Table::INTEGERS) {
        const float low = float(table.lowest), high = float(table.highest);
        int32_t t[PIECE];
        for (int i = 0; i < PIECE; ++i) t[i] = int32_t(std::ceil(clamp(2.0f * (x[i] * by.inverse), low, high))) - table.lowest;
        for (int i = 0; i < PIECE; ++i) codes[i] = table.lookup[t[i]];
        return;
    }
    for (int i = 0; i < PIECE; ++i) {
        float y = x[i] * by.inverse;
        uint32_t found = 0;
        for (int step = 0; step < BITS; ++step) found |= uint32_t(y > table.node[(1u << step) - 1 + found]) << step;
        codes[i] = table.order[found];
    }
}

template <int BITS, bool ADD>
inline void dequantize_levels(const uint8_t* __restrict codes, Scaling by, const float* __restrict levels, float* __restrict out) {
    for (int i = 0; i < PIECE; ++i) put<ADD>(levels[codes[i]] * by.scale, out[i]);
}

#endif

}  // namespace
