// Norms, gates and attention of one position (between.h). Compiled once per instruction set.

#include "between.h"

#include <vector>

#include "linear_plain.h"

namespace {

// To nearest even, past the largest number to infinity, as torch does.
void put(const float* from, int64_t n, int32_t dtype, void* out) {
    if (dtype == F32) {
        std::memcpy(out, from, size_t(n) * 4);
        return;
    }
    Half16* to = static_cast<Half16*>(out);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = as<uint32_t>(from[i]);
        const uint32_t code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        to[i] = uint16_t(select((bits & 0x7FFFFFFFu) > 0x7F800000u, 0x7FC0u, code));
    }
}

const void* at(const void* data, int32_t dtype, int64_t element) {
    return static_cast<const uint8_t*>(data) + element * (dtype == F32 ? 4 : 2);
}

void* at(void* data, int32_t dtype, int64_t element) {
    return static_cast<uint8_t*>(data) + element * (dtype == F32 ? 4 : 2);
}

// e^x within two units in the last place: 2^n times a polynomial of the rest, which lies within ln 2 / 2. Below -87.3 it is zero, above
// 88.3 infinity.
inline float exponential(float x) {
    const float bounded = std::max(-87.3f, std::min(89.0f, x));
    const float whole = std::nearbyint(bounded * 1.44269504f);
    const float rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float y = 1.0f / 5040;
    y = y * rest + 1.0f / 720;
    y = y * rest + 1.0f / 120;
    y = y * rest + 1.0f / 24;
    y = y * rest + 1.0f / 6;
    y = y * rest + 0.5f;
    y = y * rest + 1.0f;
    y = y * rest + 1.0f;
    const float power = as<float>(uint32_t(int32_t(whole) + 127) << 23);
    const float found = x < -87.3f ? 0.0f : y * power;
    return x == x ? found : x;
}

void add_norm(int32_t dtype, int64_t width, const void* x, const void* delta, const void* weight, float eps, void* total, void* out) {
    std::vector<float> memory(size_t(3 * width));
    float *sum = memory.data(), *second = sum + width, *gains = second + width;
    const float* first = load(Floats{x, dtype}, 0, width, sum);
    if (delta) {
        const float* added = load(Floats{delta, dtype}, 0, width, second);
        for (int64_t i = 0; i < width; ++i) sum[i] = first[i] + added[i];
        put(sum, width, dtype, total);
        first = load(Floats{total, dtype}, 0, width, sum);
    }
    const float size = dot(first, first, width) / float(width);
    const float by = 1.0f / std::sqrt(size + eps);
    const float* gain = load(Floats{weight, dtype}, 0, width, gains);
    for (int64_t i = 0; i < width; ++i) second[i] = first[i] * by * gain[i];
    put(second, width, dtype, out);
}

void gate(int32_t dtype, int64_t width, const void* gate, const void* up, void* out) {
    constexpr int64_t SOME = 256;
    float first[SOME], second[SOME], result[SOME];
    for (int64_t begin = 0; begin < width; begin += SOME) {
        const int64_t n = std::min(SOME, width - begin);
        const float *one = load(Floats{gate, dtype}, begin, n, first), *other = load(Floats{up, dtype}, begin, n, second);
        for (int64_t i = 0; i < n; ++i) result[i] = one[i] / (1.0f + exponential(-one[i])) * other[i];
        put(result, n, dtype, at(out, dtype, begin));
    }
}

// Element i of the first half and element i of the second are a pair that is turned.
void turn(const float* x, const float* turns, int64_t size, float* out) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        out[i] = x[i] * turns[i] - x[i + half] * turns[i + half];
        out[i + half] = x[i + half] * turns[i] + x[i] * turns[i + half];
    }
}

// One query, already turned, over positions [0, count).
void attend_one(int32_t dtype, const CacheLayout& c, const float* query, int64_t count, const void* keys, const void* values,
                float* scores, float* buffer, float* mixed) {
    const float by = 1.0f / std::sqrt(float(c.size));
    float most = -HUGE_VALF, sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        scores[i] = by * dot(query, load(Floats{at(keys, dtype, i * c.position), dtype}, 0, c.size, buffer), c.size);
        most = std::max(most, scores[i]);
    }
    for (int64_t i = 0; i < count; ++i) scores[i] = exponential(scores[i] - most);
    for (int64_t i = 0; i < count; ++i) sum += scores[i];
    std::fill(mixed, mixed + c.size, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
        const float share = scores[i] / sum;
        const float* value = load(Floats{at(values, dtype, i * c.position), dtype}, 0, c.size, buffer);
        for (int64_t j = 0; j < c.size; ++j) mixed[j] += share * value[j];
    }
}

void attend(int32_t dtype, const CacheLayout& c, const void* queries, const void* key, const void* value, const float* turns, int64_t place,
            void* keys, void* values, void* out) {
    std::vector<float> memory(size_t(3 * c.size + place + 1));
    float *buffer = memory.data(), *turned = buffer + c.size, *mixed = turned + c.size, *scores = mixed + c.size;
    const float* by = turns + place * c.size;
    turn(load(Floats{key, dtype}, 0, c.size, buffer), by, c.size, turned);
    put(turned, c.size, dtype, at(keys, dtype, place * c.position));
    std::memcpy(at(values, dtype, place * c.position), value, size_t(c.size * (dtype == F32 ? 4 : 2)));
    for (int64_t head = 0; head < c.heads / c.key_heads; ++head) {
        turn(load(Floats{queries, dtype}, head * c.size, c.size, buffer), by, c.size, turned);
        attend_one(dtype, c, turned, place + 1, keys, values, scores, buffer, mixed);
        put(mixed, c.size, dtype, at(out, dtype, head * c.size));
    }
}

}  // namespace

namespace nc {
const Between NC_NAMED_BY_ISA(between) = {::add_norm, ::gate, ::attend};
}  // namespace nc
