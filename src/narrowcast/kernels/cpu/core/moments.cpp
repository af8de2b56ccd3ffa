// A step of AdamW on part of a row, between the rows that hold its moments. Compiled once per instruction set (NC_ISA).
//
// What it does is written in kernels/moments.py and kernels/reference/moments.py; the first moment's rows are decoded and
// encoded by the kernels of all codecs, the second's here.

#include "moments.h"

#include "codes.h"

namespace {
using namespace nc;

constexpr int SHIFT = 20, MANTISSA = 3, TOP = 255;

// n second moments of one block.
inline void decode_second(const uint8_t* __restrict codes, uint8_t exponent, int64_t n, float* __restrict v) {
    const float scale = exponent == 255 ? as<float>(0x7FC00000u) : as<float>(uint32_t(exponent) << 23);
    for (int64_t i = 0; i < n; ++i) {
        const int32_t code = codes[i];
        const uint32_t level = code ? uint32_t(code + ((127 << MANTISSA) - TOP)) << SHIFT : 0u;
        v[i] = as<float>(level) * scale;
    }
}

inline uint8_t encode_second(const float* __restrict v, int64_t n, const int32_t* __restrict draws, uint8_t* __restrict codes) {
    int32_t top = 0;
    for (int64_t i = 0; i < n; ++i) top = std::max(top, int32_t(as<uint32_t>(v[i]) & 0x7FFFFFFFu));
    if (top >= 0x7F800000) {
        std::memset(codes, 0, size_t(n));
        return 255;
    }
    const int32_t exponent = std::min(std::max((top >> 23) + 1, 1), 253);
    const float inverse = as<float>(uint32_t(254 - exponent) << 23);
    for (int64_t i = 0; i < n; ++i) {
        const float y = v[i] * inverse;
        int32_t code = ((int32_t(as<uint32_t>(y)) + draws[i]) >> SHIFT) + (TOP - (127 << MANTISSA));
        code = code < 1 ? 1 : code;
        code = code > TOP ? TOP : code;
        codes[i] = uint8_t(v[i] > 0.0f ? code : 0);
    }
    return uint8_t(exponent);
}

void gradient_step(const Step& s, const float* __restrict g, float* __restrict m, float* __restrict v, float* __restrict p,
                   int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        m[i] = m[i] * s.beta1 + g[i] * s.take1;
        v[i] = v[i] * s.beta2 + (g[i] * s.take2) * g[i];
        p[i] = p[i] * s.decay - (m[i] / (std::sqrt(v[i]) * s.correction + s.eps)) * s.size;
    }
}

void momentum_step(const Step& s, const float* __restrict m, const float* __restrict v, float* __restrict p, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = p[i] * s.decay - (m[i] / (std::sqrt(v[i]) * s.correction + s.eps)) * s.size;
}

void adamw(const Kernels& k, const Spec& first, const Spec& second, const Moments& at, int64_t begin, int64_t count,
           float* scratch) {
    const int64_t room = (count + 15) / 16 * 16;
    float *m = scratch, *v = m + room, *p = v + room, *gradient = p + room;
    int32_t* draws = reinterpret_cast<int32_t*>(gradient + room);
    const float* g = load(at.grad, begin, count, gradient);
    const float* before = load(at.parameter, begin, count, p);
    if (before != p) std::memcpy(p, before, size_t(count) * 4);
    uint8_t *codes = at.second + begin, *exponents = at.second + second.scales_offset;
    const int64_t size = second.block_size;
    for (int64_t i = 0; i < count; i += size) {
        decode_second(codes + i, exponents[(begin + i) / size], std::min(size, count - i), v + i);
    }
    if (at.takes_momentum) {
        momentum_step(at.step, g, v, p, count);
    } else {
        k.decode(first, at.first, begin, count, m - begin, F32);
        gradient_step(at.step, g, m, v, p, count);
        // Draws of 20 bits instead of numbers in [0, 1): what `(draws * 2**20).to(int32)` is in the reference.
        Dice{at.second_key}.roll_as(begin, draws, count, [](uint32_t bits) { return int32_t(bits >> 12); });
        for (int64_t i = 0; i < count; i += size) {
            exponents[(begin + i) / size] = encode_second(v + i, std::min(size, count - i), draws + i, codes + i);
        }
    }
    if (first.element == FP32) {  // the others have one NaN anyway
        for (int64_t i = 0; i < count; ++i) m[i] = canonical(at.takes_momentum ? g[i] : m[i]);
    }
    const Floats moment{at.takes_momentum && first.element != FP32 ? g : m, F32, begin};
    if (first.scale == NO_SCALE) k.quantize(first, moment, begin, count, Scaling{1.0f, 1.0f, 0}, at.first, at.first_key);
    else k.encode(first, moment, begin, count, at.first, at.first_key);
    for (int64_t i = 0; i < count; ++i) p[i] = canonical(p[i]);
    store(p, const_cast<void*>(at.parameter.data), at.parameter.dtype, begin, count);
}

}  // namespace

namespace nc {
void NC_NAMED_BY_ISA(adamw)(const Kernels& k, const Spec& first, const Spec& second, const Moments& at, int64_t begin,
                            int64_t count, float* scratch) {
    ::adamw(k, first, second, at, begin, count, scratch);
}
}  // namespace nc
