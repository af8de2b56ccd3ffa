// Cases on standard input, through the core that this is linked with; results on standard output. test_aarch64.py says
// what a case is.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "core.h"

extern "C" {
int32_t nc_encode(const nc::Spec*, const void*, int32_t, int64_t, int64_t, uint8_t*, int64_t, uint64_t, int32_t, int32_t);
int32_t nc_decode(const nc::Spec*, const uint8_t*, int64_t, int64_t, void*, int32_t, int64_t, int32_t, int32_t);
int32_t nc_decode_sum(const nc::Spec*, const uint8_t*, int64_t, int64_t, const void*, int32_t, int64_t, int64_t, void*,
                      int32_t, int32_t, int32_t);
}

struct Case {
    nc::Spec spec;  // its two pointers are filled in here
    int64_t rows;
    uint64_t seed;
    int64_t table;  // floats that follow: levels, then thresholds
};

template <class T>
bool take(T* out, size_t count) {
    return count == 0 || std::fread(out, sizeof(T), count, stdin) == count;
}

template <class T>
void give(const std::vector<T>& results) {
    std::fwrite(results.data(), sizeof(T), results.size(), stdout);
}

int main() {
    for (Case given; take(&given, 1);) {
        nc::Spec& spec = given.spec;
        std::vector<float> table(given.table), x(given.rows * spec.numel), decoded(x.size()), sum(spec.numel);
        if (!take(table.data(), table.size()) || !take(x.data(), x.size())) return 2;
        spec.levels = table.data();
        spec.thresholds = table.data() + table.size() / 2;
        std::vector<uint8_t> data(given.rows * spec.row_bytes);
        const int64_t stride = spec.row_bytes, numel = spec.numel, rows = given.rows;
        if (nc_encode(&spec, x.data(), nc::F32, numel, rows, data.data(), stride, given.seed, 1, 0)) return 3;
        if (nc_decode(&spec, data.data(), stride, rows, decoded.data(), nc::F32, numel, 1, 0)) return 4;
        if (nc_decode_sum(&spec, data.data(), stride, rows, nullptr, 0, -1, 1, sum.data(), nc::F32, 1, 0)) return 5;
        give(data), give(decoded), give(sum);
    }
}
