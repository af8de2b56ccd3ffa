// The C ABI of exact convolutions: lays the input out as levels, then gives blocks of outputs to threads.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "conv.h"
#include "fake_grid.h"
#include "threads.h"

namespace {
using namespace nc;

constexpr int64_t STRIP = 1024;  // floats of a channel that are quantized at a time: four channels stay in the first cache
constexpr int64_t BLOCKS = 8;    // of places that a task takes
constexpr int32_t UNKNOWN = 2;   // the input holds a NaN

const ConvKernels& kernels([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
    if (isa == 2) return conv_avx512;
    if (isa == 1) return conv_avx2;
#endif
    return conv_plain;
}

// Sizes of a convolution; mirrored by `_integer_conv` in binding.py. Places and rows are those of the output.
struct Shape {
    int64_t images, channels, height, width;
    int64_t outputs, kernel_y, kernel_x, stride_y, stride_x, dilation_y, dilation_x;
    int64_t left, top, out_height, out_width, groups;

    int64_t each() const { return channels / groups; }
    int64_t words() const { return ceil_div(each(), 4); }  // of a pixel
    int64_t rows() const { return out_height + (kernel_y - 1) * dilation_y / stride_y; }  // of a phase
    int64_t columns() const { return out_width + (kernel_x - 1) * dilation_x / stride_x; }
    int64_t phase() const { return rows() * columns(); }
    int64_t plane() const { return phase() * stride_y * stride_x; }  // of one word of every pixel
    int64_t window() const { return words() * kernel_y * kernel_x; }
    int64_t places() const { return (out_height - 1) * columns() + out_width; }
    bool reads_row(int64_t phase) const { return reads(kernel_y, dilation_y, stride_y, phase); }
    bool reads_column(int64_t phase) const { return reads(kernel_x, dilation_x, stride_x, phase); }

    // Whether windows reach into a phase: with a kernel of 1 and a stride of 2, into one of two.
    static bool reads(int64_t kernel, int64_t dilation, int64_t stride, int64_t phase) {
        for (int64_t i = 0; i < std::min(kernel, stride); ++i) {
            if (i * dilation % stride == phase) return true;
        }
        return false;
    }
};

struct Layout {
    const Shape& s;
    const ConvKernels& kernels;
    const FakeKernels& fake;
    const FakeGrid& grid;
    const float* x;
    const float *scale, *inverse;
    int shift;
    uint32_t* to;

    // The words of four channels: number `task` over all images. Whether there is a NaN in what windows read.
    bool plane(int64_t task) const {
        const int64_t word = task % s.words(), group = task / s.words() % s.groups, image = task / s.words() / s.groups;
        const int64_t first = group * s.each() + word * 4, count = std::min<int64_t>(4, (group + 1) * s.each() - first);
        const float* from = x + (image * s.channels + first) * s.height * s.width;
        uint32_t* target = to + task * s.plane();
        surround(target);
        std::vector<int64_t> rows;  // of the input, that windows read
        for (int64_t y = 0; y < s.height; ++y) {
            if (s.reads_row((y + s.top) % s.stride_y) && (y + s.top) / s.stride_y < s.rows()) rows.push_back(y);
        }
        return strips(from, count, rows, target);
    }

    // These rows of `count` channels, several at a time: quantized, and their words brought to their places.
    bool strips(const float* from, int64_t count, const std::vector<int64_t>& rows, uint32_t* target) const {
        std::vector<int64_t> phases;  // of columns, that windows read
        for (int64_t phase = 0; phase < s.stride_x; ++phase) {
            if (s.reads_column(phase)) phases.push_back(phase);
        }
        // Of a single phase only its own columns are quantized, of several all columns.
        const int64_t step = phases.size() == 1 ? s.stride_x : 1, first = step > 1 ? first_of(phases[0]) : 0;
        const int64_t width = ceil_div(s.width - first, step);
        if (width <= 0 || rows.empty()) return false;
        const int64_t strip = std::min(std::max<int64_t>(1, STRIP / width), int64_t(rows.size())), size = strip * width;
        // Not vectors, which would be filled with zeros first.
        const std::unique_ptr<float[]> levels(new float[size_t(5 * size)]);
        const std::unique_ptr<uint32_t[]> words(new uint32_t[size_t(size)]);
        float* gathered = levels.get() + 4 * size;
        bool unknown = false;
        for (int64_t i = 0; i < int64_t(rows.size()); i += strip) {
            const int64_t high = std::min(strip, int64_t(rows.size()) - i);
            const bool whole = step == 1 && rows[size_t(i + high - 1)] - rows[size_t(i)] == high - 1;
            const float* channels[4] = {};
            for (int64_t c = 0; c < count; ++c) {
                const float* channel = from + c * s.height * s.width;
                float* to = levels.get() + c * size;
                channels[c] = to;
                if (whole) quantize(channel + rows[size_t(i)] * s.width, high * width, to);
                for (int64_t r = 0; r < high && !whole; ++r) {
                    const float* row = channel + rows[size_t(i + r)] * s.width + first;
                    if (step == 1) quantize(row, width, to + r * width);
                    for (int64_t j = 0; j < width && step > 1; ++j) gathered[r * width + j] = row[j * step];
                }
                if (step > 1) quantize(gathered, high * width, to);
            }
            unknown |= kernels.interleave(channels, high * width, *inverse, shift, words.get());
            for (int64_t r = 0; r < high; ++r) {
                const int64_t y = rows[size_t(i + r)] + s.top;
                for (const int64_t phase : phases) place(words.get() + r * width, first, step, y, phase, target);
            }
        }
        return unknown;
    }

    void quantize(const float* from, int64_t count, float* to) const {
        fake.run(grid, {from, nullptr, to, F32, 0, count, scale, inverse, false, 1, 0, false, false, nullptr});
    }

    // The first column of a phase that is not padding: (column + left) % stride is the phase.
    int64_t first_of(int64_t phase) const { return (phase - s.left % s.stride_x + s.stride_x) % s.stride_x; }

    // The words of a phase of a row, `y` below the top of the padding, out of columns first, first + step, ...
    void place(const uint32_t* words, int64_t first, int64_t step, int64_t y, int64_t phase, uint32_t* target) const {
        const int64_t column = first_of(phase), across = (column + s.left) / s.stride_x, apart = s.stride_x / step;
        const int64_t count = std::min(ceil_div(s.width - column, s.stride_x), s.columns() - across);
        target += (y % s.stride_y * s.stride_x + phase) * s.phase() + y / s.stride_y * s.columns() + across;
        words += (column - first) / step;
        if (apart == 1) std::copy_n(words, std::max<int64_t>(0, count), target);
        else for (int64_t i = 0; i < count; ++i) target[i] = words[i * apart];
    }

    // Zeros everywhere, of which the rows of the input leave the padding.
    void surround(uint32_t* target) const {
        for (int64_t phase = 0; phase < s.stride_y * s.stride_x; ++phase, target += s.phase()) {
            if (!s.reads_row(phase / s.stride_x) || !s.reads_column(phase % s.stride_x)) continue;
            std::fill_n(target, s.phase(), 0x01010101u * uint32_t(shift));
        }
    }
};

struct Job {
    const Shape& s;
    const ConvKernels& kernels;
    const uint32_t* x;
    const int32_t* weight;
    std::vector<int64_t> offsets;
    std::vector<int32_t> shift;
    const float *factor, *bias;
    float* out;
    int64_t run = 0;

    // `highest` is the largest byte of x.
    void set_run(int32_t highest) {
        const int8_t* bytes = reinterpret_cast<const int8_t*>(weight);
        int32_t largest = 0;
        for (int64_t i = 0; i < s.outputs * s.window() * 4; ++i) largest = std::max<int32_t>(largest, std::abs(int32_t(bytes[i])));
        run = std::min<int64_t>(s.window(), 32767 / std::max(1, 2 * highest * largest));
    }

    void set_offsets() {
        for (int64_t word = 0; word < s.words(); ++word) {
            for (int64_t y = 0; y < s.kernel_y * s.dilation_y; y += s.dilation_y) {
                for (int64_t x = 0; x < s.kernel_x * s.dilation_x; x += s.dilation_x) {
                    const int64_t phase = y % s.stride_y * s.stride_x + x % s.stride_x;
                    const int64_t within = y / s.stride_y * s.columns() + x / s.stride_x;
                    offsets.push_back(word * s.plane() + phase * s.phase() + within);
                }
            }
        }
    }

    // What the shift of every level adds to the sums of a row.
    void set_shift(int by) {
        const int8_t* bytes = reinterpret_cast<const int8_t*>(weight);
        shift.assign(size_t(s.outputs), 0);
        for (int64_t row = 0; by && row < s.outputs; ++row) {
            int32_t sum = 0;
            for (int64_t i = 0; i < s.window() * 4; ++i) sum += bytes[row * s.window() * 4 + i];
            shift[size_t(row)] = int32_t(uint32_t(sum) * uint32_t(by));
        }
    }

    // Places [from, to) of a group of an image, number `part` of all of them.
    void strip(int64_t part, int64_t from, int64_t to) const {
        const int64_t each = s.outputs / s.groups, first = part % s.groups * each, size = s.out_height * s.out_width;
        const uint32_t* image = x + part * s.words() * s.plane();
        for (int64_t place = from; place < to; place += kernels.lanes) {
            uint64_t stored[4];
            int64_t targets[4];
            int vectors = 0;
            for (int64_t p = place; p < std::min(to, place + kernels.lanes); p += 16, ++vectors) {
                targets[vectors] = p / s.columns() * s.out_width + std::min(p % s.columns(), s.out_width);
                stored[vectors] = 0;
                for (int64_t lane = 0; lane < std::min<int64_t>(16, to - p); ++lane) {
                    stored[vectors] |= uint64_t((p + lane) % s.columns() < s.out_width) << lane;
                }
            }
            for (int64_t row = first; row < first + each; row += kernels.outputs) {
                const int rows = int(std::min<int64_t>(kernels.outputs, first + each - row));
                float* to_rows = out + (part / s.groups * s.outputs + row) * size;
                kernels.multiply({image + place, offsets.data(), s.window(), weight + row * s.window(), rows, &shift[size_t(row)],
                                  factor + row, bias ? bias + row : nullptr, stored, targets, to_rows, size, run},
                                 vectors);
            }
        }
    }
};

}  // namespace

// x is fp32 [images, channels, height, width]; weight int8 [outputs, words, kernel_y, kernel_x, 4]; factor and bias [outputs];
// out fp32 [images, outputs, out_height, out_width]. 2 where x holds a NaN: what is in `out` is then of no use.
extern "C" __attribute__((visibility("default"))) int32_t nc_integer_conv(
    const float* x, const int64_t* sizes, const float* scale, const float* levels, const float* thresholds, int32_t count,
    int32_t uniform, const int8_t* weight, const float* factor, const float* bias, float* out, int32_t threads, int32_t isa) {
    try {
        KeepDenormals keep;
        const Shape& s = *reinterpret_cast<const Shape*>(sizes);
        const ConvKernels& known = kernels(isa);
        const FakeKernels& fake = fake_kernels(isa);
        const PreparedGrid prepared(fake, levels, thresholds, count, uniform != 0);
        const float inverse = 1.0f / *scale;
        const int shift = levels[0] < 0 ? 128 : 0;
        const int64_t parts = s.images * s.groups, planes = parts * s.words();
        // Blocks read beyond the last place: up to a block, and a window's reach.
        const std::unique_ptr<uint32_t[]> words(new uint32_t[size_t(planes * s.plane() + 64)]);
        const Layout layout{s, known, fake, prepared.grid, x, scale, &inverse, shift, words.get()};
        std::atomic<bool> unknown{false};
        int32_t failed = parallel_in_team(planes, threads, [&](int64_t task) {
            if (layout.plane(task)) unknown = true;
        });
        if (failed || unknown) return failed ? failed : UNKNOWN;
        Job job{s, known, words.get(), reinterpret_cast<const int32_t*>(weight), {}, {}, factor, bias, out};
        job.set_offsets();
        job.set_shift(shift);
        job.set_run(std::max(int32_t(levels[count - 1]), 0) + shift);
        const int64_t each = BLOCKS * known.lanes, strips = ceil_div(s.places(), each);
        return parallel_in_team(parts * strips, threads, [&](int64_t task) {
            const int64_t from = task % strips * each;
            job.strip(task / strips, from, std::min(s.places(), from + each));
        });
    } catch (...) {
        return 1;
    }
}
