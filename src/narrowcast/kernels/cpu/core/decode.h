// Decoding part of a row, piece by piece; the mirror of encode.h.

#pragma once
#include "encode.h"

namespace {

constexpr int64_t FETCH = 2048;  // bytes that decoding asks for ahead: ranks are read in turns, too short for the hardware

// PIECE floats, written to `out` or, for ADD, added to what is there.
template <int ELEMENT, int BITS, bool ADD>
NC_INLINE void dequantize_piece(const Spec& spec, const uint8_t* codes, Scaling by, float* out) {
    if constexpr (ELEMENT == INT) dequantize_int<BITS, ADD>(codes, by, out);
    if constexpr (ELEMENT == AFFINE) dequantize_affine<ADD>(codes, by, out);
    if constexpr (ELEMENT == LEVELS) dequantize_levels<BITS, ADD>(codes, by, spec.levels, out);
    if constexpr (ELEMENT == SIGN) dequantize_sign<ADD>(codes, by, out);
    if constexpr (ELEMENT == E4M3) dequantize_float<Fp8E4M3, ADD>(codes, by.scale, out);
    if constexpr (ELEMENT == E5M2) dequantize_float<Fp8E5M2, ADD>(codes, by.scale, out);
    // What makes a NaN of its own, which the processor gives a sign: a scale that is none, or infinity times zero.
    if (!(std::fabs(by.scale) < HUGE_VALF) || (ELEMENT == E5M2 && by.scale == 0.0f)) {
        for (int i = 0; i < PIECE; ++i) out[i] = canonical(out[i]);
    }
}

// 4-bit codes of one block on AVX2, straight out of their bytes: the block's sixteen values lie in two registers.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int ELEMENT, int BITS>
constexpr bool IN_REGISTERS = BITS == 4 && (ELEMENT == INT || ELEMENT == LEVELS);

template <int ELEMENT>
inline Registers<4> block_values(const Spec& spec, float scale) {
    alignas(32) float values[16];
    for (int i = 0; i < 16; ++i) values[i] = ELEMENT == INT ? float((i ^ 8) - 8) * scale + 0.0f : spec.levels[i] * scale;
    return Registers<4>(values);
}

template <bool ADD>
NC_INLINE void dequantize_nibbles(const uint8_t* codes, const Registers<4>& values, float* out) {
    const __m256i places = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int i = 0; i < PIECE; i += 8) {
        int32_t eight;
        std::memcpy(&eight, codes + i / 2, 4);
        const __m256 value = values[_mm256_srlv_epi32(_mm256_set1_epi32(eight), places)];
        _mm256_storeu_ps(out + i, ADD ? _mm256_add_ps(_mm256_loadu_ps(out + i), value) : value);
    }
}
#endif

