// The C ABI of fake quantization: cuts a tensor [outer, channels, inner] into runs, and runs into tasks.
//
// Tasks depend on the shape alone, each leaves its sums in a place of its own, and the places are added up in order: threads
// change no bit of a scale's gradient.

#include <numeric>
#include <vector>

#include "fake_grid.h"
#include "threads.h"

namespace {
using namespace nc;

constexpr int64_t SHORT = 256;  // inner dimensions below this are not worth runs of their own
constexpr int64_t SPAN = 4096;  // elements of a run with a scale for each: longer ones miss the second-level cache
constexpr int64_t LEAST = 512;  // elements from which on a run is long enough: every one of them wants a scale laid out
constexpr int64_t ROWS = 64;    // such runs that a task takes, one below the other
constexpr int64_t TOGETHER = 4;  // of which so many are done at a time, so that scales and sums are read and written less
constexpr int64_t STREAM = 1 << 24;  // bytes from which on results are not expected to stay in any cache

// What went past the caches is to be seen by other threads. Not after every run: it waits for memory.
void publish() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Numbers that begin on a cache line: a vector that crosses one counts twice.
template <class T>
class Aligned {
    std::vector<T> memory_;

   public:
    T* const data;
    Aligned(int64_t count, T value)
        : memory_(size_t(count) + 64 / sizeof(T), value),
          data(memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64 / sizeof(T)) {}
};

struct Job {
    const FakeKernels& kernels;
    const FakeGrid& grid;
    FakeRun run;  // all but the elements and their scales
    int64_t outer, channels, inner;
    const float* scale;
    float* of_scale;
    int32_t threads;

    // Each run has one scale: whole inner dimensions, several to a task, or parts of one.
    int32_t in_slices() const {
        const int64_t runs = outer * channels, parts = ceil_div(inner, CHUNK), each = std::max<int64_t>(1, CHUNK / inner);
        std::vector<float> inverse(static_cast<size_t>(channels));
        for (int64_t c = 0; c < channels; ++c) inverse[size_t(c)] = 1.0f / scale[c];
        std::vector<double> sums(run.grad ? size_t(runs * parts) : 0);
        auto one = [&](int64_t slice, int64_t part) {
            FakeRun here = run;
            here.begin = slice * inner + part * CHUNK;
            here.count = std::min(CHUNK, inner - part * CHUNK);
            here.scale = scale + slice % channels, here.inverse = inverse.data() + slice % channels;
            if (run.grad) here.sums = &sums[size_t(slice * parts + part)];
            kernels.run(grid, here);
        };
        const int64_t tasks = parts > 1 ? runs * parts : ceil_div(runs, each);
        const int32_t failed = parallel_in_team(tasks, threads, [&](int64_t task) {
            if (parts > 1) one(task / parts, task % parts);
            else for (int64_t slice = task * each; slice < std::min(runs, (task + 1) * each); ++slice) one(slice, 0);
            publish();
        });
        for (int64_t c = 0; run.grad && c < channels; ++c) {
            double total = 0.0;
            for (int64_t o = 0; o < outer; ++o) {
                for (int64_t part = 0; part < parts; ++part) total += sums[size_t((o * channels + c) * parts + part)];
            }
            of_scale[c] = float(total);
        }
        return failed;
    }

    // Calls f(channel, first place) for each `inner` places of a row that share a scale.
    template <class F>
    void for_channels(int64_t period, const F& f) const {
        for (int64_t begin = 0, c = 0; begin < period; begin += inner, c = c + 1 < channels ? c + 1 : 0) f(c, begin);
    }

    void lay_out(const float* of_channels, int64_t period, float* to) const {
        for (int64_t begin = 0; begin < period && inner == 1; begin += channels) std::copy_n(of_channels, channels, to + begin);
        if (inner == 1) return;
        for_channels(period, [&](int64_t c, int64_t begin) { std::fill_n(to + begin, inner, of_channels[c]); });
    }

