// The C ABI of what lies between products.

#include "calls.h"
#include "threads.h"

using namespace nc;

NC_EXPORT int32_t nc_add_norm(int32_t dtype, int64_t rows, int64_t width, const void* x, int64_t x_stride, const void* delta,
                              int64_t delta_stride, const void* weight, float eps, void* total, void* out, int32_t isa) {
    const Between& b = NC_CHOOSE(between, isa);
    return parallel(rows, 1, [&](int64_t row) {
        b.add_norm(dtype, width, row_of(x, dtype, x_stride, row).data, delta ? row_of(delta, dtype, delta_stride, row).data : nullptr, weight,
                   eps, const_cast<void*>(row_of(total, dtype, width, row).data), const_cast<void*>(row_of(out, dtype, width, row).data));
    });
}

NC_EXPORT int32_t nc_gate(int32_t dtype, int64_t rows, int64_t width, const void* gate, int64_t gate_stride, const void* up,
                          int64_t up_stride, void* out, int32_t isa) {
    const Between& b = NC_CHOOSE(between, isa);
    return parallel(rows, 1, [&](int64_t row) {
        b.gate(dtype, width, row_of(gate, dtype, gate_stride, row).data, row_of(up, dtype, up_stride, row).data,
               const_cast<void*>(row_of(out, dtype, width, row).data));
    });
}

// queries, key, value: [batch, heads * size], rows apart by `strides`; turns: [positions, 2, size / 2]; out: [batch, heads * size].
NC_EXPORT int32_t nc_attend(int32_t dtype, const CacheLayout* cache, const void* queries, const void* key, const void* value,
                            const int64_t* strides, const float* turns, const int64_t* places, void* keys, void* values, void* out,
                            int32_t threads, int32_t isa) {
    const Between& b = NC_CHOOSE(between, isa);
    const CacheLayout& c = *cache;
    return parallel_in_team(c.batch * c.key_heads, threads, [&](int64_t task) {
        const int64_t row = task / c.key_heads, head = task % c.key_heads, group = c.heads / c.key_heads;
        const int64_t held = row * c.sequence + head * c.head;
        auto place = [&](const void* data, int64_t element) { return row_of(data, dtype, 1, element).data; };
        b.attend(dtype, c, place(queries, row * strides[0] + head * group * c.size), place(key, row * strides[1] + head * c.size),
                 place(value, row * strides[2] + head * c.size), turns, places[row], const_cast<void*>(place(keys, held)),
                 const_cast<void*>(place(values, held)), const_cast<void*>(place(out, (row * c.heads + head * group) * c.size)));
    });
}
