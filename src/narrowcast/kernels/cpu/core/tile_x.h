// Many vectors times encoded rows: 32 rows are decoded side by side, a few hundred of their elements at a time, into a tile that
// stays in the first-level cache, and all vectors are multiplied with it (AVX-512).
//
// A tile holds words of 32 bits, [word][row], so that a vector of it is one word of 16 rows. What a word is depends on x:
//
// - Single, for fp32 and fp16: one weight, decoded and scaled.
// - Pair, for bf16: two weights in bf16 without their scale, which the sums of a block are multiplied with. Integers are exact in
//   bf16, and so are levels of 8 significant bits; other levels are rounded once.
// - ScaledPair, for many vectors of bf16: two weights in bf16, scaled, then rounded. It takes longer to decode and less to multiply.
//
// Products of bf16 are exact, sums are fp32. The instruction takes denormals for zero; so vectors far from one are brought nearer
// (by a power of two, which `gain` takes back), and rows with scales far from one take the plain way. What is lost then is
// nothing beside 2^-30 of the largest x. A sum runs over the elements in their order, whatever stands beside its vector.

#pragma once
#include "brain_pairs.h"
#include "linear_plain.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int PANEL = 2 * LANES;      // rows of a tile
constexpr int LINE = 16;              // words of a cache line
constexpr int GROUP = 14;             // vectors whose sums are in registers at the same time
constexpr int64_t TILE = 192;         // words of each row in a tile, at most: 24 KB in all
constexpr int64_t MANY_VECTORS = 48;  // of bf16, from which on ScaledPair is faster: bench/linear_batches.py

// PER: elements of a word. SCALED: whether words have their scale.
struct Single {
    static constexpr int WAY = 1, PER = 1;
    static constexpr bool SCALED = true;
};

struct Pair {
    static constexpr int WAY = 2, PER = 2;
    static constexpr bool SCALED = false;
};

struct ScaledPair {
    static constexpr int WAY = 3, PER = 2;
    static constexpr bool SCALED = true;
};

inline bool in_pairs(int32_t way) { return way != Single::WAY; }

// How a row is cut: a tile is `steps` steps of codes, `lines` lines of words, and all elements of a segment share their scale.
struct Cut {
    int64_t steps, lines, tiles, all_lines, segment;  // segment: in lines
    Cut(const Steps& row, int32_t way) {
        const int64_t words = in_pairs(way) ? row.size / 2 : row.size, most = std::max<int64_t>(1, TILE / words);
        steps = most;
        if (row.flush < row.all) {  // several blocks: a tile is several of them, or a part of one
            if (row.flush <= most) steps = most / row.flush * row.flush;
            else while (row.flush % steps) --steps;
        }
        lines = steps * words / LINE;
        tiles = (row.all + steps - 1) / steps;
        all_lines = row.all * words / LINE;
        segment = std::min(lines, row.flush * words / row.blocks / LINE);
    }
    int64_t lines_of(int64_t tile) const { return std::min(lines, all_lines - tile * lines); }
};

// Vectors in groups that are as even as can be.
struct Groups {
    int64_t count, size, larger;
    explicit Groups(int64_t batch) : count((batch + GROUP - 1) / GROUP), size(batch / count), larger(batch % count) {}
    int64_t begin(int64_t group) const { return group * size + std::min(group, larger); }
    int64_t of(int64_t b) const { return b < larger * (size + 1) ? b / (size + 1) : (b - larger) / size; }
};

// -- x: [tile][group][line][vector of the group][16] ------------------------------------------------------------------------------

// Whether what codes stand for is a normal number in bf16, or zero, and blocks are whole lines of pairs.
inline bool fits_pairs(const Spec& spec) {
    if (spec.block_size % (2 * LINE) && spec.block_size < spec.numel) return false;
    return levels_near_one(spec);
}

// The lines of vector b, zeros behind its end, where its group has them.
void deal_lines(const Cut& cut, const Groups& groups, const Product& product, int64_t b, const char* line, float* packed) {
    const int64_t group = groups.of(b), begin = groups.begin(group), size = groups.begin(group + 1) - begin;
    for (int64_t tile = 0; tile < cut.tiles; ++tile) {
        const int64_t lines = cut.lines_of(tile);
        float* to = packed + (tile * cut.lines * product.batch + begin * lines + (b - begin)) * LINE;
        for (int64_t i = 0; i < lines; ++i, line += 4 * LINE) std::memcpy(to + i * size * LINE, line, 4 * LINE);
    }
}

void pack(const Spec& spec, const Product& product, int64_t b, float* packed, float* gain) {
    const Cut cut(Steps::of(spec), product.way);
    const Groups groups(product.batch);
    const int64_t element = product.x.dtype == F32 ? 4 : 2;
    const uint8_t* x = static_cast<const uint8_t*>(product.x.data) + b * product.x_stride * element;
    if (in_pairs(product.way)) {
        std::vector<uint16_t> near(size_t(cut.all_lines * 2 * LINE));
        gain[b] = 1.0f / bring_near_one(reinterpret_cast<const uint16_t*>(x), spec.numel, near.data());
        if (product.way == Pair::WAY && crossed(spec)) cross(near);
        deal_lines(cut, groups, product, b, reinterpret_cast<const char*>(near.data()), packed);
    } else {
        std::vector<float> wide(size_t(cut.all_lines * LINE));
        const float* from = load(Floats{x, product.x.dtype}, 0, spec.numel, wide.data());
        if (from != wide.data()) std::memcpy(wide.data(), from, size_t(spec.numel) * 4);
        gain[b] = 1.0f;
        deal_lines(cut, groups, product, b, reinterpret_cast<const char*>(wide.data()), packed);
    }
}

}  // namespace
#endif
