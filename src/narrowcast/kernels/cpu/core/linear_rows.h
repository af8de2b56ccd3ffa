// Rows on their way to being multiplied: how they are cut into steps, and their scales as floats.

#pragma once
#include <utility>
#include <vector>

#include "linear_nibbles.h"

namespace {

constexpr int ROWS = 4;              // rows whose sums run side by side, so that additions need not wait for each other
constexpr int GROUP_ROWS = 16;       // rows whose scales are read, and results written, at a time: four quads
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

// Scales with which sums stay finite and exact; zero counts as within.
struct Range {
    float least, most;  // of magnitudes; `least` counts with AVX-512 alone, which has the only products that ask for one
};

// The largest scale with which every code, those past the end of a row included, stands for a finite number. Encoded rows have larger ones
// only near the largest float; decoding cuts affine codes there, and gives infinity for others.
inline float finite_scale(const Spec& spec) {
    float most = 1.0f;
    switch (spec.element) {
        case E4M3: most = 0x1p9f; break;
        case E5M2: most = 0x1p16f; break;
        case INT: most = float(1ll << (spec.bits - 1)); break;
        case AFFINE: most = float(1ll << spec.bits); break;
        case LEVELS:
            for (int i = 0; i < 1 << spec.bits; ++i) most = std::max(most, std::fabs(spec.levels[i]));  // `max` leaves out NaN
    }
    return 0x1p127f / most;
}

// The scales of `count` rows, `stride` floats from one row to the next, and behind each anything up to a vector. plain[r]: whether
// one of row r is out of range.
#if defined(__AVX512F__)
template <int KIND>
NC_FORCED __m512 sixteen_scales(const uint8_t* at, int64_t i, __mmask16 there) {
    if constexpr (KIND == SCALE_FP32) return _mm512_maskz_loadu_ps(there, at + 4 * i);
    if constexpr (KIND == SCALE_E8M0) {
        const __m512i exponent = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, at + i));
        const __mmask16 nan = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(255));
        return _mm512_mask_mov_ps(_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)), nan, _mm512_set1_ps(NOT_A_NUMBER));
    }
    const __m256i halves = _mm256_maskz_loadu_epi16(there, at + 2 * i);
    if constexpr (KIND == SCALE_FP16) return _mm512_cvtph_ps(halves);
    else return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <int KIND>
void read_scales_as(const Spec& spec, const uint8_t* const* rows, int count, float* scales, int64_t stride, Range within, bool* plain) {
    const __m512 least = _mm512_set1_ps(within.least), most = _mm512_set1_ps(within.most);
    for (int r = 0; r < count; ++r, scales += stride) {
        const uint8_t* at = rows[r] + spec.scales_offset;
        __mmask16 out = 0;
        for (int64_t i = 0; i < spec.blocks; i += LANES) {
            const __mmask16 there = spec.blocks - i >= LANES ? 0xFFFF : __mmask16((1u << (spec.blocks - i)) - 1);
            const __m512 some = sixteen_scales<KIND>(at, i, there), size = _mm512_abs_ps(some);
            const __mmask16 small = _mm512_mask_cmp_ps_mask(_mm512_test_epi32_mask((__m512i)size, (__m512i)size), size, least, _CMP_LT_OQ);
            out |= _mm512_cmp_ps_mask(size, most, _CMP_GT_OQ) | small;
            _mm512_storeu_ps(scales + i, some);
        }
        plain[r] = out != 0;
    }
}

