// The scales of a batch of blocks: measured from the elements, settled into stored numbers, read back.

#pragma once
#include <algorithm>

#include "levels.h"

namespace {

constexpr float NOT_A_NUMBER = __builtin_nanf("");

// -- as stored ---------------------------------------------------------------------------------------------------------

template <int KIND>
inline float round_up(float scale, float limit) {
    uint32_t bits = as<uint32_t>(scale);
    if (KIND == SCALE_BF16) scale = as<float>((bits + 0xFFFF) >> 16 << 16);
    if (KIND == SCALE_E8M0) scale = as<float>((bits + 0x7FFFFF) >> 23 << 23);
    if (KIND == SCALE_FP16) {
        scale = scale < limit ? scale : limit;
        uint32_t half = Half::narrow(scale);
        scale = Half::widen(half + (Half::widen(half) < scale ? 1 : 0));
    }
    return scale < limit ? scale : limit;
}

template <int KIND>
inline void write_scales(const float* scale, int64_t blocks, uint8_t* at) {
    for (int64_t i = 0; i < blocks; ++i) {
        uint32_t bits = as<uint32_t>(scale[i]);
        uint16_t half = KIND == SCALE_FP16 ? uint16_t(Half::narrow(scale[i])) : uint16_t(bits >> 16);
        if (KIND == SCALE_FP32) std::memcpy(at + 4 * i, &bits, 4);
        else if (KIND == SCALE_E8M0) at[i] = uint8_t(bits >> 23);
        else std::memcpy(at + 2 * i, &half, 2);
    }
}

__attribute__((always_inline)) inline Scaling read_scale(const Spec& spec, const uint8_t* data, int64_t block) {
    const uint8_t* at = data + spec.scales_offset;
    Scaling by{1.0f, 1.0f, 0};
    uint16_t half;
    switch (spec.scale) {
        case NO_SCALE: return by;
        case SCALE_FP32: std::memcpy(&by.scale, at + 4 * block, 4); break;
        case SCALE_E8M0: by.scale = at[block] == 255 ? NOT_A_NUMBER : as<float>(uint32_t(at[block]) << 23); break;
        default:
            std::memcpy(&half, at + 2 * block, 2);
            by.scale = spec.scale == SCALE_FP16 ? Half::widen(half) : as<float>(uint32_t(half) << 16);
    }
    if (spec.element == AFFINE) by.zero = data[spec.zeros_offset + block];
    return by;
}

// -- measured ----------------------------------------------------------------------------------------------------------

// An integer that orders like the float; its own inverse.
inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

template <bool RANGE>
inline void measure_range(const float* x, int64_t n, Batch& batch, int64_t block) {
    uint32_t key = batch.key[block];
    int32_t low = batch.low[block], high = batch.high[block];
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = as<uint32_t>(x[i]);
        uint32_t turned = (bits << 1) | (bits >> 31);
        key = turned > key ? turned : key;
        if (RANGE) {
            int32_t order = ordered(int32_t(bits));
            low = order < low ? order : low;
            high = order > high ? order : high;
        }
    }
    batch.key[block] = key, batch.low[block] = low, batch.high[block] = high;
}

