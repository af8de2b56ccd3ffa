// Counting thresholds with AVX2: tables of at most 16 levels in two registers. Part of levels.h.

#pragma once

namespace {

// A table of at most 16 floats in two registers: entry `index`, of whose bits those above BITS must be zero.
template <int BITS>
struct Registers {
    __m256 low, high;

    explicit Registers(const float* table) {
        if constexpr (BITS >= 3) {
            low = _mm256_loadu_ps(table);
        } else {
            alignas(32) float few[8] = {};
            std::memcpy(few, table, sizeof(float) << BITS);
            low = _mm256_load_ps(few);
        }
        high = BITS == 4 ? _mm256_loadu_ps(table + 8) : low;
    }

    inline __m256 operator[](__m256i index) const {
        const __m256 found = _mm256_permutevar8x32_ps(low, index);
        if constexpr (BITS < 4) return found;
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
        return _mm256_blendv_ps(found, _mm256_permutevar8x32_ps(high, index), upper);
    }
};

template <int STEP>
inline void search_step(const Table& table, __m256 y, __m256i& found) {
    const Registers<STEP> nodes(table.node + (1 << STEP) - 1);
    const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(y, nodes[found], _CMP_GT_OQ));
    found = _mm256_or_si256(found, _mm256_and_si256(above, _mm256_set1_epi32(1 << STEP)));
}

// The codes of 32 floats, by a search in tables of at most 16 levels.
template <int BITS>
inline void search(const float* x, Scaling by, const Table& table, uint8_t* codes) {
    auto part = [&](int i) {
        const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(by.inverse));
        const __m256 first = _mm256_cmp_ps(y, _mm256_set1_ps(table.node[0]), _CMP_GT_OQ);
        __m256i found = _mm256_srli_epi32(_mm256_castps_si256(first), 31);
        if constexpr (BITS > 1) search_step<1>(table, y, found);
        if constexpr (BITS > 2) search_step<2>(table, y, found);
        if constexpr (BITS > 3) search_step<3>(table, y, found);
        return found;
    };
    const __m256i pairs = _mm256_packus_epi32(part(0), part(1)), rest = _mm256_packus_epi32(part(2), part(3));
    // Packing goes by halves of registers: fours of bytes 0, 2, 4, 6 lie in the lower one.
    const __m256i fours = _mm256_packus_epi16(pairs, rest), places = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(table.order));
    const __m256i found = _mm256_permutevar8x32_epi32(fours, places);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(order), found));
}

}  // namespace
