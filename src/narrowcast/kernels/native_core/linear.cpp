// x W^T + bias with W as encoded rows: four rows at a time, as floats in registers. Compiled once per instruction set.
//
// The sum of one output is that of LANES lanes. In a lane, the products of one group's codes with x are added up in order,
// then the sum times the scale is added to the total; at the end lanes are added in halves. Nothing in this depends on
// the batch, on the other rows or on threads. Unlike in the rest of the core, products and sums may be fused: x times a
// code rounds once.
//
// Groups that do not fill vectors (blocks of 24), tables of huge or tiny levels, and rows with infinities in fp8 or steps
// near the largest number take the plain way: decoded into a buffer, then multiplied.

#include <memory>
#include <utility>
#include <vector>

#include "linear_codes.h"

namespace {

constexpr int ROWS = 4;              // rows whose sums run side by side, so that additions need not wait for each other
constexpr int64_t SPAN = 1024;       // elements decoded at a time on the plain way
constexpr float MANY = 0x1p64f;      // from this magnitude on x is multiplied with 2^-64 first: a code times x must be finite

// How a row is cut into steps, and steps into flushes of sums into totals.
struct Steps {
    bool direct;          // whether codes are multiplied as they are; if not, x is only widened
    int64_t size;         // elements of a step
    int64_t whole, all;   // steps in a row without and with a partial last one
    int64_t flush;        // steps whose sums share their scales
    int64_t groups;       // scales that a flush takes: one for all lanes, or several
    int64_t per_lane;     // EACH, or 1

    template <class Code>
    static Steps of(const Spec& spec) {
        const int64_t size = Code::EACH * LANES, block = spec.group_size ? spec.group_size : spec.numel;
        const bool whole = block % size == 0 || block >= spec.numel, shared = size % block == 0 && block % Code::EACH == 0;
        const bool moderate = spec.step > 0x1p-40f && spec.step < 0x1p40f;
        const int64_t all = (spec.numel + size - 1) / size;
        Steps steps{(whole || shared) && moderate, size, spec.numel / size, all, 1, 1, Code::EACH};
        if (block >= spec.numel) steps.flush = all;
        else if (whole) steps.flush = block / size;
        else steps.groups = size / block;
        return steps;
    }

