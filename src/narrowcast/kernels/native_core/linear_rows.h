// Four rows on their way to being multiplied: how they are cut into steps, and their scales as floats.

#pragma once
#include <utility>
#include <vector>

#include "linear_codes.h"

namespace {

constexpr int ROWS = 4;              // rows whose sums run side by side, so that additions need not wait for each other
constexpr int64_t SPAN = 1024;       // elements decoded at a time on the plain way
constexpr float MANY = 0x1p64f;      // from this magnitude on x is multiplied with 2^-64 first: a code times x must be finite

// How a row is cut into steps, and steps into flushes of sums into totals.
struct Steps {
    bool direct;          // whether codes are multiplied as they are; if not, x is only widened
    int64_t size;         // elements of a step
    int64_t whole, all;   // steps in a row without and with a partial last one
    int64_t flush;        // steps whose sums share their scales
    int64_t groups;       // scales that a flush takes: one for all lanes, or several
    int64_t per_lane;     // EACH, or 1

    template <class Code>
    static Steps of(const Spec& spec) {
        const int64_t size = Code::EACH * LANES, block = spec.group_size ? spec.group_size : spec.numel;
        const bool whole = block % size == 0 || block >= spec.numel, shared = size % block == 0 && block % Code::EACH == 0;
        const bool moderate = spec.step > 0x1p-40f && spec.step < 0x1p40f;
        const int64_t all = (spec.numel + size - 1) / size;
        Steps steps{(whole || shared) && moderate, size, spec.numel / size, all, 1, 1, Code::EACH};
        if (block >= spec.numel) steps.flush = all;
        else if (whole) steps.flush = block / size;
        else steps.groups = size / block;
        return steps;
    }

    static Steps of(const Spec& spec) {
        Steps steps;
        with_code(spec, [&](const auto& code) { steps = of<std::decay_t<decltype(code)>>(spec); });
        return steps;
    }
};

// -- scales as floats ---------------------------------------------------------------------------------------------------------

void read_scales(const Spec& spec, const uint8_t* data, float* scales, float* zeros) {
    const uint8_t* at = data + spec.scales_offset;
    const int64_t n = spec.groups;
    const Half16* halves = reinterpret_cast<const Half16*>(at);
    switch (spec.scale) {
        case NO_SCALE: scales[0] = 1.0f; break;
        case SCALE_FP32: std::memcpy(scales, at, size_t(n) * 4); break;
        case SCALE_FP16: widen_half(halves, scales, n); break;
        case SCALE_BF16:
            for (int64_t i = 0; i < n; ++i) scales[i] = as<float>(uint32_t(halves[i]) << 16);
            break;
        default:
            for (int64_t i = 0; i < n; ++i) scales[i] = at[i] == 255 ? NOT_A_NUMBER : as<float>(uint32_t(at[i]) << 23);
    }
    if (spec.element != AFFINE) return;
    for (int64_t i = 0; i < n; ++i) zeros[i] = float(data[spec.zeros_offset + i]);
}

// Four rows and what is read of them before their codes.
struct Block {
    const uint8_t* row[ROWS];
    alignas(64) uint8_t tail[ROWS][64];  // the codes of a partial last step, then zeros
    std::vector<float> scales, zeros;
    int64_t stride;                      // of scales, with room to read a vector from any of them
    Bits lanes;                          // which of a flush's scales each lane takes
    bool plain[ROWS];                    // rows to be done the plain way after all

    Block(const Spec& spec, const Steps& steps) : stride(spec.groups + LANES) {
        for (int i = 0; i < LANES; ++i) lanes[i] = uint32_t(i * steps.groups / LANES);
        scales.resize(size_t(ROWS * stride));
        if (spec.element == AFFINE) zeros.resize(size_t(ROWS * stride));
    }

    // `limit` is the largest scale with which sums stay finite.
    void take(const Spec& spec, const Steps& steps, const uint8_t* data, int64_t step, int64_t rows, int64_t bytes, float limit) {
        for (int r = 0; r < ROWS; ++r) {
            row[r] = data + std::min<int64_t>(r, rows - 1) * step;
            // Those of the next four rows are asked for now; their codes will be by `multiply`.
            for (int64_t at = spec.codes_bytes; at < spec.row_bytes + 63; at += 64) {
                __builtin_prefetch(row[r] + ROWS * step + std::min(at, spec.row_bytes - 1), 0, 2);
            }
            float* scale = &scales[size_t(r * stride)];
            read_scales(spec, row[r], scale, zeros.empty() ? nullptr : &zeros[size_t(r * stride)]);
            int beyond = 0;
            for (int64_t i = 0; i < spec.groups; ++i) beyond |= std::fabs(scale[i]) > limit;
            plain[r] = beyond;
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
