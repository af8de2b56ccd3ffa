// Products with many vectors in matrix registers (matrix_x.h). Compiled once per instruction set; those without AMX leave them to others.

#include <memory>

#include "matrix_x.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AMX_BF16__)

// GCC's intrinsics do not say what memory they read and write: without this, stores ahead of them may be left out.
NC_FORCED void keep_memory() { asm volatile("" : : : "memory"); }

// Eight registers of 16 lines of 64 bytes; they belong to the thread, and are given back at the end.
class MatrixRegisters {
    struct alignas(64) Shapes {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };

   public:
    MatrixRegisters() {
        const Shapes shapes;
        asm volatile("" : : "r"(&shapes) : "memory");
        _tile_loadconfig(&shapes);
    }
    ~MatrixRegisters() { _tile_release(); }
    MatrixRegisters(const MatrixRegisters&) = delete;

    // Whether the CPU has them and Linux lets this process use them, which it is asked for once.
    static bool allowed() {
        static const bool granted = [] {
            constexpr long ASK = 0x1023, DATA_OF_TILES = 18;
            return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, ASK, DATA_OF_TILES) == 0;
        }();
        return granted;
    }

    // Adds a tile times one block of vectors, or two, to the sums y, [block][half of the rows][16 rows][16 vectors]; `fresh`: to zero.
    // With each line, `share` cache lines of the x that comes `soon` are asked for.
    template <int BLOCKS>
    __attribute__((noinline)) void add(const uint16_t* tile, int64_t lines, const uint16_t* x, float* y, bool fresh, const uint16_t* soon,
                                       int64_t share) const {
        constexpr int64_t SUMS = LANES * LANES;
        const uint16_t* other = x + lines * REGISTER;
        keep_memory();
        if (fresh) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, y, 64);
            _tile_loadd(1, y + SUMS, 64);
            if (BLOCKS == 2) {
                _tile_loadd(2, y + 2 * SUMS, 64);
                _tile_loadd(3, y + 3 * SUMS, 64);
            }
        }
        for (int64_t line = 0; line < lines; ++line, tile += 2 * REGISTER, x += REGISTER, other += REGISTER) {
            for (int64_t i = 0; i < share; ++i, soon += LINE) __builtin_prefetch(soon, 0, 2);
            _tile_loadd(6, x, 64);
            _tile_loadd(4, tile, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, tile + REGISTER, 64);
            _tile_dpbf16ps(1, 5, 6);
            if (BLOCKS == 1) continue;
            _tile_loadd(7, other, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, y, 64);
        _tile_stored(1, y + SUMS, 64);
        if (BLOCKS == 2) {
            _tile_stored(2, y + 2 * SUMS, 64);
            _tile_stored(3, y + 3 * SUMS, 64);
        }
        keep_memory();
    }
};

// The rows of a tile.
struct Panel {
    RowGroup half[2];
    int64_t first, count;

    Panel(const Spec& spec, const Steps& steps, const Product& product, int64_t row, int64_t rows, int64_t bytes)
        : half{{spec, steps}, {spec, steps}}, first(row), count(rows) {
        for (int64_t h = 0; h < 2 && h * LANES < rows; ++h) {
            half[h].take(spec, steps, product.data + (row + h * LANES) * product.stride, product.stride, std::min<int64_t>(LANES, rows - h * LANES), bytes,
                         {1.0f / FAR_SCALE, FAR_SCALE});
        }
    }
};

// Steps [step, end) of 32 rows, into a tile. The codes that lie `ahead` bytes on are asked for.
template <class Code>
__attribute__((noinline)) void decode_tile(const Code& code, const Steps& steps, Panel& panel, int64_t step, int64_t end, int64_t ahead, uint16_t* tile) {
    const int64_t each = steps.size / LINE, first = step / steps.flush * steps.blocks, until = steps.flush - step % steps.flush;
    for (int64_t r = 0; r < panel.count; ++r, tile += LINE) {
        RowGroup& group = panel.half[r / LANES];
        const int64_t at = r % LANES;
        Bits odd{};
        uint16_t* out = tile;
        int64_t place = at * group.stride + first, left = until;
        for (int64_t s = step; s < end; ++s, out += each * 2 * REGISTER) {
            const uint8_t* codes = group.row[at] + s * Code::BYTES;
            __builtin_prefetch(codes + ahead, 0, 2);
            const Bits words = code.words(s < steps.whole ? codes : group.tail[at]);
            if constexpr (Code::CHECKED) odd |= code.odd(words);
            code.put(words, {group.scales.data() + place, group.zeros.data() + place, steps.blocks > 1, group.lanes}, out, 2 * REGISTER);
            if (--left == 0) place += steps.blocks, left = steps.flush;
        }
        if constexpr (Code::CHECKED) group.plain[at] |= _mm512_test_epi32_mask((__m512i)odd, _mm512_set1_epi32(int(0x80808080u))) != 0;
    }
}