    static Steps of(const Spec& spec) {
        Steps steps;
        with_code(spec, [&](const auto& code) { steps = of<std::decay_t<decltype(code)>>(spec); });
        return steps;
    }
};

// -- x, ready to be multiplied: fp32, in the order in which vectors of codes come, zeros behind its end -----------------------

// One step of x, times `by`: element EACH i + j goes to lane i of vector j. Pairs are parted EACH / 2 times over, in loops that
// vectorise: after all passes what began at j lies at the reverse of j's bits, which the last copy puts right.
template <int EACH>
void deal_as(const float* from, float by, float* out) {
    constexpr int SIZE = EACH * LANES;
    alignas(64) float a[SIZE], b[SIZE];
    for (int i = 0; i < SIZE; ++i) a[i] = from[i] * by;
    float *now = a, *next = b;
    for (int part = SIZE; part > LANES; part /= 2) {
        for (int at = 0; at < SIZE; at += part) {
            for (int i = 0; i < part / 2; ++i) {
                next[at + i] = now[at + 2 * i];
                next[at + part / 2 + i] = now[at + 2 * i + 1];
            }
        }
        std::swap(now, next);
    }
    for (int j = 0; j < EACH; ++j) {
        int reversed = 0;
        for (int bit = 1; bit < EACH; bit *= 2) reversed = 2 * reversed + (j & bit ? 1 : 0);
        std::memcpy(out + j * LANES, now + reversed * LANES, WIDTH);
    }
}

void deal(const float* from, float by, int64_t each, float* out) {
    switch (each) {
        case 1: return deal_as<1>(from, by, out);
        case 2: return deal_as<2>(from, by, out);
        case 4: return deal_as<4>(from, by, out);
        case 8: return deal_as<8>(from, by, out);
        case 16: return deal_as<16>(from, by, out);
        default: return deal_as<32>(from, by, out);
    }
}

void prepare(const Spec& spec, Floats x, float* out, float* gain) {
    const Steps steps = Steps::of(spec);
    std::unique_ptr<float[]> buffer(x.dtype == F32 ? nullptr : new float[size_t(spec.numel)]);
    const float* from = load(x, 0, spec.numel, buffer.get());
    uint32_t most = 0;
    for (int64_t i = 0; i < spec.numel; ++i) most = std::max(most, as<uint32_t>(from[i]) & 0x7FFFFFFFu);
    const float by = steps.direct && most >= as<uint32_t>(MANY) ? 1.0f / MANY : 1.0f;
    *gain = 1.0f / by;
    const int64_t each = steps.direct ? steps.per_lane : 1, size = each * LANES;
    int64_t i = 0;
    for (; i + size <= spec.numel; i += size) deal(from + i, by, each, out + i);
    if (i == spec.numel) return;
    alignas(64) float last[32 * LANES] = {};
    std::memcpy(last, from + i, size_t(spec.numel - i) * 4);
    deal(last, by, each, out + i);
}

int64_t prepared(const Spec& spec) {
    const Steps steps = Steps::of(spec);
    return steps.all * steps.size;
}

// -- scales as floats ---------------------------------------------------------------------------------------------------------

void read_scales(const Spec& spec, const uint8_t* data, float* scales, float* zeros) {
    const uint8_t* at = data + spec.scales_offset;
    const int64_t n = spec.groups;
    const Half16* halves = reinterpret_cast<const Half16*>(at);
    switch (spec.scale) {
        case NO_SCALE: scales[0] = 1.0f; break;
        case SCALE_FP32: std::memcpy(scales, at, size_t(n) * 4); break;
        case SCALE_FP16: widen_half(halves, scales, n); break;
        case SCALE_BF16:
            for (int64_t i = 0; i < n; ++i) scales[i] = as<float>(uint32_t(halves[i]) << 16);
            break;
        default:
            for (int64_t i = 0; i < n; ++i) scales[i] = at[i] == 255 ? NOT_A_NUMBER : as<float>(uint32_t(at[i]) << 23);
    }
    if (spec.element != AFFINE) return;
    for (int64_t i = 0; i < n; ++i) zeros[i] = float(data[spec.zeros_offset + i]);
}

// Four rows and what is read of them before their codes.
struct Block {
    const uint8_t* row[ROWS];
    alignas(64) uint8_t tail[ROWS][64];  // the codes of a partial last step, then zeros
    std::vector<float> scales, zeros;
    int64_t stride;                      // of scales, with room to read a vector from any of them
    bool plain[ROWS];                    // rows to be done the plain way after all

    explicit Block(const Spec& spec) : stride(spec.groups + LANES) {
        scales.resize(size_t(ROWS * stride));
        if (spec.element == AFFINE) zeros.resize(size_t(ROWS * stride));
    }

    void take(const Spec& spec, const Steps& steps, const uint8_t* data, int64_t step, int64_t rows, int64_t step_bytes) {
        for (int r = 0; r < ROWS; ++r) {
            plain[r] = false;
            row[r] = data + std::min<int64_t>(r, rows - 1) * step;
            float* scale = &scales[size_t(r * stride)];
            read_scales(spec, row[r], scale, zeros.empty() ? nullptr : &zeros[size_t(r * stride)]);
            if (spec.element == AFFINE) {  // where a product passes the largest number, decoding cuts it
                for (int64_t i = 0; i < spec.groups; ++i) plain[r] |= scale[i] > 0x1p119f;
            }
            if (steps.all == steps.whole) continue;
            const int64_t done = steps.whole * step_bytes;
            std::memset(tail[r], 0, 64);
            std::memcpy(tail[r], row[r] + done, size_t(spec.codes_bytes - done));
        }
    }
};

// -- four rows times BATCH vectors ----------------------------------------------------------------------------------------------

template <class Code, int BATCH>
struct Sums {
    Vector sum[ROWS][BATCH], total[ROWS][BATCH], zero[ROWS];
    Bits odd[ROWS];

