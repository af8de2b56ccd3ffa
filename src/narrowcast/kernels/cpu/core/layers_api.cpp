// The C ABI of a decoder's layers, for one new position of each sequence: the calls that Python would make one by one, from here.
//
// The functions, their order and their threads are the same, and so are the bits.

#include <vector>

#include "calls.h"

using namespace nc;

namespace {

// One product. Mirrors `Rows` in layers.py; so do the others.
struct Rows {
    const Spec* spec;
    const uint8_t* data;
    int64_t stride, rows;
    const void* bias;
    int64_t bias_dtype;
};

struct Norm {
    const void* weight;
    float eps;
};

// Products that share an input give its queries, keys and values, or gates and what these are multiplied by: as one or as several,
// of which those behind the last have no rows.
struct Layer {
    Norm norms[2];
    Rows project[3], out, widen[2], narrow;
    void *keys, *values;
};

// What all layers share. Activations are [batch, width], one row behind the other.
struct Step {
    int64_t dtype, batch, width, hidden;
    CacheLayout cache;
    const float* turns;
    const int64_t* places;
    int64_t tiles_from;       // the batch from which on products are tried in tiles first,
    int64_t matrix_from;      // and before that in matrix registers
    int64_t linear_grain;     // bytes of rows times vectors that are worth a thread
    int64_t attend_threads, threads, isa;
};

class Runner {
    const Step& s_;
    const int64_t element_, queries_, keys_, joined_;
    std::vector<uint8_t> normed_, parts_, mixed_, wide_, gated_;
    int32_t failed_ = 0;

    std::vector<uint8_t> room(int64_t width) const { return std::vector<uint8_t>(size_t(s_.batch * width * element_)); }
    uint8_t* column(std::vector<uint8_t>& of, int64_t at) const { return of.data() + at * element_; }

    void norm(const Norm& norm, void* x, const void* delta) {
        const int32_t dtype = int32_t(s_.dtype), isa = int32_t(s_.isa);
        failed_ |= nc_add_norm(dtype, s_.batch, s_.width, x, s_.width, delta, s_.width, norm.weight, norm.eps, x, normed_.data(), isa);
    }

    // x [batch, width] times all products, side by side in `out`.
    template <size_t COUNT>
    void multiply(const Rows (&products)[COUNT], const void* x, int64_t width, std::vector<uint8_t>& out, int64_t out_width) {
        int64_t at = 0;
        for (const Rows& one : products) {
            multiply(one, x, width, column(out, at), out_width);
            at += one.rows;
        }
    }

    void multiply(const Rows& w, const void* x, int64_t width, void* out, int64_t out_width) {
        if (w.rows == 0) return;
        const int64_t threads = w.rows * w.stride * s_.batch >= 2 * s_.linear_grain ? s_.threads : 1;
        auto by = [&](auto function) {
            return function(w.spec, w.data, w.stride, w.rows, x, int32_t(s_.dtype), width, s_.batch, w.bias, int32_t(w.bias_dtype), out, out_width,
                            int32_t(threads), int32_t(s_.isa));
        };
        int32_t failed = s_.batch >= s_.matrix_from ? by(nc_linear_matrix) : 2;
        if (failed == 2 && s_.batch >= s_.tiles_from) failed = by(nc_linear_tiles);
        if (failed == 2) failed = by(nc_linear);
        failed_ |= failed;
    }

    void attend(const Layer& layer) {
        const int64_t strides[3] = {joined_, joined_, joined_};
        failed_ |= nc_attend(int32_t(s_.dtype), &s_.cache, column(parts_, 0), column(parts_, queries_), column(parts_, queries_ + keys_), strides,
                             s_.turns, s_.places, layer.keys, layer.values, mixed_.data(), int32_t(s_.attend_threads), int32_t(s_.isa));
    }

    void gate() {
        const int64_t two = 2 * s_.hidden;
        failed_ |= nc_gate(int32_t(s_.dtype), s_.batch, s_.hidden, column(wide_, 0), two, column(wide_, s_.hidden), two, gated_.data(), int32_t(s_.isa));
    }

   public:
    explicit Runner(const Step& step)
        : s_(step), element_(step.dtype == F32 ? 4 : 2), queries_(step.cache.heads * step.cache.size),
          keys_(step.cache.key_heads * step.cache.size), joined_(queries_ + 2 * keys_), normed_(room(step.width)), parts_(room(joined_)),
          mixed_(room(queries_)), wide_(room(2 * step.hidden)), gated_(room(step.hidden)) {}

    // x + delta comes in and goes out as its two terms; delta may be null when it comes in, and then is written to `out` first.
    void run(const Layer& layer, void* x, const void* delta, void* out) {
        norm(layer.norms[0], x, delta);
        multiply(layer.project, normed_.data(), s_.width, parts_, joined_);
        attend(layer);
        multiply(layer.out, mixed_.data(), queries_, out, s_.width);
        norm(layer.norms[1], x, out);
        multiply(layer.widen, normed_.data(), s_.width, wide_, 2 * s_.hidden);
        gate();
        multiply(layer.narrow, gated_.data(), s_.hidden, out, s_.width);
    }

    int32_t failed() const { return failed_; }
};

}  // namespace

// x [batch, width] is the input of the first layer, and becomes what the last adds `delta` to.
NC_EXPORT int32_t nc_layers(const Step* step, const Layer* layers, int64_t count, void* x, void* delta) {
    try {
        Runner runner(*step);
        for (int64_t i = 0; i < count && !runner.failed(); ++i) runner.run(layers[i], x, i ? delta : nullptr, delta);
        return runner.failed();
    } catch (...) {
        return 1;
    }
}
