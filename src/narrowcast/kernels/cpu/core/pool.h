// Threads that wait for loops to help with.
//
// `run` calls work(0) ... work(count - 1), each once, on the caller and up to `threads - 1` helpers, and returns when all
// are done. Several callers may run at once. Helpers are started when first wanted, never joined, and forgotten by a
// forked child, which starts its own.

#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <thread>

namespace nc {

class Pool {
    struct Job {
        const std::function<void(int64_t)>& work;
        int64_t count;
        int helpers_wanted;
        int helpers_inside = 0;
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};

        void take() {
            try {
                for (int64_t i; (i = next.fetch_add(1)) < count;) work(i);
            } catch (...) {
                failed = true;
            }
        }
    };

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::list<Job*> jobs_;
    int helpers_ = 0;

    void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            Job* job = nullptr;
            for (Job* candidate : jobs_) {
                if (candidate->helpers_wanted > 0) {
                    job = candidate;
                    break;
                }
            }
            if (!job) {
                wake_.wait(lock);
                continue;
            }
            --job->helpers_wanted, ++job->helpers_inside;
            lock.unlock();
            job->take();
            lock.lock();
            if (--job->helpers_inside == 0) done_.notify_all();
        }
    }

    void start_helpers(int wanted) {
        while (helpers_ < wanted) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (...) {
                return;  // no more threads to be had: the caller works with those there are
            }
            ++helpers_;
        }
    }

    static Pool*& instance() {
        static Pool* pool = [] {
            pthread_atfork(nullptr, nullptr, [] { instance() = new Pool; });
            return new Pool;
        }();
        return pool;
    }

    bool run_here(int64_t count, int threads, const std::function<void(int64_t)>& work) {
        Job job{work, count, int(std::min<int64_t>(threads, count)) - 1};
        {
            std::lock_guard<std::mutex> lock(mutex_);
            start_helpers(job.helpers_wanted);
            jobs_.push_back(&job);
        }
        wake_.notify_all();
        job.take();
        std::unique_lock<std::mutex> lock(mutex_);
        jobs_.remove(&job);
        done_.wait(lock, [&] { return job.helpers_inside == 0; });
        return !job.failed;
    }

   public:
    // False where the work threw (out of memory).
    static bool run(int64_t count, int threads, const std::function<void(int64_t)>& work) {
        return instance()->run_here(count, threads, work);
    }
};

}  // namespace nc