    template <int J>
    NC_FORCED void column(const Code& code, const Bits (&words)[ROWS], const float* x, int64_t x_stride) {
        Vector weight[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            weight[r] = code.template value<J>(words[r]);
            if (Code::AFFINE_CODES) weight[r] -= zero[r];
        }
#pragma GCC unroll 4
        for (int b = 0; b < BATCH; ++b) {
            const Vector some = read<Vector>(x + b * x_stride + J * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sum[r][b] += weight[r] * some;
        }
    }

    template <int... J>
    NC_FORCED void step(const Code& code, const uint8_t* const (&at)[ROWS], const float* x, int64_t x_stride,
                        std::integer_sequence<int, J...>) {
        Bits words[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            words[r] = code.words(at[r]);
            if constexpr (Code::CHECKED) odd[r] |= code.odd(words[r]);
        }
        (column<J>(code, words, x, x_stride), ...);
    }
};

NC_FORCED Vector for_lanes(const float* at, bool several, Bits lanes) {
    return several ? pick(read<Vector>(at), lanes) : every(*at);
}

template <class Code, int BATCH>
__attribute__((noinline)) void multiply(const Code& code, const Steps& steps, Block& block, const float* x, int64_t x_stride, float* y, int64_t ahead) {
    Sums<Code, BATCH> sums{};
    Bits lanes{};
    for (int i = 0; i < LANES; ++i) lanes[i] = uint32_t(i * steps.groups / LANES);
    const bool several = steps.groups > 1;
    int64_t step = 0;
    for (int64_t group = 0; step < steps.all; group += steps.groups) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            if (Code::AFFINE_CODES) sums.zero[r] = for_lanes(&block.zeros[size_t(r * block.stride + group)], several, lanes);
#pragma GCC unroll 4
            for (int b = 0; b < BATCH; ++b) sums.sum[r][b] = Vector{};
        }
        for (const int64_t end = std::min(step + steps.flush, steps.all); step < end; ++step) {
            const uint8_t* at[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                at[r] = step < steps.whole ? block.row[r] + step * Code::BYTES : block.tail[r];
                __builtin_prefetch(at[r] + ahead, 0, 2);
            }
            sums.step(code, at, x + step * steps.size, x_stride, std::make_integer_sequence<int, Code::EACH>());
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const Vector scale = for_lanes(&block.scales[size_t(r * block.stride + group)], several, lanes);
#pragma GCC unroll 4
            for (int b = 0; b < BATCH; ++b) sums.total[r][b] += scale * sums.sum[r][b];
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int b = 0; b < BATCH; ++b) y[b * ROWS + r] = sum_lanes(sums.total[r][b]);
        if constexpr (Code::CHECKED) {
            for (int i = 0; i < LANES; ++i) block.plain[r] |= (sums.odd[r][i] & 0x80808080u) != 0;
        }
    }
}

// -- the plain way ------------------------------------------------------------------------------------------------------------------

float dot(const float* a, const float* b, int64_t n) {
    Vector sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        for (int j = 0; j < 4; ++j) sums[j] += read<Vector>(a + i + j * LANES) * read<Vector>(b + i + j * LANES);
    }
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// One row's outputs into y[0], y[ROWS], ...; each batch's x is at x + b * x_stride, as it came or widened.
void plainly(const Spec& spec, const Product& product, const uint8_t* row, Floats x, int64_t x_stride, float* y) {
    alignas(64) float weights[SPAN], buffer[SPAN];
    const int64_t size = x.dtype == F32 ? 4 : 2;
    for (int64_t b = 0; b < product.batch; ++b) y[b * ROWS] = 0.0f;
    for (int64_t begin = 0; begin < spec.numel; begin += SPAN) {
        const int64_t n = std::min(SPAN, spec.numel - begin);
        // `decode` writes element i of the row to out[i].
        product.decode(spec, row, begin, n, weights - begin, F32);
        for (int64_t b = 0; b < product.batch; ++b) {
            const Floats some{static_cast<const uint8_t*>(x.data) + b * x_stride * size, x.dtype};
            y[b * ROWS] += dot(weights, load(some, begin, n, buffer), n);
        }
    }
}

