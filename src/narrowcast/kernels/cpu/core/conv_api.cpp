// The C ABI of exact convolutions: threads take bands of output rows, lay out their input as levels, and multiply.

#include <cmath>
#include <cstring>
#include <memory>

#include "conv_layout.h"

namespace {
using namespace nc;

constexpr int64_t STRIP = 1024;  // pixels of four channels that are quantized at a time: they stay in the first cache
constexpr int64_t BEYOND = 64;   // words behind the last one that vectors may read
constexpr int32_t UNKNOWN = 2;   // the input holds a NaN, or the grid is none of integers

const ConvKernels& kernels([[maybe_unused]] int32_t isa) {
#if defined(__x86_64__)
    if (isa == 2) return conv_avx512;
    if (isa == 1) return conv_avx2;
#endif
    return conv_plain;
}

// Levels [count] ascend, thresholds are one less. Whether bytes can stand for these levels.
bool make_grid(const float* levels, const float* thresholds, int32_t count, bool uniform, float scale, int32_t shift,
               ConvGrid& grid) {
    grid.uniform = uniform, grid.inverse = 1.0f / scale, grid.places = 0;
    grid.low = levels[0], grid.high = levels[count - 1], grid.origin = -shift;
    bool fits = grid.low >= -128.0f && grid.high + float(shift) <= 255.0f;
    if (uniform || !fits) return fits;
    for (int32_t i = 0; i + 1 < count; ++i) fits = fits && std::floor(2.0f * thresholds[i]) == 2.0f * thresholds[i];
    for (int32_t i = 0; i < count; ++i) fits = fits && std::floor(levels[i]) == levels[i];
    grid.low = count > 1 ? 2.0f * thresholds[0] : 0.0f, grid.high = count > 1 ? 2.0f * thresholds[count - 2] + 1.0f : 0.0f;
    fits = fits && grid.high - grid.low < float(sizeof grid.lookup);
    grid.origin = fits ? int32_t(grid.low) : 0, grid.places = fits ? int32_t(grid.high - grid.low) + 1 : 0;
    for (int32_t place = 0, code = 0; place < grid.places; ++place) {
        while (code + 1 < count && 2.0f * thresholds[code] < float(grid.origin + place)) ++code;
        grid.lookup[place] = uint8_t(int32_t(levels[code]) + shift);
    }
    return fits;
}

// Groups of one or two channels share words of the input: their weights move to their bytes, and zeros are left elsewhere.
std::vector<uint32_t> share_words(ConvSizes& s, const int8_t* weight) {
    const int64_t count = s.sharing(), each = s.channels / s.groups, window = s.kernel_y * s.kernel_x;
    std::vector<uint32_t> shared(count > 1 ? size_t(s.outputs * window) : 0);
    if (count > 1) std::memcpy(shared.data(), weight, shared.size() * 4);
    for (size_t i = 0; i < shared.size(); ++i) {
        const int64_t group = int64_t(i) / (s.outputs / s.groups * window);
        shared[i] <<= 8 * each * (group % count);
    }
    s.groups /= count;
    return shared;
}

// The weights of all outputs, and what follows from them.
struct Weights {
    std::unique_ptr<int32_t[]> widened;
    const int32_t* rows;
    int64_t row;  // words from one to the next
    std::vector<int32_t> shift;
    int64_t run = 0;

    // `highest` is the largest byte of x, and `by` what was added to its levels.
    Weights(const ConvKernels& known, const int8_t* weight, int64_t outputs, int64_t window, int32_t by, int32_t highest)
        : rows(reinterpret_cast<const int32_t*>(weight)), row(window), shift(size_t(outputs), 0) {
        int32_t largest = 1;
        for (int64_t i = 0; i < outputs; ++i) {
            int32_t sum, of_row;
            known.measure(weight + i * window * 4, window * 4, sum, of_row);
            largest = std::max(largest, of_row);
            shift[size_t(i)] = int32_t(uint32_t(sum) * uint32_t(by));
        }
        if (!known.least_run) return;
        run = std::min<int64_t>(window, 32767 / std::max(1, 2 * highest * largest));
        if (run >= std::min(window, known.least_run)) return;
        run = 0, row = 2 * window;
        widened.reset(new int32_t[size_t(outputs * row)]);
        known.widen(weight, outputs * window, widened.get());
        rows = widened.get();
    }
};

// Of a phase of columns: its slot, and which of its words come from pixels of a row: word j from pixel j * stride + start.
struct Columns {
    int64_t slot, start, from, until;