// 64 magnitudes, folded in halves in fp64.
inline double leaf_sum(const float* x) {
    double sums[32];
    for (int i = 0; i < 32; ++i) sums[i] = double(std::fabs(x[i])) + double(std::fabs(x[i + 32]));
    for (int i = 0; i < 16; ++i) sums[i] += sums[i + 16];
    for (int i = 0; i < 8; ++i) sums[i] += sums[i + 8];
    for (int i = 0; i < 4; ++i) sums[i] += sums[i + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Sums added in adjacent pairs as they come: a binary counter whose digits are sums of 1, 2, 4, ... leaves.
class PairSum {
    double sums_[64];
    uint64_t count_ = 0;

   public:
    void add(double sum) {
        int level = 0;
        for (uint64_t digits = count_++; digits & 1; digits >>= 1) sum = sums_[level++] + sum;
        sums_[level] = sum;
    }
    double total() const {
        double sum = 0.0;
        bool any = false;
        for (int level = 0; count_ >> level; ++level) {
            if (!(count_ >> level & 1)) continue;
            sum = any ? sums_[level] + sum : sums_[level];
            any = true;
        }
        return sum;
    }
};

inline double magnitude_sum(const float* x, int64_t n) {
    if (n == PIECE) return leaf_sum(x);
    PairSum pairs;
    alignas(64) float padded[PIECE] = {};
    for (; n >= PIECE; n -= PIECE, x += PIECE) pairs.add(leaf_sum(x));
    if (n) {
        std::memcpy(padded, x, size_t(n) * 4);
        pairs.add(leaf_sum(padded));
    }
    return pairs.total();
}

// Blocks of SIZE elements known when compiling, so that their loops unroll; SIZE 0 takes it from the argument.
template <int ELEMENT, int64_t SIZE>
inline void measure_blocks(const float* x, int64_t count, int64_t size, Batch& batch) {
    size = SIZE ? SIZE : size;
    int64_t block = 0;
    for (; count > 0; ++block, x += size, count -= size) {
        int64_t n = std::min(size, count);
        batch.key[block] = 0, batch.low[block] = 0, batch.high[block] = 0;
        if (SIZE && n == SIZE) measure_range<ELEMENT == AFFINE>(x, SIZE, batch, block);
        else measure_range<ELEMENT == AFFINE>(x, n, batch, block);
        if (ELEMENT == SIGN) batch.sum[block] = magnitude_sum(x, n);
    }
}

template <int ELEMENT>
inline void measure_batch(const float* x, int64_t count, int64_t size, Batch& batch) {
    switch (size) {
        case 32: return measure_blocks<ELEMENT, 32>(x, count, size, batch);
        case 64: return measure_blocks<ELEMENT, 64>(x, count, size, batch);
        case 128: return measure_blocks<ELEMENT, 128>(x, count, size, batch);
        case 256: return measure_blocks<ELEMENT, 256>(x, count, size, batch);
        default: return measure_blocks<ELEMENT, 0>(x, count, size, batch);
    }
}

// -- settled -----------------------------------------------------------------------------------------------------------

template <int ELEMENT, int KIND>
inline void settle_as(const Spec& spec, Batch& batch, int64_t block, int64_t blocks, int64_t last_count, uint8_t* out) {
    constexpr float smallest = 0x1p-126f;
    const float step = spec.step, limit = spec.limit, top = float((1 << (spec.bits & 15)) - 1);
    const uint32_t flip = spec.signed_scale ? 1 : 0;
    for (int64_t i = 0; i < blocks; ++i) {
        bool finite = batch.key[i] < 0xFF000000u;
        float scale;
        if (ELEMENT == SIGN) {
            double size = double(i == blocks - 1 ? last_count : spec.block_size);
            scale = round_up<KIND>(float(finite ? batch.sum[i] / size : 0.0), limit);
            batch.scale[i] = finite ? scale : NOT_A_NUMBER;
            batch.inverse[i] = finite ? 1.0f : 0.0f;
            continue;
        }
        float low = as<float>(ordered(batch.low[i])), high = as<float>(ordered(batch.high[i]));
        float spread = ELEMENT == AFFINE ? high * step - low * step : as<float>(batch.key[i] >> 1) * step;
        spread = finite && spread > smallest ? spread : smallest;
        scale = round_up<KIND>(spread, limit);
        scale = as<float>(as<uint32_t>(scale) | (flip & ~batch.key[i]) << 31);
        float inverse = 1.0f / scale;
        if (ELEMENT == AFFINE) {
            float zero = clamp(-low * inverse, 0.0f, top);
            zero = (spec.stochastic ? std::ceil(zero) : zero) + ROUNDER;
            batch.zero[i] = finite ? int32_t(as<uint32_t>(zero) & 0xFF) : 0;
        }
        batch.scale[i] = finite ? scale : NOT_A_NUMBER;
        batch.inverse[i] = finite ? inverse : 0.0f;
    }
    constexpr int64_t bytes = KIND == SCALE_FP32 ? 4 : KIND == SCALE_E8M0 ? 1 : 2;
    write_scales<KIND>(batch.scale, blocks, out + spec.scales_offset + bytes * block);
    if (ELEMENT == AFFINE) {
        for (int64_t i = 0; i < blocks; ++i) out[spec.zeros_offset + block + i] = uint8_t(batch.zero[i]);
    }
}

// Scales, inverses and zero points of the blocks [block, block + blocks), from what was measured; writes them to the row.
template <int ELEMENT>
inline void settle_batch(const Spec& spec, Batch& batch, int64_t block, int64_t blocks, int64_t last_count, uint8_t* out) {
    switch (spec.scale) {
        case SCALE_FP32: return settle_as<ELEMENT, SCALE_FP32>(spec, batch, block, blocks, last_count, out);
        case SCALE_BF16: return settle_as<ELEMENT, SCALE_BF16>(spec, batch, block, blocks, last_count, out);
        case SCALE_FP16: return settle_as<ELEMENT, SCALE_FP16>(spec, batch, block, blocks, last_count, out);
        default: return settle_as<ELEMENT, SCALE_E8M0>(spec, batch, block, blocks, last_count, out);
    }
}

}  // namespace
