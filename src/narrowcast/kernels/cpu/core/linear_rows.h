// Four rows on their way to being multiplied: how they are cut into steps, and their scales as floats.

#pragma once
#include <utility>
#include <vector>

#include "linear_nibbles.h"

namespace {

constexpr int ROWS = 4;              // rows whose sums run side by side, so that additions need not wait for each other
constexpr int64_t SPAN = 1024;       // elements decoded at a time on the plain way
constexpr float MANY = 0x1p64f;      // x beyond this, or below its inverse, is brought nearer to one first, so that
                                     // codes times x neither overflow nor lose digits

// How a row is cut into steps, and steps into flushes of sums into totals.
struct Steps {
    bool direct;          // whether codes are multiplied as they are; if not, x is only widened
    int64_t size;         // elements of a step
    int64_t whole, all;   // steps in a row without and with a partial last one
    int64_t flush;        // steps whose sums share their scales
    int64_t blocks;       // whose scales a flush takes: one for all lanes, or several
    int64_t per_lane;     // EACH, or 1

    template <class Code>
    static Steps of(const Spec& spec) {
        const int64_t size = Code::EACH * LANES, block = spec.block_size ? spec.block_size : spec.numel;
        const bool whole = block % size == 0 || block >= spec.numel, shared = size % block == 0 && block % Code::EACH == 0;
        const bool moderate = spec.step > 0x1p-40f && spec.step < 0x1p40f;
        const int64_t all = (spec.numel + size - 1) / size;
        Steps steps{(whole || shared) && moderate, size, spec.numel / size, all, 1, 1, Code::EACH};
        if (block >= spec.numel) steps.flush = all;
        else if (whole) steps.flush = block / size;
        else steps.blocks = size / block;
        return steps;
    }

    static Steps of(const Spec& spec) {
        Steps steps;
        with_code(spec, [&](const auto& code) { steps = of<std::decay_t<decltype(code)>>(spec); });
        return steps;
    }
};

// -- scales as floats ---------------------------------------------------------------------------------------------------------

// The scales of a row, and behind them anything up to a vector; true where one is beyond `limit`.
#if defined(__AVX512F__)
// Rows of a few hundred elements have a dozen scales: too few for loops that the compiler vectorises.
bool read_scales(const Spec& spec, const uint8_t* data, float* scales, float limit) {
    const uint8_t* at = data + spec.scales_offset;
    __mmask16 beyond = 0;
    for (int64_t i = 0; i < spec.blocks; i += LANES) {
        const __mmask16 there = spec.blocks - i >= LANES ? 0xFFFF : __mmask16((1u << (spec.blocks - i)) - 1);
        __m512 some;
        if (spec.scale == SCALE_FP32) {
            some = _mm512_maskz_loadu_ps(there, at + 4 * i);
        } else if (spec.scale == SCALE_E8M0) {
            const __m512i exponent = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, at + i));
            some = _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
            const __mmask16 nan = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(255));
            some = _mm512_mask_mov_ps(some, nan, _mm512_set1_ps(NOT_A_NUMBER));
        } else {
            const __m256i halves = _mm256_maskz_loadu_epi16(there, at + 2 * i);
            some = spec.scale == SCALE_FP16 ? _mm512_cvtph_ps(halves)
                                            : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        }
        beyond |= _mm512_cmp_ps_mask(_mm512_abs_ps(some), _mm512_set1_ps(limit), _CMP_GT_OQ);
        _mm512_storeu_ps(scales + i, some);
    }
    if (spec.scale == NO_SCALE) scales[0] = 1.0f;
    return beyond;
}
#elif defined(__AVX2__)
// As the numbers lie there, then eight at a time; loops over one at a time take as long as the codes of blocks of 64 do.
bool read_scales(const Spec& spec, const uint8_t* data, float* scales, float limit) {
    const uint8_t* at = data + spec.scales_offset;
    const int64_t blocks = spec.blocks;
    switch (spec.scale) {
        case NO_SCALE: scales[0] = 1.0f; return false;
        case SCALE_FP32: std::memcpy(scales, at, size_t(blocks) * 4); break;
        case SCALE_E8M0:
            for (int64_t i = 0; i < blocks; ++i) scales[i] = at[i] == 255 ? NOT_A_NUMBER : as<float>(uint32_t(at[i]) << 23);
            break;
        case SCALE_FP16: widen_half(reinterpret_cast<const Half16*>(at), scales, blocks); break;
        default:
            const Half16* halves = reinterpret_cast<const Half16*>(at);
            for (int64_t i = 0; i < blocks; ++i) scales[i] = as<float>(uint32_t(halves[i]) << 16);
    }
    SignedBits beyond = {};
    int64_t i = 0;
    for (; i + LANES <= blocks; i += LANES) {
        const Vector magnitude = (Vector)(read<Bits>(scales + i) & 0x7FFFFFFFu);
        beyond |= magnitude > limit;
    }
    bool any = _mm256_movemask_epi8((__m256i)beyond) != 0;
    for (; i < blocks; ++i) any |= std::fabs(scales[i]) > limit;
    return any;
}
#else
bool read_scales(const Spec& spec, const uint8_t* data, float* scales, float limit) {
    int beyond = 0;
    for (int64_t i = 0; i < spec.blocks; ++i) {
        scales[i] = read_scale(spec, data, i).scale;
        beyond |= std::fabs(scales[i]) > limit;
    }
    if (spec.scale == NO_SCALE) scales[0] = 1.0f;
    return beyond;
}
#endif