    static std::vector<Columns> of(const ConvAxis& x, int64_t columns) {
        std::vector<Columns> found;
        for (int64_t slot = 0; slot < x.phases(); ++slot) {
            const int64_t start = x.phase(slot) - x.before, from = start < 0 ? ceil_div(-start, x.stride) : 0;
            const int64_t until = std::min(columns, start < x.size ? ceil_div(x.size - start, x.stride) : 0);
            if (x.slot(x.phase(slot)) == slot && from < until) found.push_back({slot, start, from, until});
        }
        return found;
    }
};

struct Job {
    const ConvLayout& l;
    const ConvKernels& known;
    const ConvGrid& grid;
    const Weights& weights;
    std::vector<int64_t> offsets, slots;  // slots of phases of rows
    std::vector<Columns> columns;
    int32_t shift;
    const float *x, *factor, *bias;
    float* out;

    // Number `task` of all bands of all images. Whether there is a NaN in what it reads.
    bool band(int64_t task) const {
        const int64_t image = task / l.bands(), first = task % l.bands() * l.rows;
        const int64_t count = std::min(l.rows, l.y.outputs - first), size = l.groups * l.per_group() + BEYOND;
        // Not vectors, which would be filled with zeros first.
        const std::unique_ptr<uint32_t[]> levels(new uint32_t[size_t(size)]);
        const std::unique_ptr<uint32_t[]> strip(new uint32_t[size_t(std::max(STRIP, l.x.size))]);
        if (l.padded()) std::memset(levels.get(), shift, size_t(size) * 4);
        for (int64_t group = 0; group < l.groups; ++group) {
            for (int64_t word = 0; word < l.words(); ++word) {
                const int64_t channel = group * l.each() + word * 4, end = std::min(channel + 4, (group + 1) * l.each());
                uint32_t* to = levels.get() + group * l.per_group() + word * l.word;
                if (lay_out(image * l.channels + channel, end - channel, first, count, strip.get(), to)) return true;
            }
        }
        multiply(image, first, count, levels.get());
        return false;
    }

    // The rows that windows of output rows [first, first + count) read, of `channels` channels.
    bool lay_out(int64_t channel, int64_t channels, int64_t first, int64_t count, uint32_t* strip, uint32_t* to) const {
        const int64_t above = first * l.y.stride - l.y.before, size = l.y.size * l.x.size;
        const int64_t end = std::min(l.y.size, above + l.y.last(count - 1) + 1);
        const int64_t most = thin() ? 1 : std::max<int64_t>(1, STRIP / l.x.size);
        bool unknown = false;
        for (int64_t y = std::max<int64_t>(0, above); y < end;) {
            int64_t next = y;  // rows [y, next) are read
            while (next < end && next - y < most && slots[size_t((next - above) % l.y.stride)] >= 0) ++next;
            const float* rows[4] = {};
            for (int64_t c = 0; c < channels; ++c) rows[c] = x + (channel + c) * size + y * l.x.size;
            if (next > y && thin()) unknown |= place_thin(rows, y - above, to);
            else if (next > y) unknown |= known.quantize(grid, rows, (next - y) * l.x.size, strip);
            for (int64_t r = y; r < next && !thin(); ++r) place(strip + (r - y) * l.x.size, r - above, to);
            y = std::max(next, y + 1);
        }
        return unknown;
    }

    // Whether windows read few pixels of a row: one phase of several.
    bool thin() const { return columns.size() == 1 && l.x.stride > 1; }

    int64_t place_of_row(int64_t down) const {
        return down / l.y.stride * l.row + slots[size_t(down % l.y.stride)] * l.phase_y;
    }

