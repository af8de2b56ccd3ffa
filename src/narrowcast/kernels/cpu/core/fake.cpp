// Fake quantization of a run of elements, forward or backward, in one pass. Compiled once per instruction set.
//
// Pieces of 64 elements: v = x / scale, its level q, then either y, or the gradient of x and what the scale's sums up.
// Terms are added to lane i mod 32 in fp64, and lanes in order at the end of a run: the same bits on every machine.

#include "fake.h"

#include <new>

#include "fake_wide.h"

namespace {

constexpr int LANES = 32;

// PIECE floats, or n of them and zeros.
inline const float* piece_of(const void* data, int32_t dtype, int64_t at, int64_t n, float* buffer) {
    const float* from = load(Floats{data, dtype}, at, n, buffer);
    if (n == PIECE) return from;
    if (from != buffer) std::memcpy(buffer, from, size_t(n) * 4);
    std::memset(buffer + n, 0, size_t(PIECE - n) * 4);
    return buffer;
}

// The gradient's own bits but for those elements that are outside: zeros there.
template <class Bits>
inline void pass(const void* grad, uint64_t outside, void* out, int64_t at, int64_t n) {
    const Bits* from = static_cast<const Bits*>(grad) + at;
    Bits* to = static_cast<Bits*>(out) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = outside >> i & 1 ? Bits(0) : from[i];
}

inline void pass_any(const FakeRun& run, uint64_t outside, int64_t at, int64_t n) {
    switch (run.dtype) {
        case F32: return pass<uint32_t>(run.grad, outside, run.out, at, n);
        case F64: return pass<uint64_t>(run.grad, outside, run.out, at, n);
        default: return pass<uint16_t>(run.grad, outside, run.out, at, n);
    }
}

#if defined(__AVX512VBMI__)

using Prepared = Lookups;

// 64 elements, `at` this place: whole pieces of fp32 as they lie in memory, others by way of a buffer.
template <class Way>
inline void forward_at(const Way& way, const FakeRun& run, const Wide& scale, const Wide& inverse, int64_t at, int64_t n,
                       bool stream) {
    if (run.dtype == F32 && n == PIECE) {
        const float* x = static_cast<const float*>(run.x) + at;
        return forward_piece(way, scale, inverse, x, static_cast<float*>(run.out) + at, stream);
    }
    alignas(64) float buffer[PIECE], y[PIECE];
    forward_piece(way, scale, inverse, piece_of(run.x, run.dtype, at, n, buffer), y, false);
    store(y, run.out, run.dtype, at, n);
}

template <class Way, int N>
inline void backward_at(const Way& way, const FakeGrid& grid, const FakeRun& run, const Wide& inverse, int64_t at, int64_t n,
                        bool stream, __m512d (&sums)[N]) {
    if (run.dtype == F32 && n == PIECE) {
        const float *x = static_cast<const float*>(run.x) + at, *grad = static_cast<const float*>(run.grad) + at;
        float* out = static_cast<float*>(run.out) + at;
        const uint64_t inside = ~backward_piece(way, grid, inverse, x, grad, sums);
        for (int j = 0; j < PIECE; j += 16) {
            const __m512 kept = _mm512_maskz_loadu_ps(__mmask16(inside >> j), grad + j);
            if (stream) _mm512_stream_ps(out + j, kept);
            else _mm512_storeu_ps(out + j, kept);
        }
        return;
    }
    alignas(64) float buffer[PIECE], other[PIECE];
    const float* x = piece_of(run.x, run.dtype, at, n, buffer);
    const float* grad = piece_of(run.grad, run.dtype, at, n, other);
    pass_any(run, backward_piece(way, grid, inverse, x, grad, sums), at, n);
}

inline bool streams(const FakeRun& run) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(static_cast<float*>(run.out) + run.begin);
    return run.stream && first % 64 == 0 && (run.runs == 1 || run.stride % 16 == 0);
}

