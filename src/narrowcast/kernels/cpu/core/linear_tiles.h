// Many vectors times encoded rows: 32 rows are decoded side by side, a few hundred of their elements at a time, into a tile that
// stays in the first-level cache, and all vectors are multiplied with it (AVX-512).
//
// A tile holds words of 32 bits, [word][row], so that a vector of it is one word of 16 rows: a float (Single), or two
// neighbouring elements in bf16 (Pair). Codes are turned that way while they still lie in words, EACH of them in one, and
// become floats after that; x comes in lines of 16 words. A sum runs over the elements in their order, whatever the batch is.
//
// Pairs are for x in bf16: weights are rounded to bf16 once, products are exact, sums are fp32. The instruction takes denormals
// for zero; so vectors far from one are brought nearer (by a power of two, which `gain` takes back), and rows with scales far
// from one take the plain way. What is then lost, below 2^-126 of each product, is nothing beside 2^-30 of the largest x.

#pragma once
#include "linear_plain.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int PANEL = 2 * LANES;      // rows of a tile
constexpr int GROUP = 14;             // vectors whose sums are in registers at the same time: 28 of 32
constexpr int LINE = 16;              // words of a cache line
constexpr int64_t TILE = 192;         // words of each row in a tile, about: 24 KB in all
constexpr float FAR = 0x1p16f;        // x beyond this, or below its inverse, is brought nearer to one
constexpr float FAR_SCALE = 0x1p40f;  // rows with scales beyond this, or below its inverse, take the plain way

struct Single {
    static constexpr int PER = 1;  // elements of a word
    static NC_FORCED __m512 add_product(__m512 sum, __m512i weight, __m512i x) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(weight), _mm512_castsi512_ps(x), sum);
    }
};

struct Pair {
    static constexpr int PER = 2;
    static NC_FORCED __m512 add_product(__m512 sum, __m512i weight, __m512i x) {
        return _mm512_dpbf16_ps(sum, (__m512bh)weight, (__m512bh)x);
    }
};

// How x and tiles are cut: a tile is `steps` steps of codes, `lines` lines of words.
struct Cut {
    int64_t steps, lines, tiles, all_lines;
    Cut(const Steps& row, int64_t per) {
        const int64_t words = row.size / per;
        steps = std::max<int64_t>(1, TILE / words);
        lines = steps * words / LINE;
        tiles = (row.all + steps - 1) / steps;
        all_lines = row.all * words / LINE;
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

// Whether weights of this format, with scales that are not far, are normal numbers in bf16 or zero.
inline bool normal_in_bf16(const Spec& spec) {
    if (spec.element != LEVELS) return true;
    for (int i = 0; i < 1 << spec.bits; ++i) {
        const float magnitude = std::fabs(spec.levels[i]);
        if (magnitude > 0x1p20f || (magnitude != 0.0f && magnitude < 0x1p-20f)) return false;
    }
    return true;
}

inline float nearer(uint32_t most) {
    if (most >= 0x7F800000u || most == 0 || (most < as<uint32_t>(FAR) && most >= as<uint32_t>(1.0f / FAR))) return 1.0f;
    const uint32_t exponent = std::max(most >> 23, 2u);
    return as<float>((254u - exponent) << 23);
}

void pack(const Spec& spec, const Product& product, int64_t b, float* packed, float* gain) {
    const Cut cut(Steps::of(spec), product.pairs ? 2 : 1);
    const Groups groups(product.batch);
    const int64_t group = groups.of(b), begin = groups.begin(group), size = groups.begin(group + 1) - begin;
    const int64_t element = product.x.dtype == F32 ? 4 : 2, all = cut.all_lines * LINE * (product.pairs ? 2 : 1);
    const Floats x{static_cast<const uint8_t*>(product.x.data) + b * product.x_stride * element, product.x.dtype};
    std::vector<float> wide(static_cast<size_t>(all));
    const float* from = load(x, 0, spec.numel, wide.data());
    if (from != wide.data()) std::memcpy(wide.data(), from, size_t(spec.numel) * 4);
    std::vector<uint16_t> narrow(product.pairs ? wide.size() : 0);
    *gain = 1.0f;
    if (product.pairs) {
        uint32_t most = 0;
        for (const float& one : wide) most = std::max(most, as<uint32_t>(one) & 0x7FFFFFFFu);
        const float by = nearer(most);
        *gain = 1.0f / by;
        for (size_t i = 0; i < wide.size(); ++i) narrow[i] = uint16_t(as<uint32_t>(wide[i] * by) >> 16);
    }
    const char* line = product.pairs ? reinterpret_cast<const char*>(narrow.data()) : reinterpret_cast<const char*>(wide.data());
    for (int64_t tile = 0; tile < cut.tiles; ++tile) {
        const int64_t lines = cut.lines_of(tile);
        float* to = packed + (tile * cut.lines * product.batch + begin * lines + (b - begin)) * LINE;
        for (int64_t i = 0; i < lines; ++i, line += 4 * LINE) std::memcpy(to + i * size * LINE, line, 4 * LINE);
    }
}

// -- decoding 32 rows -------------------------------------------------------------------------------------------------------------

// Word i of row r and word r of row i change places.
NC_FORCED void transpose(Bits (&at)[LANES]) {
    __m512i a[LANES], b[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)at[i], (__m512i)at[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)at[i], (__m512i)at[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i first = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), second = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xDD);
        const __m512i third = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), last = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xDD);
        at[i] = (Bits)_mm512_shuffle_i32x4(first, third, 0x88);
        at[i + 8] = (Bits)_mm512_shuffle_i32x4(first, third, 0xDD);
        at[i + 4] = (Bits)_mm512_shuffle_i32x4(second, last, 0x88);
        at[i + 12] = (Bits)_mm512_shuffle_i32x4(second, last, 0xDD);
    }
}

