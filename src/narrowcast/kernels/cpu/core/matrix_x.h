// Many vectors of bf16 times encoded rows in the matrix registers of a CPU (AMX), whose instruction multiplies 16 rows with 16 vectors,
// 32 elements of each.
//
// A *line* is 32 elements of a row in bf16, scaled, then rounded. 32 rows are decoded into a tile, [line][row][32], a few hundred of
// their elements at a time, so that it stays in the first-level cache, and all blocks of 16 vectors are multiplied with it. Elements lie in
// a line as decoding brings them, and x is packed in the same order: [tile][block][line][pair][vector][2], so that neither is shuffled
// after that. What a block has fewer than 16 vectors is zeros.
//
// An instruction adds up the products of even and of odd elements of a line apart, in fp32, then adds both to the sum. It takes
// denormals for zero; so vectors far from one are brought nearer (by a power of two, which `gain` takes back), and rows with scales far
// from one take the plain way. A sum runs over the lines in their order, whatever stands beside its vector.

#pragma once
#include "matrix_codes.h"
#include "transpose.h"

#if defined(__AMX_BF16__)
namespace {

constexpr int64_t LINES = 8;                // of a tile: 16 KB, and as much of x
constexpr int64_t NEAR = 1 << 20;           // bytes of x that stay in the second-level cache
constexpr int PANEL = 2 * LANES;            // rows of a tile
constexpr int LINE = 2 * LANES;             // elements
constexpr int64_t REGISTER = LANES * LINE;  // elements: a line of 16 rows, or of 16 vectors

// How a row is cut: a tile is `steps` steps of codes, each of which becomes `each` lines.
struct Cut {
    int64_t each, steps, lines, tiles, all_lines;
    explicit Cut(const Steps& row)
        : each(row.size / LINE), steps(std::max<int64_t>(1, LINES / each)), lines(steps * each), tiles((row.all + steps - 1) / steps), all_lines(row.all * each) {}
    int64_t lines_of(int64_t tile) const { return std::min(lines, all_lines - tile * lines); }
};

inline int64_t blocks_of(int64_t batch) { return (batch + LANES - 1) / LANES; }

int64_t packed(const Spec& spec, const Product& product) {
    return blocks_of(product.batch) * Cut(Steps::of(spec)).all_lines * REGISTER / 2;
}

// Vectors [first, first + 16).
void pack(const Spec& spec, const Product& product, int64_t first, float* packed, float* gain) {
    const Steps steps = Steps::of(spec);
    const Cut cut(steps);
    const int64_t count = std::min<int64_t>(LANES, product.batch - first), length = steps.all * steps.size;
    std::vector<uint16_t> near(static_cast<size_t>(length)), ordered(size_t(LANES * length));
    std::vector<int> place;
    with_lines(spec, steps, [&](const auto& code) {
        for (int i = 0; i < steps.size; ++i) place.push_back(code.place(i / LINE, i % LINE));
    });
    for (int64_t v = 0; v < count; ++v) {
        const auto* x = static_cast<const uint16_t*>(product.x.data) + (first + v) * product.x_stride;
        gain[first + v] = 1.0f / bring_near_one(x, spec.numel, near.data());
        uint16_t* out = &ordered[size_t(v * length)];
        for (const uint16_t *in = near.data(), *end = in + length; in < end; in += steps.size) {
            for (int64_t i = 0; i < steps.size; ++i) *out++ = in[place[size_t(i)]];
        }
    }
    for (int64_t line = 0; line < cut.all_lines; ++line) {
        Bits some[LANES];
        for (int v = 0; v < LANES; ++v) some[v] = read<Bits>(&ordered[size_t(v * length + line * LINE)]);
        transpose(some);
        const int64_t tile = line / cut.lines, at = tile * cut.lines * blocks_of(product.batch) + first / LANES * cut.lines_of(tile) + line % cut.lines;
        std::memcpy(packed + at * REGISTER / 2, some, sizeof some);
    }
}

}  // namespace
#endif