template <class Way, bool EACH>
void forward(const FakeGrid& grid, const FakeRun& run) {
    const Way way(grid);
    const bool stream = streams(run);
    for (int64_t i = 0; i < run.count; i += PIECE) {
        const Wide scale = of_places(run.scale, EACH, i), inverse = of_places(run.inverse, EACH, i);
        const int64_t n = std::min(PIECE, run.count - i);
        for (int64_t r = 0; r < (EACH ? run.runs : 1); ++r) {
            const int64_t at = run.begin + i + r * run.stride;
            if (EACH && run.fetch) fetch(Floats{run.x, run.dtype}, at + run.runs * run.stride, n);
            forward_at(way, run, scale, inverse, at, n, stream);
        }
    }
}

template <class Way>
void backward_each(const FakeGrid& grid, const FakeRun& run) {
    const Way way(grid);
    const bool stream = streams(run);
    for (int64_t i = 0; i < run.count; i += PIECE) {
        const Wide inverse = of_places(run.inverse, true, i);
        const int64_t n = std::min(PIECE, run.count - i);
        __m512d sums[8];
        for (int j = 0; j < 8; ++j) sums[j] = _mm512_loadu_pd(run.sums + i + 8 * j);
        for (int64_t r = 0; r < run.runs; ++r) {
            const int64_t at = run.begin + i + r * run.stride, next = at + run.runs * run.stride;
            if (run.fetch) fetch(Floats{run.x, run.dtype}, next, n), fetch(Floats{run.grad, run.dtype}, next, n);
            backward_at(way, grid, run, inverse, at, n, stream, sums);
        }
        for (int j = 0; j < 8; ++j) _mm512_storeu_pd(run.sums + i + 8 * j, sums[j]);
    }
}