void read_scales(const Spec& spec, const uint8_t* const* rows, int count, float* scales, int64_t stride, Range within, bool* plain) {
    switch (spec.scale) {
        case NO_SCALE:
            for (int r = 0; r < count; ++r) scales[r * stride] = 1.0f, plain[r] = false;
            return;
        case SCALE_FP32: return read_scales_as<SCALE_FP32>(spec, rows, count, scales, stride, within, plain);
        case SCALE_E8M0: return read_scales_as<SCALE_E8M0>(spec, rows, count, scales, stride, within, plain);
        case SCALE_FP16: return read_scales_as<SCALE_FP16>(spec, rows, count, scales, stride, within, plain);
        default: return read_scales_as<SCALE_BF16>(spec, rows, count, scales, stride, within, plain);
    }
}
#else
#if defined(__AVX2__)
// As the numbers lie there, then eight at a time; loops over one at a time take as long as the codes of blocks of 64 do.
bool read_row_scales(const Spec& spec, const uint8_t* data, float* scales, float most) {
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
        beyond |= magnitude > most;
    }
    bool any = _mm256_movemask_epi8((__m256i)beyond) != 0;
    for (; i < blocks; ++i) any |= std::fabs(scales[i]) > most;
    return any;
}
#else
bool read_row_scales(const Spec& spec, const uint8_t* data, float* scales, float most) {
    int beyond = 0;
    for (int64_t i = 0; i < spec.blocks; ++i) {
        scales[i] = read_scale(spec, data, i).scale;
        beyond |= std::fabs(scales[i]) > most;
    }
    if (spec.scale == NO_SCALE) scales[0] = 1.0f;
    return beyond;
}
#endif
void read_scales(const Spec& spec, const uint8_t* const* rows, int count, float* scales, int64_t stride, Range within, bool* plain) {
    for (int r = 0; r < count; ++r) plain[r] = read_row_scales(spec, rows[r], scales + r * stride, within.most);
}
#endif

// How far ahead memory is asked for, into the second-level cache: whole quads of rows, so that every line is asked for once,
// and far enough to come in time: below 8 KB it does not, on Zen 4. Into the first level it takes longer than not at all.
inline int64_t fetch_ahead(int64_t stride) {
    const int64_t quad = ROWS * stride;
    if (quad == 0) return 0;  // one row, over and over
    return quad * ((12287 + quad) / quad);
}

// Up to GROUP_ROWS rows and what is read of them before their codes: of many at a time, so that what was written is in the cache by the time
// it is read, and rows of a few hundred elements do not wait for their scales.
struct RowGroup {
    const uint8_t* row[GROUP_ROWS];
    alignas(64) uint8_t tail[GROUP_ROWS][64];  // the codes of a partial last step, then zeros
    std::vector<float> scales, zeros;
    int64_t stride;                       // of scales, with room to read a vector from any of them
    Bits lanes;                           // which of a flush's scales each lane takes
    bool plain[GROUP_ROWS];                    // rows to be done the plain way after all

    RowGroup(const Spec& spec, const Steps& steps) : stride(spec.blocks + LANES) {
        for (int i = 0; i < LANES; ++i) lanes[i] = uint32_t(i * steps.blocks / LANES);
        scales.resize(size_t(GROUP_ROWS * stride));
        if (spec.element == AFFINE) zeros.resize(size_t(GROUP_ROWS * stride));
    }

    // `count` rows, and the last of them again until they are whole quads. `step`: bytes from one row to the next; `bytes`: of a step
    // of codes.
    void take(const Spec& spec, const Steps& steps, const uint8_t* data, int64_t step, int64_t count, int64_t bytes, Range within) {
        const int64_t ahead = fetch_ahead(step);
        const int rows = int((count + ROWS - 1) / ROWS * ROWS);
        for (int r = 0; r < rows; ++r) {
            row[r] = data + std::min<int64_t>(r, count - 1) * step;
            // Those of rows to come are asked for now, as their codes will be by `multiply`.
            for (int64_t at = spec.codes_bytes; at < spec.row_bytes + 63; at += 64) {
                __builtin_prefetch(row[r] + ahead + std::min(at, spec.row_bytes - 1), 0, 2);
            }
        }
        read_scales(spec, row, rows, scales.data(), stride, within, plain);
        for (int r = 0; r < rows && spec.element == AFFINE; ++r) {
            for (int64_t i = 0; i < spec.blocks; ++i) zeros[size_t(r * stride + i)] = float(row[r][spec.zeros_offset + i]);
        }
        if (steps.all == steps.whole) return;
        const int64_t done = steps.whole * bytes;
        for (int r = 0; r < rows; ++r) {
            std::memset(tail[r], 0, 64);
            std::memcpy(tail[r], row[r] + done, size_t(spec.codes_bytes - done));
        }
    }
};

NC_FORCED Vector for_lanes(const float* at, bool several, Bits lanes) {
    return several ? pick(read<Vector>(at), lanes) : every(*at);
}

}  // namespace