// How far ahead memory is asked for, into the second-level cache: whole quads of rows, so that every line is asked for once,
// and far enough to come in time: below 8 KB it does not, on Zen 4. Into the first level it takes longer than not at all.
inline int64_t fetch_ahead(int64_t stride) {
    const int64_t quad = ROWS * stride;
    return quad * ((12287 + quad) / quad);
}

// Four rows and what is read of them before their codes.
struct Quad {
    const uint8_t* row[ROWS];
    alignas(64) uint8_t tail[ROWS][64];  // the codes of a partial last step, then zeros
    std::vector<float> scales, zeros;
    int64_t stride;                      // of scales, with room to read a vector from any of them
    Bits lanes;                          // which of a flush's scales each lane takes
    bool plain[ROWS];                    // rows to be done the plain way after all

    Quad(const Spec& spec, const Steps& steps) : stride(spec.blocks + LANES) {
        for (int i = 0; i < LANES; ++i) lanes[i] = uint32_t(i * steps.blocks / LANES);
        scales.resize(size_t(ROWS * stride));
        if (spec.element == AFFINE) zeros.resize(size_t(ROWS * stride));
    }

    // `limit` is the largest scale with which sums stay finite.
    void take(const Spec& spec, const Steps& steps, const uint8_t* data, int64_t step, int64_t rows, int64_t bytes, float limit) {
        const int64_t ahead = fetch_ahead(step);
        for (int r = 0; r < ROWS; ++r) {
            row[r] = data + std::min<int64_t>(r, rows - 1) * step;
            // Those of rows to come are asked for now, as their codes will be by `multiply`.
            for (int64_t at = spec.codes_bytes; at < spec.row_bytes + 63; at += 64) {
                __builtin_prefetch(row[r] + ahead + std::min(at, spec.row_bytes - 1), 0, 2);
            }
            plain[r] = read_scales(spec, row[r], &scales[size_t(r * stride)], limit);
            if (spec.element == AFFINE) {
                for (int64_t i = 0; i < spec.blocks; ++i) zeros[size_t(r * stride + i)] = float(row[r][spec.zeros_offset + i]);
            }
            if (steps.all == steps.whole) continue;
            const int64_t done = steps.whole * bytes;
            std::memset(tail[r], 0, 64);
            std::memcpy(tail[r], row[r] + done, size_t(spec.codes_bytes - done));
        }
    }
};

NC_FORCED Vector for_lanes(const float* at, bool several, Bits lanes) {
    return several ? pick(read<Vector>(at), lanes) : every(*at);
}

}  // namespace
