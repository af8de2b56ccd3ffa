// Where a convolution finds its input: rows of words, in bands that stay in the second-level cache.

#pragma once
#include <algorithm>
#include <vector>

#include "conv.h"
#include "threads.h"

namespace nc {

// What windows read along one dimension, counted from the start of the padding.
struct ConvAxis {
    int64_t size, kernel, stride, dilation, before, outputs;

    // Pixels whose distances are multiples of the stride are a phase. With a kernel of 1, windows read one phase of many.
    int64_t phases() const { return std::min(kernel, stride); }
    int64_t phase(int64_t i) const { return i * dilation % stride; }  // of those that are read; repeated where they are fewer
    int64_t reach() const { return (kernel - 1) * dilation / stride; }  // of a window, in pixels of a phase
    int64_t last(int64_t output) const { return output * stride + (kernel - 1) * dilation; }
    bool padded() const { return before > 0 || last(outputs - 1) >= before + size; }

    // The number of a phase among those that are read, or -1.
    int64_t slot(int64_t wanted) const {
        for (int64_t i = 0; i < phases(); ++i) {
            if (phase(i) == wanted) return i;
        }
        return -1;
    }
    std::vector<int64_t> slots() const {  // of all phases
        std::vector<int64_t> found;
        for (int64_t i = 0; i < stride; ++i) found.push_back(slot(i));
        return found;
    }
};

// Sizes of a convolution; mirrored by `conv_sizes` in spec.py.
struct ConvSizes {
    int64_t images, channels, height, width;
    int64_t outputs, kernel_y, kernel_x, stride_y, stride_x, dilation_y, dilation_x;
    int64_t left, top, out_height, out_width, groups;

    // Groups whose channels fit one word together.
    int64_t sharing() const {
        const int64_t each = channels / groups;
        for (int64_t count = std::min<int64_t>(groups, 4 / each); count > 1; --count) {
            if (groups % count == 0) return count;
        }
        return 1;
    }
};

// A band of output rows, and the words that its windows read: of each group, and in it of each row, phase and word.
struct ConvLayout {
    static constexpr int64_t ROOM = 1 << 15;  // words of a band: 128 KB of the second-level cache
    static constexpr int64_t LONG = 14;       // pixels that are enough for a row

    int64_t images, channels, outputs, groups;
    ConvAxis y, x;
    int64_t rows, columns;           // of outputs in a band; of words in a row
    int64_t row, phase_y, phase_x, word;  // strides
    bool flat;                       // vectors run on over the ends of rows, whose last lanes are not stored

    ConvLayout(const ConvSizes& s, int lanes, int64_t threads)
        : images(s.images), channels(s.channels), outputs(s.outputs), groups(s.groups),
          y{s.height, s.kernel_y, s.stride_y, s.dilation_y, s.top, s.out_height},
          x{s.width, s.kernel_x, s.stride_x, s.dilation_x, s.left, s.out_width} {
        merge_rows();
        columns = x.outputs + x.reach();
        const int64_t bands = std::max(ceil_div(y.outputs, std::max<int64_t>(1, ROOM / (per_row() * groups))),
                                       threads > 1 ? ceil_div(2 * threads, images) : 1);
        rows = ceil_div(y.outputs, std::min(bands, y.outputs));
        flat = 10 * ceil_div((rows - 1) * columns + x.outputs, lanes) < 9 * rows * ceil_div(x.outputs, lanes);
        row = flat ? columns : per_row();
        word = flat ? (rows + y.reach()) * columns : columns;
        phase_x = words() * word;
        phase_y = x.phases() * phase_x;
    }

    int64_t each() const { return channels / groups; }
    int64_t words() const { return ceil_div(each(), 4); }  // of a pixel
    int64_t window() const { return words() * y.kernel * x.kernel; }
    int64_t per_row() const { return y.phases() * x.phases() * words() * columns; }
    int64_t per_group() const { return (rows + y.reach()) * per_row(); }
    int64_t bands() const { return ceil_div(y.outputs, rows); }
    bool padded() const { return y.padded() || x.padded(); }

    // From the first word of a place to each word of its window, in the order of weights.
    std::vector<int64_t> offsets() const {
        std::vector<int64_t> found;
        found.reserve(size_t(window()));
        for (int64_t w = 0; w < words(); ++w) {
            for (int64_t i = 0; i < y.kernel; ++i) {
                for (int64_t j = 0; j < x.kernel; ++j) {
                    const int64_t down = i * y.dilation / y.stride * row + y.slot(y.phase(i)) * phase_y;
                    const int64_t across = j * x.dilation / x.stride + x.slot(x.phase(j)) * phase_x;
                    found.push_back(down + across + w * word);
                }
            }
        }
        return found;
    }

   private:
    // Where windows are pixels, rows follow each other without a gap: several make one that fills more vectors.
    void merge_rows() {
        if (y.kernel * x.kernel * y.stride * x.stride != 1 || padded()) return;
        int64_t together = 1;
        while (together < y.size && (y.size % together || x.size * together < LONG)) ++together;
        y.size = y.outputs = y.size / together, x.size = x.outputs = x.size * together;
    }
};

// The vectors of `count` output rows.
struct ConvPlaces {
    std::vector<int64_t> places, targets;
    std::vector<uint32_t> stored;

    ConvPlaces(const ConvLayout& l, int64_t count, int lanes) {
        const int64_t width = l.x.outputs;
        for (int64_t at = 0, all = (count - 1) * l.columns + width; l.flat && at < all; at += lanes) {
            uint32_t which = 0;
            for (int64_t i = 0; i < std::min<int64_t>(lanes, all - at); ++i) which |= uint32_t((at + i) % l.columns < width) << i;
            add(at, at / l.columns * width + std::min(at % l.columns, width), which);
        }
        const uint32_t which = uint32_t((uint64_t(1) << std::min<int64_t>(lanes, width)) - 1);
        for (int64_t row = 0; row < count && !l.flat; ++row) {
            for (int64_t at = 0; at < width; at += lanes) {  // the last vector lies over the one before, rather than the end
                const int64_t start = std::max<int64_t>(0, std::min(at, width - lanes));
                add(row * l.row + start, row * width + start, which);
            }
        }
    }

   private:
    void add(int64_t place, int64_t target, uint32_t which) {
        places.push_back(place), targets.push_back(target), stored.push_back(which);
    }
};

}  // namespace nc