// The rows of a tile: where they lie, and their scales, [block][row].
struct Panel {
    const uint8_t* row[PANEL];
    uint8_t tail[PANEL][64];  // the codes of a partial last step, then zeros
    std::vector<float> scales, zeros, read;
    Bits odd[2];
    bool plain[PANEL];

    explicit Panel(const Spec& spec) {
        const size_t blocks = size_t(spec.blocks + 2 * LANES);
        scales.resize(blocks * PANEL);
        read.resize(blocks * LANES);
        if (spec.element == AFFINE) zeros.resize(blocks * PANEL);
    }

    void take(const Spec& spec, const Steps& steps, const uint8_t* data, int64_t stride, int64_t rows, int64_t bytes, bool pairs) {
        const float limit = spec.element == AFFINE ? 0x1p119f : HUGE_VALF;  // decoding cuts products past the largest number
        for (int r = 0; r < PANEL; ++r) {
            row[r] = data + std::min<int64_t>(r, rows - 1) * stride;
            plain[r] = false;
            if (steps.all == steps.whole) continue;
            const int64_t done = steps.whole * bytes;
            std::memset(tail[r], 0, 64);
            std::memcpy(tail[r], row[r] + done, size_t(spec.codes_bytes - done));
        }
        const int64_t step = spec.blocks + LANES;
        for (int half = 0; half < PANEL; half += LANES) {
            odd[half / LANES] = Bits{};
            for (int r = 0; r < LANES; ++r) plain[half + r] = read_scales(spec, row[half + r], &read[size_t(r * step)], limit);
            turn(spec, half, step, pairs);
            if (spec.element != AFFINE) continue;
            for (int r = 0; r < LANES; ++r) {
                for (int64_t i = 0; i < spec.blocks; ++i) {
                    zeros[size_t(i * PANEL + half + r)] = float(row[half + r][spec.zeros_offset + i]);
                }
            }
        }
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
                std::memcpy(&scales[size_t((block + i) * PANEL + half)], &some[i], 64);
                const __m512 size = _mm512_abs_ps((__m512)some[i]);
                far |= ~(_mm512_cmp_ps_mask(size, _mm512_set1_ps(FAR_SCALE), _CMP_LE_OQ) &
                         (_mm512_cmp_ps_mask(size, _mm512_set1_ps(1.0f / FAR_SCALE), _CMP_GE_OQ) |
                          _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_EQ_OQ)));
            }
            for (int r = 0; r < LANES && pairs; ++r) plain[half + r] |= far >> r & 1;
        }
    }
};

