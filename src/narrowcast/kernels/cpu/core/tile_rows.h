// 32 encoded rows on their way into tiles: their codes in words, turned so that a vector holds one word of 16 rows, and their scales.

#pragma once
#include "tile_sums.h"
#include "transpose.h"

#if defined(__AVX512BF16__)
namespace {

// The rows of a tile: where they lie, and their scales, [block][row].
struct Panel {
    const uint8_t* row[PANEL];
    uint8_t tail[PANEL][64];  // the codes of a partial last step, then zeros
    std::vector<float> memory, zeros, read;
    float* scales;  // on a cache line
    Bits odd[2];
    bool plain[PANEL];

    explicit Panel(const Spec& spec) {
        const size_t blocks = size_t(spec.blocks + 2 * LANES);
        memory.resize(blocks * PANEL + LINE);
        scales = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 4;
        read.resize(blocks * LANES);
        if (spec.element == AFFINE) zeros.resize(blocks * PANEL);
    }

    void take(const Spec& spec, const Steps& steps, const uint8_t* data, int64_t stride, int64_t rows, int64_t bytes, bool pairs) {
        const float limit = finite_scale(spec);
        for (int r = 0; r < PANEL; ++r) {
            row[r] = data + std::min<int64_t>(r, rows - 1) * stride;
            for (int64_t at = spec.codes_bytes; at < spec.row_bytes; at += 64) __builtin_prefetch(row[r] + PANEL * stride + at, 0, 2);
            if (steps.all == steps.whole) continue;
            const int64_t done = steps.whole * bytes;
            std::memset(tail[r], 0, 64);
            std::memcpy(tail[r], row[r] + done, size_t(spec.codes_bytes - done));
        }
        const int64_t step = spec.blocks + LANES;
        for (int half = 0; half < PANEL; half += LANES) {
            odd[half / LANES] = Bits{};
            read_scales(spec, row + half, LANES, read.data(), step, {0.0f, limit}, plain + half);
            turn(spec, half, step, pairs);
            if (spec.element != AFFINE) continue;
            for (int r = 0; r < LANES; ++r) {
                for (int64_t i = 0; i < spec.blocks; ++i) {
                    zeros[size_t(i * PANEL + half + r)] = float(row[half + r][spec.zeros_offset + i]);
                }
            }
        }
    }

    // The codes of the tile that begins at this step, or, at the end of the rows, of the first one of the rows to come; so many lines of
    // groups are multiplied until then. Codes may begin within a cache line, and a load may reach past them into the next.
    Coming codes_from(int64_t step, const Steps& steps, const Cut& cut, int64_t bytes, int64_t stride, int64_t lines) const {
        const int64_t every = (cut.steps * bytes + 127) / 64 * PANEL;
        return {row, step < steps.all ? step * bytes : PANEL * stride, 0, every, (every + lines - 1) / lines};
    }

   private:
    void turn(const Spec& spec, int half, int64_t step, bool pairs) {
        for (int64_t block = 0; block < spec.blocks; block += LANES) {
            Bits some[LANES];
            for (int r = 0; r < LANES; ++r) some[r] = ::read<Bits>(&read[size_t(r * step + block)]);
            transpose(some);
            uint32_t far = 0;
            const int count = int(std::min<int64_t>(LANES, spec.blocks - block));
            for (int i = 0; i < count; ++i) {
                std::memcpy(scales + (block + i) * PANEL + half, &some[i], 64);
                far |= far_from_one((__m512)some[i]);
            }
            for (int r = 0; r < LANES && pairs; ++r) plain[half + r] |= far >> r & 1;
        }
    }
};

}  // namespace
#endif