    // A row, `down` below the band's first one, of which only the pixels that are read are quantized.
    bool place_thin(const float* const rows[4], int64_t down, uint32_t* to) const {
        const Columns& c = columns[0];
        const int64_t count = c.until - c.from, stride = l.x.stride;
        const std::unique_ptr<float[]> pixels(new float[size_t(4 * count)]);
        const float* gathered[4] = {};
        for (int i = 0; i < 4 && rows[i]; ++i) {
            const float* from = rows[i] + c.from * stride + c.start;
            float* channel = pixels.get() + i * count;
            if (stride == 2) for (int64_t j = 0; j < count; ++j) channel[j] = from[2 * j];
            else for (int64_t j = 0; j < count; ++j) channel[j] = from[stride * j];
            gathered[i] = channel;
        }
        return known.quantize(grid, gathered, count, to + place_of_row(down) + c.slot * l.phase_x + c.from);
    }

    // The words of a row, `down` below the band's first one, phase by phase.
    void place(const uint32_t* words, int64_t down, uint32_t* to) const {
        const int64_t stride = l.x.stride;
        to += place_of_row(down);
        for (const Columns& c : columns) {
            uint32_t* target = to + c.slot * l.phase_x;
            if (stride == 1) std::memcpy(target + c.from, words + c.from + c.start, size_t(c.until - c.from) * 4);
            else if (stride == 2) for (int64_t j = c.from; j < c.until; ++j) target[j] = words[2 * j + c.start];
            else for (int64_t j = c.from; j < c.until; ++j) target[j] = words[stride * j + c.start];
        }
    }

    void multiply(int64_t image, int64_t first, int64_t count, const uint32_t* levels) const {
        const ConvPlaces places(l, count, known.lanes);
        const int64_t each = l.outputs / l.groups, size = l.y.outputs * l.x.outputs;
        for (int64_t group = 0; group < l.groups; ++group) {
            const int64_t row = group * each;
            known.multiply({levels + group * l.per_group(), int64_t(places.places.size()), places.places.data(),
                            places.stored.data(), places.targets.data(), offsets.data(), l.window(),
                            weights.rows + row * weights.row, each, &weights.shift[size_t(row)], factor + row,
                            bias ? bias + row : nullptr, out + (image * l.outputs + row) * size + first * l.x.outputs, size,
                            weights.run});
        }
    }
};

}  // namespace

// x is fp32 [images, channels, height, width]; weight int8 [outputs, words, kernel_y, kernel_x, 4]; factor and bias [outputs];
// out fp32 [images, outputs, out_height, out_width]. 2 where x holds a NaN, or the grid is none of integers with thresholds
// half way between them: what is in `out` is then of no use.
extern "C" __attribute__((visibility("default"))) int32_t nc_integer_conv(
    const float* x, const int64_t* sizes, const float* scale, const float* levels, const float* thresholds, int32_t count,
    int32_t uniform, const int8_t* weight, const float* factor, const float* bias, float* out, int32_t threads, int32_t isa) {
    try {
        KeepDenormals keep;
        const ConvKernels& known = kernels(isa);
        const int32_t shift = levels[0] < 0 ? -int32_t(levels[0]) : 0;
        ConvGrid grid;
        if (!make_grid(levels, thresholds, count, uniform != 0, *scale, shift, grid)) return UNKNOWN;
        ConvSizes s = *reinterpret_cast<const ConvSizes*>(sizes);
        const std::vector<uint32_t> shared = share_words(s, weight);
        if (!shared.empty()) weight = reinterpret_cast<const int8_t*>(shared.data());
        const ConvLayout layout(s, known.lanes, threads);
        const int32_t highest = int32_t(levels[count - 1]) + shift;
        const Weights weights(known, weight, layout.outputs, layout.window(), shift, highest);
        const Job job{layout, known, grid, weights, layout.offsets(), layout.y.slots(),
                      Columns::of(layout.x, layout.columns), shift, x, factor, bias, out};
        std::atomic<bool> unknown{false};
        const int32_t failed = parallel_in_team(layout.images * layout.bands(), threads, [&](int64_t task) {
            if (!unknown && job.band(task)) unknown = true;
        });
        return failed ? failed : unknown ? UNKNOWN : 0;
    } catch (...) {
        return 1;
    }
}