// -- results ------------------------------------------------------------------------------------------------------------------------

// Rounded to nearest even, past the largest number to infinity, as torch does.
void put_result(float y, void* out, int32_t dtype, int64_t at) {
    if (dtype == F32) {
        static_cast<float*>(out)[at] = y;
        return;
    }
    const uint32_t bits = as<uint32_t>(y), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
    uint32_t code = dtype == F16 ? Half::narrow(y) : Brain::narrow(y);
    const uint32_t beyond = dtype == F16 ? 0x477FF000u : 0x7F7F8000u, infinity = dtype == F16 ? 0x7C00u : 0x7F80u;
    if (magnitude >= beyond && magnitude <= 0x7F800000u) code = infinity | sign;
    static_cast<Half16*>(out)[at] = uint16_t(code);
}

void finish(const Product& product, int64_t first, int64_t rows, const float* y) {
    float bias[ROWS] = {}, buffer[ROWS];
    if (product.bias.data) std::memcpy(bias, load(product.bias, first, rows, buffer), size_t(rows) * 4);
    for (int64_t b = 0; b < product.batch; ++b) {
        for (int64_t r = 0; r < rows; ++r) {
            const float value = product.bias.data ? y[b * ROWS + r] + bias[r] : y[b * ROWS + r];
            put_result(value, product.out, product.x.dtype, b * product.out_stride + first + r);
        }
    }
}

template <class Code>
void direct_rows(const Code& code, const Spec& spec, const Product& product, int64_t first, int64_t end) {
    const Steps steps = Steps::of<Code>(spec);
    const int64_t length = steps.all * steps.size, ahead = ROWS * product.stride;
    Block block(spec);
    std::vector<float> y(size_t(product.batch * ROWS));
    for (int64_t row = first; row < end; row += ROWS) {
        const int64_t rows = std::min<int64_t>(ROWS, end - row);
        block.take(spec, steps, product.data + row * product.stride, product.stride, rows, Code::BYTES);
        for (int64_t b = 0; b < product.batch;) {
            const float* x = product.prepared + b * length;
            const int64_t left = product.batch - b;
            if (left >= 4) multiply<Code, 4>(code, steps, block, x, length, &y[size_t(b * ROWS)], ahead);
            else if (left >= 2) multiply<Code, 2>(code, steps, block, x, length, &y[size_t(b * ROWS)], ahead);
            else multiply<Code, 1>(code, steps, block, x, length, &y[size_t(b * ROWS)], ahead);
            b += left >= 4 ? 4 : left >= 2 ? 2 : 1;
        }
        for (int64_t b = 0; b < product.batch; ++b) {
            for (int r = 0; r < ROWS; ++r) y[size_t(b * ROWS + r)] *= product.gain[b];
        }
        for (int r = 0; r < rows; ++r) {
            if (block.plain[r]) plainly(spec, product, block.row[r], product.x, product.x_stride, &y[size_t(r)]);
        }
        finish(product, row, rows, y.data());
    }
}

void linear(const Spec& spec, const Product& product, int64_t first, int64_t end) {
    const Steps steps = Steps::of(spec);
    if (steps.direct) {
        return with_code(spec, [&](const auto& code) { direct_rows(code, spec, product, first, end); });
    }
    const int64_t length = steps.all * steps.size;
    std::vector<float> y(size_t(product.batch * ROWS));
    for (int64_t row = first; row < end; ++row) {
        plainly(spec, product, product.data + row * product.stride, Floats{product.prepared, F32}, length, y.data());
        finish(product, row, 1, y.data());
    }
}

}  // namespace

#define NC_PASTE(a, b) a##b
#define NC_NAMED(isa) NC_PASTE(multiplier_, isa)

namespace nc {
extern const Multiplier NC_NAMED(NC_ISA);
const Multiplier NC_NAMED(NC_ISA) = {::prepared, ::prepare, ::linear};
}  // namespace nc
