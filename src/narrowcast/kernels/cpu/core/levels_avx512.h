// Counting thresholds with AVX-512: 64 elements at a time, tables in registers. Part of levels.h.

#pragma once

namespace {

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

}  // namespace
