// What a decoder does between its products, for one new position of each sequence: norms, gates, attention over a cache.
//
// Everything is fp32 inside, and rounded once to the dtype of the activations, fp32 or bf16. Bits depend on nothing but a sequence.

#pragma once
#include "core.h"

namespace nc {

// One layer's keys and values, [batch, key_heads, positions, size], and how many elements lie from one to the next.
struct CacheLayout {
    int64_t batch, heads, key_heads, size, positions;
    int64_t sequence, head, position;
};

struct Between {
    // total = x + delta, out = its norm; delta may be null, and total then is not written.
    void (*add_norm)(int32_t dtype, int64_t width, const void* x, const void* delta, const void* weight, float eps, void* total, void* out);
    void (*gate)(int32_t dtype, int64_t width, const void* gate, const void* up, void* out);
    // One sequence and one key head: keeps the new key and value at position `at`, and writes what its queries attend to.
    void (*attend)(int32_t dtype, const CacheLayout&, const void* queries, const void* key, const void* value, const float* turns,
                   int64_t at, void* keys, void* values, void* out);
};

NC_DECLARE(const Between, between);

}  // namespace nc