    // Of short rows several make a run, which is a multiple of 64 elements where that is not too long.
    static int64_t outer_per_run(int64_t width) {
        const int64_t whole = 64 / std::gcd<int64_t>(width, 64), enough = LEAST / width;
        if (whole * width > SPAN) return std::max<int64_t>(1, enough);
        return std::max(whole, enough / whole * whole);
    }

    // Each element of a run has its own scale: rows of one or, where they are short, several outer indices; a task takes the
    // same columns of many rows.
    int32_t in_columns() const {
        const int64_t width = channels * inner, numel = outer * width;
        const int64_t period = width * std::min(outer, outer_per_run(width));
        const int64_t rows = ceil_div(numel, period), blocks = ceil_div(period, SPAN);
        const int64_t high = ROWS, bands = ceil_div(rows, high);
        const int64_t room = ceil_div(period, 64) * 64;
        Aligned<float> scales(room, 1.0f), inverse(room, 1.0f);
        lay_out(scale, period, scales.data);
        for (int64_t j = 0; j < period; ++j) inverse.data[j] = 1.0f / scales.data[j];
        Aligned<double> sums(run.grad ? bands * room : 0, 0.0);
        const int32_t failed = parallel_in_team(bands * blocks, threads, [&](int64_t task) {
            const int64_t band = task / blocks, column = task % blocks * SPAN;
            FakeRun here = run;
            here.scale = scales.data + column, here.inverse = inverse.data + column, here.each = true, here.stride = period;
            if (run.grad) here.sums = sums.data + band * room + column;
            const int64_t end = std::min(rows, (band + 1) * high);
            for (int64_t row = band * high; row < end; row += here.runs) {
                here.begin = row * period + column;
                here.count = std::min({SPAN, period - column, numel - here.begin});
                here.runs = std::min(TOGETHER, end - row);
                const bool whole = here.begin + (here.runs - 1) * period + here.count <= numel;
                if (!whole && here.runs > 1) --here.runs;  // the last row may be short: it goes alone
                here.fetch = here.begin + (2 * here.runs - 1) * period + here.count <= numel;
                if (here.count > 0) kernels.run(grid, here);
            }
            publish();
        });
        if (!run.grad) return failed;
        for (int64_t band = 1; band < bands; ++band) {
            for (int64_t j = 0; j < period; ++j) sums.data[j] += sums.data[band * room + j];
        }
        std::vector<double> total(static_cast<size_t>(channels));
        for_channels(period, [&](int64_t c, int64_t begin) {
            for (int64_t j = begin; j < begin + inner; ++j) total[size_t(c)] += sums.data[j];
        });
        for (int64_t c = 0; c < channels; ++c) of_scale[c] = float(total[size_t(c)]);
        return failed;
    }
};

}  // namespace

// x, out and, for the backward pass, grad are [outer, channels, inner] of one dtype; scale and of_scale are [channels]. Levels
// [count] ascend, thresholds are one less. Without `grad`, out is y; with it, out is the gradient of x.
NC_EXPORT int32_t nc_fake_quantize(
    const void* x, const void* grad, void* out, int32_t dtype, int64_t outer, int64_t channels, int64_t inner,
    const float* scale, float* of_scale, const float* levels, const float* thresholds, int32_t count, int32_t uniform,
    int32_t threads, int32_t isa) {
    try {
        KeepDenormals keep;
        const FakeKernels& k = fake_kernels(isa);
        const PreparedGrid prepared(k, levels, thresholds, count, uniform != 0);
        const bool stream = dtype == F32 && outer * channels * inner * 4 >= STREAM;
        const FakeRun run{x, grad, out, dtype, 0, 0, nullptr, nullptr, false, 1, 0, false, stream, nullptr};
        const Job job{k, prepared.grid, run, outer, channels, inner, scale, of_scale, threads};
        return channels == 1 || inner >= SHORT ? job.in_slices() : job.in_columns();
    } catch (...) {
        return 1;
    }
}