// Decodes [begin, begin + count) piece by piece. A whole piece goes where target(offset) points (for ADD on top of what is
// there), a partial one into a buffer; done(offset, n, floats) hears of each.
template <int ELEMENT, int BITS, bool ADD, class Target, class Done>
inline void dequantize_as(const Spec& spec, const uint8_t* data, int64_t begin, int64_t count, Target target, Done done) {
    alignas(64) uint8_t codes[PIECE], packed[PIECE];
    alignas(64) float part[PIECE];
    const int64_t size = spec.block_size ? spec.block_size : spec.numel, end = begin + count;
    int64_t block = begin / size, i = begin;
    if (shared_pieces<ELEMENT>(spec.block_size)) {
        for (; i + PIECE <= end; i += PIECE, block += PIECE / size) {
            unpack<BITS>(data + i * BITS / 8, codes);
            dequantize_piece<ELEMENT, BITS, false>(spec, codes, Scaling{1.0f, 1.0f, 0}, part);
            float* to = target(i - begin);
            for (int64_t j = 0; j < PIECE; j += size) {
                float scale = read_scale(spec, data, block + j / size).scale;
                for (int64_t k = j; k < j + size; ++k) {
                    put<ADD>(ELEMENT == INT ? part[k] * scale + 0.0f : part[k] * scale, to[k]);
                }
            }
            for (int64_t k = 0; k < PIECE; ++k) to[k] = canonical(to[k]);
            done(i - begin, PIECE, to);
        }
    }
    for (; i < end; ++block) {
        const Scaling by = read_scale(spec, data, block);
        const int64_t block_end = std::min({(block + 1) * size, spec.numel, end});
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (IN_REGISTERS<ELEMENT, BITS>) {
            if (i + PIECE <= block_end && std::fabs(by.scale) < HUGE_VALF) {
                const Registers<4> values = block_values<ELEMENT>(spec, by.scale);
                for (; i + PIECE <= block_end; i += PIECE) {
                    const uint8_t* from = data + i / 2;
                    __builtin_prefetch(from + FETCH);
                    float* to = target(i - begin);
                    dequantize_nibbles<ADD>(from, values, to);
                    done(i - begin, PIECE, to);
                }
            }
        }
#endif
        for (; i + PIECE <= block_end; i += PIECE) {
            const uint8_t* from = data + i * BITS / 8;
            __builtin_prefetch(from + FETCH);
            if constexpr (BITS != 8) {
                unpack<BITS>(from, codes);
                from = codes;
            }
            float* to = target(i - begin);
            dequantize_piece<ELEMENT, BITS, ADD>(spec, from, by, to);
            done(i - begin, PIECE, to);
        }
        if (int64_t n = block_end - i; n > 0) {
            size_t bytes = size_t((n * BITS + 7) / 8);
            std::memset(packed, 0, PIECE);
            std::memcpy(packed, data + i * BITS / 8, bytes);
            unpack<BITS>(packed, codes);
            dequantize_piece<ELEMENT, BITS, false>(spec, codes, by, part);
            done(i - begin, n, part);
            i = block_end;
        }
    }
}

inline void widen_row(const Spec& spec, const uint8_t* data, int64_t begin, int64_t count, float* out) {
    const uint8_t* from = data + begin * (spec.bits / 8);
    if (spec.element == FP32) {
        std::memcpy(out, from, size_t(count) * 4);
    } else if (spec.element == FP16) {
        widen_half(reinterpret_cast<const Half16*>(from), out, count);
    } else {
        const Half16* in = reinterpret_cast<const Half16*>(from);
        for (int64_t i = 0; i < count; ++i) out[i] = Brain::widen(in[i]);
    }
}

struct Decode {
    const Spec& spec;
    const uint8_t* data;
    int64_t begin, count;
    void* out;
    int32_t dtype;
    int64_t origin;  // the row's element that out[0] stands for

    template <int ELEMENT, int BITS>
    void call() const {
        if (dtype == F32) {
            float* floats = static_cast<float*>(out) + (begin - origin);
            auto done = [&](int64_t i, int64_t n, const float* x) {
                if (x != floats + i) std::memcpy(floats + i, x, size_t(n) * 4);
            };
            dequantize_as<ELEMENT, BITS, false>(spec, data, begin, count, [&](int64_t i) { return floats + i; }, done);
        } else {
            alignas(64) float buffer[PIECE];
            auto done = [&](int64_t i, int64_t n, const float* x) { store(x, out, dtype, begin - origin + i, n); };
            dequantize_as<ELEMENT, BITS, false>(spec, data, begin, count, [&](int64_t) { return buffer; }, done);
        }
    }
    void wide() const {
        if (dtype == F32) return widen_row(spec, data, begin, count, static_cast<float*>(out) + (begin - origin));
        alignas(64) float buffer[BATCH];
        for (int64_t i = begin; i < begin + count; i += BATCH) {
            int64_t n = std::min(BATCH, begin + count - i);
            widen_row(spec, data, i, n, buffer);
            store(buffer, out, dtype, i - origin, n);
        }
    }
};

}  // namespace