// One word of 16 rows as EACH / PER words of a tile.
template <class Kind, class Code, int... J>
NC_FORCED void spread(const Code& code, Bits word, Vector scale, Vector zero, float* out, std::integer_sequence<int, J...>) {
    auto value = [&](auto j) __attribute__((always_inline)) {
        Vector weight = code.template value<j()>(word);
        if (Code::AFFINE_CODES) weight -= zero;
        return (__m512)(weight * scale);
    };
    if constexpr (Kind::PER == 1) {
        (_mm512_store_ps(out + J * PANEL, value(Constant<J>())), ...);
    } else {
        const __m512i order = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                                                  _mm512_set1_epi32(0x00010001)),
                                               _mm512_set1_epi32(0x00100000));
        auto pair = [&](auto j) __attribute__((always_inline)) {
            const __m512bh both = _mm512_cvtne2ps_pbh(value(Constant<2 * j() + 1>()), value(Constant<2 * j()>()));
            return _mm512_permutexvar_epi16(order, (__m512i)both);
        };
        (_mm512_store_si512(out + J * PANEL, pair(Constant<J>())), ...);
    }
}

// Steps [step, end) of 32 rows, into a tile.
template <class Kind, class Code>
__attribute__((noinline)) void decode_tile(const Code& code, const Steps& steps, Panel& panel, int64_t step, int64_t end, int64_t ahead,
                                           float* tile) {
    constexpr int WORDS = Code::EACH / Kind::PER;
    for (; step < end; ++step, tile += LANES * WORDS * PANEL) {
        const int64_t block = steps.blocks > 1 ? step * steps.blocks : step / steps.flush;
        for (int half = 0; half < PANEL; half += LANES) {
            Bits words[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; ++r) {
                const uint8_t* at = step < steps.whole ? panel.row[half + r] + step * Code::BYTES : panel.tail[half + r];
                __builtin_prefetch(at + ahead, 0, 2);
                words[r] = code.words(at);
                if constexpr (Code::CHECKED) {
                    const Bits odd = code.odd(words[r]);
                    for (int i = 0; i < LANES; ++i) panel.odd[half / LANES][r] |= odd[i];
                }
            }
            transpose(words);
            for (int i = 0; i < LANES; ++i) {
                const int64_t place = (block + i * steps.blocks / LANES) * PANEL + half;
                const Vector zero = Code::AFFINE_CODES ? read<Vector>(&panel.zeros[size_t(place)]) : Vector{};
                spread<Kind>(code, words[i], read<Vector>(&panel.scales[size_t(place)]), zero, tile + i * WORDS * PANEL + half,
                             std::make_integer_sequence<int, WORDS>());
            }
        }
    }
}

// -- a tile times up to 14 vectors ------------------------------------------------------------------------------------------------

template <class Kind, int VECTORS>
__attribute__((noinline)) void multiply_tile(const float* tile, const float* x, int64_t lines, float* y) {
    __m512 sum[VECTORS][2];
#pragma GCC unroll 14
    for (int b = 0; b < VECTORS; ++b) {
        sum[b][0] = _mm512_load_ps(y + b * PANEL);
        sum[b][1] = _mm512_load_ps(y + b * PANEL + LANES);
    }
    for (const float* end = x + lines * VECTORS * LINE; x < end; x += VECTORS * LINE) {
#pragma GCC unroll 4
        for (int i = 0; i < LINE; ++i, tile += PANEL) {
            const __m512i first = _mm512_load_si512(tile), second = _mm512_load_si512(tile + LANES);
#pragma GCC unroll 14
            for (int b = 0; b < VECTORS; ++b) {
                const __m512i one = _mm512_castps_si512(_mm512_set1_ps(x[b * LINE + i]));
                sum[b][0] = Kind::add_product(sum[b][0], first, one);
                sum[b][1] = Kind::add_product(sum[b][1], second, one);
            }
        }
    }
#pragma GCC unroll 14
    for (int b = 0; b < VECTORS; ++b) {
        _mm512_store_ps(y + b * PANEL, sum[b][0]);
        _mm512_store_ps(y + b * PANEL + LANES, sum[b][1]);
    }
}

template <class Kind, int... N>
inline void multiply_group(int64_t vectors, const float* tile, const float* x, int64_t lines, float* y, std::integer_sequence<int, N...>) {
    using Way = void (*)(const float*, const float*, int64_t, float*);
    static constexpr Way ways[] = {multiply_tile<Kind, N + 1>...};
    ways[vectors - 1](tile, x, lines, y);
}

}  // namespace
#endif
