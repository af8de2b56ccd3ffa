// The C ABI of a step of AdamW on moments that are held in rows: cuts rows into tasks and gives them to threads.

#include <memory>

#include "moments.h"
#include "threads.h"

namespace {
using namespace nc;

constexpr int64_t PART = 2048;  // elements whose floats (five times 8 KB) stay in the second-level cache

}  // namespace

// parameter and grad are [rows, numel] of one dtype, first and second [rows, row_bytes], all contiguous. What pads the rows
// is not written: it is zero since the rows were made.
NC_EXPORT int32_t nc_adamw(
    const Spec* first, const Spec* second, void* parameter, const void* grad, int32_t dtype, int64_t rows, uint8_t* first_rows,
    uint8_t* second_rows, uint64_t seed, int32_t takes_momentum, const Step* step, int32_t threads, int32_t isa) {
    const int64_t numel = first->numel, size = second->block_size * std::max<int64_t>(1, PART / second->block_size);
    const int64_t parts = ceil_div(numel, size), width = dtype == F32 ? 4 : 2;
    // Short rows go several to a task.
    const int64_t together = std::max<int64_t>(1, 4 * PART / std::max<int64_t>(1, numel)), tasks = ceil_div(rows, together);
    const uint64_t first_seed = mix64(seed), second_seed = mix64(~seed);
    const Kernels& coding = NC_CHOOSE(kernels, isa);
    AdamW& update = NC_CHOOSE(adamw, isa);
    auto one = [&](int64_t row, int64_t part, float* scratch) {
        const int64_t begin = part * size, at = row * numel * width;
        const Moments moments{Floats{static_cast<uint8_t*>(parameter) + at, dtype},
                              Floats{static_cast<const uint8_t*>(grad) + at, dtype},
                              first_rows + row * first->row_bytes,
                              second_rows + row * second->row_bytes,
                              mix64(first_seed + uint64_t(row)),
                              mix64(second_seed + uint64_t(row)),
                              takes_momentum != 0,
                              *step};
        update(coding, *first, *second, moments, begin, std::min(size, numel - begin), scratch);
    };
    return parallel_in_team(tasks, threads, [&](int64_t task) {
        std::unique_ptr<float[]> scratch(new float[size_t(scratch_floats(std::min(size, numel)) + 16)]);
        for (int64_t row = task * together; row < std::min(rows, (task + 1) * together); ++row) {
            for (int64_t part = 0; part < parts; ++part) one(row, part, scratch.get());
        }
    });
}
