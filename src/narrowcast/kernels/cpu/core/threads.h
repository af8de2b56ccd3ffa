// Tasks on threads, with the floating-point unit as every task needs it.

#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

#include "pool.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nc {

// Denormals count, whatever torch.set_flush_denormal says: results must be the same everywhere.
class KeepDenormals {
#if defined(__x86_64__)
    unsigned saved_ = _mm_getcsr();

   public:
    KeepDenormals() { _mm_setcsr(0x1F80); }
    ~KeepDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
    uint64_t saved_;

   public:
    KeepDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
    }
    ~KeepDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
   public:
    KeepDenormals() {}
#endif
};

// Calls work(0) ... work(tasks - 1), each once; nonzero where one of them threw (out of memory).
inline int32_t parallel(int64_t tasks, int32_t threads, const std::function<void(int64_t)>& work) {
    auto guarded = [&](int64_t task) {
        KeepDenormals keep;
        work(task);
    };
    if (threads > 1 && tasks > 1) return Pool::run(tasks, threads, guarded) ? 0 : 1;
    try {
        for (int64_t task = 0; task < tasks; ++task) guarded(task);
    } catch (...) {
        return 1;
    }
    return 0;
}

// OpenMP's team of threads, where the process has one: after a parallel operation of torch's they spin for milliseconds, and
// threads of our own would have to share the cores with them. Forgotten by a forked child, in which that team is dead.
using Team = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
inline std::atomic<Team> team{nullptr};

// As `parallel`, on OpenMP's team if there is one.
inline int32_t parallel_in_team(int64_t tasks, int32_t threads, const std::function<void(int64_t)>& work) {
    const Team run = team;
    if (!run || threads < 2 || tasks < 2) return parallel(tasks, threads, work);
    struct Job {
        const std::function<void(int64_t)>& work;
        const int64_t tasks;
        std::atomic<int64_t> next{0};
        std::atomic<int32_t> failed{0};
    } job{work, tasks};
    auto take = [](void* data) {
        Job& job = *static_cast<Job*>(data);
        KeepDenormals keep;
        try {
            for (int64_t task; (task = job.next.fetch_add(1)) < job.tasks;) job.work(task);
        } catch (...) {
            job.failed = 1;
        }
    };
    run(take, &job, unsigned(threads), 0);
    return job.failed;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace nc
