// Products with many vectors, tile by tile (tile_x.h). Compiled once per instruction set; those without AVX-512 leave them
// to others.

#include <memory>

#include "tile_codes.h"
#include "tile_sums.h"

namespace {

#if defined(__AVX512BF16__)

// Where the results of a panel go.
struct Place {
    const Product& product;
    int64_t row, rows;
    alignas(64) float bias[PANEL] = {};

    Place(const Product& product_, int64_t row_, int64_t rows_) : product(product_), row(row_), rows(rows_) {
        float buffer[PANEL];
        if (product.bias.data) std::memcpy(bias, load(product.bias, row, rows, buffer), size_t(rows) * 4);
    }

    // The sums y of vectors [begin, end).
    void put(int64_t begin, int64_t end, const float* y) const {
        for (int64_t b = begin; b < end; ++b) {
            for (int half = 0; half < rows; half += LANES) {
                __m512 value = _mm512_mul_ps(_mm512_load_ps(y + b * PANEL + half), _mm512_set1_ps(product.gain[b]));
                if (product.bias.data) value = _mm512_add_ps(value, _mm512_load_ps(bias + half));
                put_results(value, rows - half, product.out, product.x.dtype, b * product.out_stride + row + half);
            }
        }
    }
};

// Rows with scales far from one, or codes that are no numbers.
void redo_plainly(const Spec& spec, const Product& product, const Panel& panel, int64_t row, int64_t rows) {
    std::unique_ptr<float[]> again;
    for (int64_t r = 0; r < rows; ++r) {
        if (!panel.plain[r] && !(panel.odd[r / LANES][r % LANES] & 0x80808080u)) continue;
        if (!again) again.reset(new float[size_t(product.batch * GROUP_ROWS)]);
        plainly(spec, product, panel.row[r], product.x, product.x_stride, 0, product.batch, again.get());
        finish(product, row + r, 1, again.get());
    }
}

template <class Code>
void tile_rows(const Code& code, const Spec& spec, const Product& product, int64_t first, int64_t end) {
    using Kind = typename Code::Kind;
    const Steps steps = Steps::of<Code>(spec);
    const Cut cut(steps, Kind::WAY);
    const Groups groups(product.batch);
    Panel panel(spec);
    const size_t kept = size_t(cut.lines * LINE * PANEL), sums = size_t(product.batch * PANEL);
    std::unique_ptr<float[]> memory(new float[kept + sums + LINE]);
    float* words = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 4;
    float* y = words + kept;
    for (int64_t row = first; row < end; row += PANEL) {
        const int64_t rows = std::min<int64_t>(PANEL, end - row);
        panel.take(spec, steps, product.data + row * product.stride, product.stride, rows, Code::BYTES, Kind::PER == 2);
        const Place place(product, row, rows);
        std::fill(y, y + sums, 0.0f);
        for (int64_t i = 0, step = 0; i < cut.tiles; ++i, step += cut.steps) {
            const int64_t block = steps.blocks > 1 ? step * steps.blocks : step / steps.flush;
            const Tile tile{words, panel.scales + block * PANEL, cut.lines_of(i), cut.segment};
            decode_tile(code, steps, panel, step, std::min(steps.all, step + cut.steps), words);
            Coming coming = panel.codes_from(step + cut.steps, steps, cut, Code::BYTES, product.stride, tile.lines * groups.count);
            const float* x = product.prepared + i * cut.lines * product.batch * LINE;
            for (int64_t group = 0; group < groups.count; ++group) {
                const int64_t begin = groups.begin(group), size = groups.begin(group + 1) - begin;
                add_group<Kind>(size, tile, x + begin * tile.lines * LINE, y + begin * PANEL, coming, std::make_integer_sequence<int, GROUP>());
                if (i == cut.tiles - 1) place.put(begin, begin + size, y);  // its stores take place while the next group is multiplied
            }
        }
        redo_plainly(spec, product, panel, row, rows);
    }
}

// Which kind of words tiles have for this format, dtype and batch; 0: there are no tiles for it.
int32_t way(const Spec& spec, const Product& product) {
    if (spec.scale == NO_SCALE || !Steps::of(spec).direct) return 0;  // a Panel holds scales of blocks, and these rows have none
    if (!with_words(spec, Single::WAY, [](const auto&) {})) return 0;
    if (product.x.dtype != B16 || !__builtin_cpu_supports("avx512bf16")) return Single::WAY;
    if (!fits_pairs(spec)) return 0;
    return product.batch < MANY_VECTORS ? Pair::WAY : ScaledPair::WAY;
}

// Floats that x takes where it is packed.
int64_t packed(const Spec& spec, const Product& product) {
    return product.batch * Cut(Steps::of(spec), product.way).all_lines * LINE;
}

int64_t together(const Spec&, const Product&, int64_t, int32_t) { return PANEL; }

void tiles(const Spec& spec, const Product& product, int64_t first, int64_t end) {
    with_words(spec, product.way, [&](const auto& code) { tile_rows(code, spec, product, first, end); });
}

#endif

}  // namespace

namespace nc {
#if defined(__AVX512BF16__)
const Tiler NC_NAMED_BY_ISA(tiler) = {1, ::way, ::packed, ::pack, ::together, ::tiles};
#else
const Tiler NC_NAMED_BY_ISA(tiler) = {1, [](const Spec&, const Product&) { return 0; }, nullptr, nullptr, nullptr, nullptr};
#endif
}  // namespace nc