template <class Way, bool EACH>
void backward(const FakeGrid& grid, const FakeRun& run) {
    if (EACH) return backward_each<Way>(grid, run);
    const Way way(grid);
    const Wide inverse = of_places(run.inverse, false, 0);
    const bool stream = streams(run);
    __m512d lanes[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
    for (int64_t i = 0; i < run.count; i += PIECE) {
        backward_at(way, grid, run, inverse, run.begin + i, std::min(PIECE, run.count - i), stream, lanes);
    }
    alignas(64) double sums[LANES];
    for (int j = 0; j < 4; ++j) _mm512_store_pd(sums + 8 * j, lanes[j]);
    double total = 0.0;
    for (int j = 0; j < LANES; ++j) total += sums[j];
    *run.sums = total;
}

#else

using Prepared = Table;

// The levels of PIECE numbers, whatever those of NaN are.
struct Round {
    float low, high;
    explicit Round(const FakeGrid& grid) : low(grid.low), high(grid.high) {}
    inline void find(const float* __restrict v, float* __restrict q) const {
        for (int i = 0; i < PIECE; ++i) q[i] = (clamp(v[i], low, high) + ROUNDER) - ROUNDER;
    }
    static constexpr float plus = 0.0f;  // integer codes know no negative zero
};

template <int BITS>
struct Coded {
    const FakeGrid& grid;
    explicit Coded(const FakeGrid& grid) : grid(grid) {}
    inline void find(const float* __restrict v, float* __restrict q) const {
        uint8_t codes[PIECE];
        quantize_levels<BITS>(v, Scaling{1.0f, 1.0f, 0}, *reinterpret_cast<const Table*>(grid.table), codes);
        for (int i = 0; i < PIECE; ++i) q[i] = grid.spec.levels[codes[i]];
    }
    static constexpr float plus = -0.0f;  // which changes nothing
};

inline float or_nan(float value, float v) { return v == v ? value : as<float>(0x7FC00000u); }

template <class Way, bool EACH>
void forward(const FakeGrid& grid, const FakeRun& run) {
    const Way way(grid);
    alignas(64) float buffer[PIECE], v[PIECE], q[PIECE];
    for (int64_t i = 0; i < run.count; i += PIECE) {
        const int64_t n = std::min(PIECE, run.count - i);
        const float *scale = run.scale + (EACH ? i : 0), *inverse = run.inverse + (EACH ? i : 0);
        for (int64_t r = 0; r < (EACH ? run.runs : 1); ++r) {
            const int64_t at = run.begin + i + r * run.stride;
            const float* x = piece_of(run.x, run.dtype, at, n, buffer);
            for (int j = 0; j < PIECE; ++j) v[j] = x[j] * inverse[EACH ? j : 0];
            way.find(v, q);
            for (int j = 0; j < PIECE; ++j) q[j] = canonical(or_nan(q[j], v[j]) * scale[EACH ? j : 0] + Way::plus);
            store(q, run.out, run.dtype, at, n);
        }
    }
}

template <class Way, bool EACH>
void backward(const FakeGrid& grid, const FakeRun& run) {
    const Way way(grid);
    alignas(64) float buffer[PIECE], other[PIECE], v[PIECE], q[PIECE];
    alignas(64) double lanes[LANES] = {};
    for (int64_t i = 0; i < run.count; i += PIECE) {
        const int64_t n = std::min(PIECE, run.count - i);
        const float* inverse = run.inverse + (EACH ? i : 0);
        for (int64_t r = 0; r < (EACH ? run.runs : 1); ++r) {
            const int64_t at = run.begin + i + r * run.stride;
            const float* x = piece_of(run.x, run.dtype, at, n, buffer);
            const float* grad = piece_of(run.grad, run.dtype, at, n, other);
            for (int j = 0; j < PIECE; ++j) v[j] = x[j] * inverse[EACH ? j : 0];
            way.find(v, q);
            uint64_t outside = 0;
            for (int j = 0; j < PIECE; ++j) {
                const bool beyond = (v[j] < grid.low) | (v[j] > grid.high);
                const float level = or_nan(q[j], v[j]);
                q[j] = grad[j] * (beyond ? level : level - v[j]);
            }
            for (int j = 0; j < PIECE; ++j) outside |= uint64_t((v[j] < grid.low) | (v[j] > grid.high)) << j;
            if (EACH) {
                for (int64_t j = 0; j < n; ++j) run.sums[i + j] += double(q[j]);
            } else {
                for (int j = 0; j < PIECE; ++j) lanes[j % LANES] += double(q[j]);
            }
            pass_any(run, outside, at, n);
        }
    }
    if (EACH) return;
    double total = 0.0;
    for (int j = 0; j < LANES; ++j) total += lanes[j];
    *run.sums = total;
}

#endif

template <class Way>
void through(const FakeGrid& grid, const FakeRun& run) {
    if (run.grad) run.each ? backward<Way, true>(grid, run) : backward<Way, false>(grid, run);
    else run.each ? forward<Way, true>(grid, run) : forward<Way, false>(grid, run);
}

template <int BITS>
void through_table(const FakeGrid& grid, const FakeRun& run) {
#if defined(__AVX512VBMI__)
    if constexpr (BITS <= 4) {
        if (lookups(grid).near) return through<Near>(grid, run);
    }
    if constexpr (BITS <= 5) {
        if (lookups(grid).table.way == Table::SEARCH) return through<Search<BITS>>(grid, run);
    }
#endif
    through<Coded<BITS>>(grid, run);
}

void run(const FakeGrid& grid, const FakeRun& run) {
    if (grid.uniform) return through<Round>(grid, run);
    with_bits(grid.spec.bits, [&](auto bits) { through_table<decltype(bits)::value>(grid, run); });
}

void prepare(FakeGrid& grid) {
    static_assert(sizeof(Prepared) <= sizeof grid.table && alignof(Prepared) <= 64, "room for what is looked up");
    if (!grid.uniform) new (grid.table) Prepared(grid.spec);
}

}  // namespace

namespace nc {
const FakeKernels NC_NAMED_BY_ISA(fake) = {::prepare, ::run};
}  // namespace nc
