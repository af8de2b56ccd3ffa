// x, ready to be multiplied: fp32, in the order in which vectors of codes come, zeros behind its end.

#pragma once
#include <memory>

#include "linear_bytes.h"
#include "linear_pairs.h"

namespace {

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
#if defined(__AVX512BF16__)
    if (steps.direct && exact_pairs(spec, x.dtype)) return prepare_pairs(spec, steps, x.data, out, gain);
#endif
    std::unique_ptr<float[]> buffer(x.dtype == F32 ? nullptr : new float[size_t(spec.numel)]);
    const float* from = load(x, 0, spec.numel, buffer.get());
    uint32_t most = 0;
    for (int64_t i = 0; i < spec.numel; ++i) most = std::max(most, as<uint32_t>(from[i]) & 0x7FFFFFFFu);
#if defined(__AVX512VNNI__)
    const float fixed = fixed_point(most);
    *gain = fixed ? 1.0f / fixed : 0.0f;
    auto digits = [&](const auto& code) { prepare_digits(code, spec, steps, from, fixed, out); };
    if (steps.direct && with_bytes(spec, digits)) return;
#endif
    float by = 1.0f;
    if (steps.direct && most >= as<uint32_t>(MANY)) by = 1.0f / MANY;
    if (steps.direct && most < as<uint32_t>(1.0f / MANY)) by = MANY;
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
#if defined(__AVX512VNNI__)
    if (steps.direct && with_bytes(spec, [](const auto&) {})) return digits_bytes(steps) / 4 + flushes(steps) * DIGITS * LANES;
#endif
    return steps.all * steps.size;
}

}  // namespace