// The sums of a panel with one block of vectors, on their way out.
void put(const Product& product, const Panel& panel, const float* bias, int64_t block, const float* y) {
    for (int64_t h = 0; h * LANES < panel.count; ++h) {
        Bits sums[LANES];
        std::memcpy(sums, y + h * LANES * LANES, sizeof sums);
        transpose(sums);
        for (int64_t v = 0, b = block * LANES; v < LANES && b < product.batch; ++v, ++b) {
            __m512 value = _mm512_mul_ps((__m512)sums[v], _mm512_set1_ps(product.gain[b]));
            if (product.bias.data) value = _mm512_add_ps(value, _mm512_loadu_ps(bias + h * LANES));
            put_results(value, panel.count - h * LANES, product.out, product.x.dtype, b * product.out_stride + panel.first + h * LANES);
        }
    }
}

// Rows with scales far from one, or codes that are no numbers.
void redo_plainly(const Spec& spec, const Product& product, const Panel& panel) {
    std::unique_ptr<float[]> again;
    for (int64_t r = 0; r < panel.count; ++r) {
        const RowGroup& group = panel.half[r / LANES];
        if (!group.plain[r % LANES]) continue;
        if (!again) again.reset(new float[size_t(product.batch * GROUP_ROWS)]);
        plainly(spec, product, group.row[r % LANES], product.x, product.x_stride, 0, product.batch, again.get());
        finish(product, panel.first + r, 1, again.get());
    }
}

// Rows [first, end), panel by panel for one tile of x after the other: so x comes from afar once for all of them, and each asks for its share
// of the next.
template <class Code>
void multiply(const Code& code, const Spec& spec, const Steps& steps, const Product& product, int64_t first, int64_t end) {
    const Cut cut(steps);
    const int64_t blocks = blocks_of(product.batch), sums = blocks * 2 * LANES * LANES, count = (end - first + PANEL - 1) / PANEL;
    std::vector<Panel> panels;
    panels.reserve(size_t(count));
    for (int64_t row = first; row < end; row += PANEL) panels.emplace_back(spec, steps, product, row, std::min<int64_t>(PANEL, end - row), Code::BYTES);
    std::unique_ptr<float[]> memory(new float[size_t(cut.lines * REGISTER + count * sums + LANES)]);
    float* y = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 4;
    auto* tile = reinterpret_cast<uint16_t*>(y + count * sums);
    const auto* x = reinterpret_cast<const uint16_t*>(product.prepared);
    const MatrixRegisters registers;
    for (int64_t i = 0, step = 0; i < cut.tiles; ++i, step += cut.steps) {
        const bool last = i + 1 == cut.tiles;
        const int64_t lines = cut.lines_of(i), ahead = last ? (end - first) * product.stride - step * Code::BYTES : cut.steps * Code::BYTES;
        for (int64_t p = 0; p < count; ++p) {
            Panel& panel = panels[size_t(p)];
            float bias[PANEL] = {}, buffer[PANEL];
            if (product.bias.data) std::memcpy(bias, load(product.bias, panel.first, panel.count, buffer), size_t(panel.count) * 4);
            decode_tile(code, steps, panel, step, std::min(steps.all, step + cut.steps), ahead, tile);
            for (int64_t block = 0; block < blocks; block += 2) {
                const int64_t some = std::min<int64_t>(2, blocks - block), share = count > 1 && !last ? some * LANES / count : 0;
                const uint16_t *of = x + block * lines * REGISTER, *soon = of + blocks * lines * REGISTER + p * share * lines * LINE;
                float* to = y + p * sums + block * 2 * LANES * LANES;
                if (some == 2) registers.add<2>(tile, lines, of, to, i == 0, soon, share);
                else registers.add<1>(tile, lines, of, to, i == 0, soon, share);
                for (int64_t b = 0; b < some && last; ++b, to += 2 * LANES * LANES) put(product, panel, bias, block + b, to);
            }
        }
        x += blocks * lines * REGISTER;
    }
    for (const Panel& panel : panels) redo_plainly(spec, product, panel);
}

int32_t way(const Spec& spec, const Product& product) {
    const Steps steps = Steps::of(spec);
    return product.x.dtype == B16 && steps.direct && levels_near_one(spec) && MatrixRegisters::allowed() &&
           with_lines(spec, steps, [](const auto&) {});
}

// Panels that share x while it is near: several where it does not stay in the second-level cache, if every thread gets some of them.
int64_t together(const Spec& spec, const Product& product, int64_t rows, int32_t threads) {
    const int64_t most = product.batch * spec.numel * 2 > NEAR ? 8 : 1;
    return PANEL * std::clamp<int64_t>(rows / (2 * PANEL * std::max(threads, 1)), 1, most);
}

void tiles(const Spec& spec, const Product& product, int64_t first, int64_t end) {
    const Steps steps = Steps::of(spec);
    with_lines(spec, steps, [&](const auto& code) { multiply(code, spec, steps, product, first, end); });
}

#endif

}  // namespace

namespace nc {
#if defined(__AMX_BF16__)
const Tiler NC_NAMED_BY_ISA(matrix) = {16, ::way, ::packed, ::pack, ::together, ::tiles};
#else
const Tiler NC_NAMED_BY_ISA(matrix) = {1, [](const Spec&, const Product&) { return 0; }, nullptr, nullptr, nullptr, nullptr};
#endif
}  // namespace nc
