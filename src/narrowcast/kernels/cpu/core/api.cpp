// The C ABI: cuts rows into tasks, gives them to threads, and picks the kernels for this CPU.

#include <memory>
#include <vector>

#include "calls.h"
#include "threads.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {
using namespace nc;

// A row in parts of about CHUNK elements that each hold whole blocks, or that start at multiples of CHUNK.
struct Parts {
    int64_t size, count;
    explicit Parts(const Spec& spec, bool whole_blocks) : size(CHUNK) {
        if (whole_blocks && spec.block_size) size = std::max<int64_t>(1, CHUNK / spec.block_size) * spec.block_size;
        count = ceil_div(spec.numel, size);
    }
};

// One block that is larger than a part: measure the parts, settle the scale, quantize the parts.
int32_t encode_large(const Kernels& k, const Spec& spec, Floats row, uint8_t* out, uint64_t key, int32_t threads) {
    Parts parts(spec, false);
    std::vector<Batch> batches(size_t(ceil_div(parts.count, Batch::SIZE)));
    auto count_of = [&](int64_t part) { return std::min(parts.size, spec.numel - part * parts.size); };
    int32_t failed = parallel(parts.count, threads, [&](int64_t part) {
        k.measure(spec, row, part * parts.size, count_of(part), batches[size_t(part / Batch::SIZE)], part % Batch::SIZE);
    });
    if (failed) return failed;
    for (int64_t step = 1; step < parts.count; step *= 2) {
        for (int64_t i = 0; i + step < parts.count; i += 2 * step) {
            int64_t j = i + step, to = i % Batch::SIZE, from = j % Batch::SIZE;
            Batch &left = batches[size_t(i / Batch::SIZE)], &right = batches[size_t(j / Batch::SIZE)];
            left.key[to] = std::max(left.key[to], right.key[from]);
            left.low[to] = std::min(left.low[to], right.low[from]);
            left.high[to] = std::max(left.high[to], right.high[from]);
            left.sum[to] += right.sum[from];
        }
    }
    KeepDenormals keep;
    Batch& all = batches[0];
    k.settle(spec, all, 0, 1, spec.numel, out);
    Scaling by{all.scale[0], all.inverse[0], all.zero[0]};
    return parallel(parts.count, threads, [&](int64_t part) {
        k.quantize(spec, row, part * parts.size, count_of(part), by, out, key);
    });
}

}  // namespace

NC_EXPORT int32_t nc_abi() { return 11; }

// The best of plain (0), avx2 (1) and avx512 (2) that this CPU runs.
NC_EXPORT int32_t nc_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bitalg") &&
                  __builtin_cpu_supports("avx512vnni");
    return avx512 ? 2 : avx2 ? 1 : 0;
#else
    return 0;
#endif
}

// Hands over GOMP_parallel of the OpenMP that torch uses, or null.
NC_EXPORT void nc_team(void* parallel) {
    static const int once = pthread_atfork(nullptr, nullptr, [] { team = nullptr; });
    (void)once;
    team = reinterpret_cast<Team>(parallel);
}

// New memory that is about to be written whole: ask for large pages, since a fault for every 4096 bytes takes longer than
// encoding them.
NC_EXPORT void nc_fresh(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = 1 << 21;
    uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    uintptr_t end = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

NC_EXPORT int32_t nc_encode(const Spec* spec, const void* data, int32_t dtype, int64_t stride, int64_t rows, uint8_t* out,
                            int64_t out_stride, uint64_t seed, int32_t threads, int32_t isa) {
    const Kernels& k = NC_CHOOSE(kernels, isa);
    auto key_of = [&](int64_t row) { return mix64(mix64(seed) + uint64_t(row)); };
    bool large = spec->block_size > CHUNK;
    if (large) {
        for (int64_t row = 0; row < rows; ++row) {
            uint8_t* to = out + row * out_stride;
            clear_gaps(*spec, to);
            if (encode_large(k, *spec, row_of(data, dtype, stride, row), to, key_of(row), threads)) return 1;
        }
        return 0;
    }
    Parts parts(*spec, true);
    return parallel(rows * parts.count, threads, [&](int64_t task) {
        int64_t row = task / parts.count, begin = task % parts.count * parts.size;
        int64_t count = std::min(parts.size, spec->numel - begin);
        uint8_t* to = out + row * out_stride;
        Floats from = row_of(data, dtype, stride, row);
        if (begin == 0) clear_gaps(*spec, to);
        if (spec->scale == NO_SCALE) k.quantize(*spec, from, begin, count, Scaling{1.0f, 1.0f, 0}, to, 0);
        else k.encode(*spec, from, begin, count, to, key_of(row));
    });
}

NC_EXPORT int32_t nc_decode(const Spec* spec, const uint8_t* data, int64_t stride, int64_t rows, void* out, int32_t dtype,
                            int64_t out_stride, int32_t threads, int32_t isa) {
    const Kernels& k = NC_CHOOSE(kernels, isa);
    Parts parts(*spec, spec->block_size <= CHUNK);
    return parallel(rows * parts.count, threads, [&](int64_t task) {
        int64_t row = task / parts.count, begin = task % parts.count * parts.size;
        Floats to = row_of(out, dtype, out_stride, row);
        k.decode(*spec, data + row * stride, begin, std::min(parts.size, spec->numel - begin), const_cast<void*>(to.data), dtype);
    });
}

NC_EXPORT int32_t nc_decode_sum(const Spec* spec, const uint8_t* data, int64_t stride, int64_t ranks, const void* own,
                                int32_t own_dtype, int64_t own_rank, int64_t divisor, void* out, int32_t dtype,
                                int32_t threads, int32_t isa) {
    const Kernels& k = NC_CHOOSE(kernels, isa);
    Parts parts(*spec, spec->block_size <= CHUNK);
    return parallel(parts.count, threads, [&](int64_t part) {
        int64_t begin = part * parts.size, count = std::min(parts.size, spec->numel - begin);
        k.decode_sum(*spec, data, stride, ranks, Floats{own, own_dtype}, own_rank, divisor, begin, count, out, dtype);
    });
}

NC_EXPORT int32_t nc_decode_sum_encode(const Spec* spec, const uint8_t* data, int64_t stride, int64_t ranks,
                                       const void* own, int32_t own_dtype, int64_t own_rank, int64_t divisor, uint8_t* out,
                                       uint64_t seed, int32_t threads, int32_t isa) {
    const Kernels& k = NC_CHOOSE(kernels, isa);
    uint64_t key = mix64(mix64(seed));
    if (spec->block_size > CHUNK) {
        try {
            std::vector<float> total(size_t(spec->numel));
            const int32_t failed = nc_decode_sum(spec, data, stride, ranks, own, own_dtype, own_rank, divisor, total.data(),
                                                 F32, threads, isa);
            if (failed) return failed;
            clear_gaps(*spec, out);
            return encode_large(k, *spec, Floats{total.data(), F32}, out, key, threads);
        } catch (...) {
            return 1;
        }
    }
    // Parts of about 8192 elements, whose sums stay in the first-level cache until they are encoded.
    int64_t size = spec->block_size ? std::max<int64_t>(1, 8192 / spec->block_size) * spec->block_size : 8192;
    clear_gaps(*spec, out);
    Parts parts(*spec, true);
    return parallel(parts.count, threads, [&](int64_t part) {
        std::vector<float> scratch(size_t(std::min(size, spec->numel)));
        int64_t end = std::min((part + 1) * parts.size, spec->numel);
        for (int64_t begin = part * parts.size; begin < end; begin += size) {
            k.decode_sum_encode(*spec, data, stride, ranks, Floats{own, own_dtype}, own_rank, divisor, begin,
                                std::min(size, end - begin), scratch.data(), out, key);
        }
    });
}

NC_EXPORT int32_t nc_linear(const Spec* spec, const uint8_t* data, int64_t stride, int64_t rows, const void* x, int32_t dtype,
                            int64_t x_stride, int64_t batch, const void* bias, int32_t bias_dtype, void* out,
                            int64_t out_stride, int32_t threads, int32_t isa) {
    const Multiplier& m = NC_CHOOSE(multiplier, isa);
    try {
        const int64_t length = m.prepared(*spec);
        // A vector load that crosses a cache line counts twice: begin on one.
        std::unique_ptr<float[]> memory(new float[size_t(length * batch + 16)]), gain(new float[size_t(batch)]);
        float* prepared = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 4;
        {
            KeepDenormals keep;
            for (int64_t b = 0; b < batch; ++b) {
                m.prepare(*spec, row_of(x, dtype, x_stride, b), &prepared[size_t(b * length)], &gain[size_t(b)]);
            }
        }
        Product product{data, stride, Floats{x, dtype}, x_stride, batch, prepared, gain.get(),
                        Floats{bias, bias_dtype}, out, out_stride, NC_CHOOSE(kernels, isa).decode};
        // A few tasks a thread, so that one that was held up leaves the rest to the others; whole groups of rows.
        constexpr int64_t GROUP = 16;
        int64_t size = threads > 1 ? std::max(GROUP, rows / (8 * threads) / GROUP * GROUP) : rows;
        return parallel_in_team(ceil_div(rows, size), threads, [&](int64_t task) {
            m.linear(*spec, product, task * size, std::min(rows, (task + 1) * size));
        });
    } catch (...) {
        return 1;
    }
}

// As nc_linear, for many vectors; UNKNOWN (2) where there are no tiles for the format on this CPU. x in bf16 is multiplied with
// weights in bf16 where there are instructions for it.
static int32_t in_tiles(const Tiler& t, Product product, const Spec& spec, int64_t rows, int32_t threads) {
    try {
        product.way = t.way(spec, product);
        if (product.way == 0) return 2;
        std::unique_ptr<float[]> gain(new float[size_t(product.batch)]), memory(new float[size_t(t.packed(spec, product) + 16)]);
        float* packed = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64 / 4;
        const int32_t failed = parallel_in_team(ceil_div(product.batch, t.vectors), threads, [&](int64_t task) {
            t.pack(spec, product, task * t.vectors, packed, gain.get());
        });
        if (failed) return failed;
        product.prepared = packed, product.gain = gain.get();
        const int64_t size = t.together(spec, product, rows, threads);
        return parallel_in_team(ceil_div(rows, size), threads, [&](int64_t task) {
            t.tiles(spec, product, task * size, std::min(rows, (task + 1) * size));
        });
    } catch (...) {
        return 1;
    }
}

NC_EXPORT int32_t nc_linear_tiles(const Spec* spec, const uint8_t* data, int64_t stride, int64_t rows, const void* x, int32_t dtype,
                                  int64_t x_stride, int64_t batch, const void* bias, int32_t bias_dtype, void* out,
                                  int64_t out_stride, int32_t threads, int32_t isa) {
    const Product product{data, stride, Floats{x, dtype}, x_stride, batch, nullptr, nullptr, Floats{bias, bias_dtype},
                          out, out_stride, NC_CHOOSE(kernels, isa).decode};
    return in_tiles(NC_CHOOSE(tiler, isa), product, *spec, rows, threads);
}

NC_EXPORT int32_t nc_linear_matrix(const Spec* spec, const uint8_t* data, int64_t stride, int64_t rows, const void* x, int32_t dtype,
                                   int64_t x_stride, int64_t batch, const void* bias, int32_t bias_dtype, void* out,
                                   int64_t out_stride, int32_t threads, int32_t isa) {
    const Product product{data, stride, Floats{x, dtype}, x_stride, batch, nullptr, nullptr, Floats{bias, bias_dtype},
                          out, out_stride, NC_CHOOSE(kernels, isa).decode};
    return in_tiles(NC_CHOOSE(matrix, isa), product, *spec, rows, threads);
}
