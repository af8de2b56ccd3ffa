// A GPU of one processor: the threads of a block as fibers of one thread of the host, blocks one after the other.
//
// A warp runs until each of its threads waits for the block, then the next warp runs: so a thread is as far ahead of those
// of other warps as barriers allow, and with `reverse` as far behind. What lacks a barrier gives another result one way or
// the other. Shared memory, and the stacks, are all ones (NaN) before a block begins. What a kernel may not do ends the launch
// with a sentence: to touch memory that is not its own, to read a vector that is not aligned, to leave threads of a warp or
// a block behind, to write past the shared memory that it asked for.
#pragma once

#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace machine {

constexpr int WARP = 32;
constexpr size_t STACK = 8 << 10;  // small, since it is filled anew for each block; signals have one of their own
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};

enum State { RUNS, IN_WARP, IN_BLOCK, ENDED };

// What the threads of a warp do together, on what each brought.
typedef void (*Together)(void* const* brought);

struct Fiber {
    ucontext_t context;
    State state;
    Together together;
    void* brought;
};

static Fiber* fibers;
static Fiber* running;
static ucontext_t scheduler;
static void (*body)();
static char error[512];
static volatile sig_atomic_t fault;
static void* volatile fault_address;

static void wait(State state) {
    running->state = state;
    swapcontext(&running->context, &scheduler);
}

static void wait_in_warp(Together together, void* brought) {
    running->together = together, running->brought = brought;
    wait(IN_WARP);
}

static void begin() {
    body();
    running->state = ENDED;
    setcontext(&scheduler);
}

static void on_fault(int signal, siginfo_t* info, void*) {
    fault = signal, fault_address = info->si_addr;
    setcontext(&scheduler);
}

static bool failed() { return error[0] != 0; }

static void fail(const char* what, int thread) {
    if (!failed()) snprintf(error, sizeof error, "block %u, thread %d: %s", blockIdx.x, thread, what);
}

static void resume(int thread) {
    threadIdx = {unsigned(thread), 0, 0};
    running = fibers + thread;
    swapcontext(&scheduler, &running->context);
    if (!fault) return;
    char what[160];
    const bool memory = fault == SIGSEGV || fault == SIGBUS;
    snprintf(what, sizeof what, memory ? "touches memory that is not its own, at %p" : "breaks a rule of C++ (alignment, bounds, shift), at %p",
             fault_address);
    fail(what, thread);
    fault = 0, running->state = ENDED;
}

// Until all threads of the warp wait for the block, or have ended.
static void run_warp(int first, bool reverse) {
    while (!failed()) {
        for (int i = 0; i < WARP && !failed(); ++i) {
            const int thread = first + (reverse ? WARP - 1 - i : i);
            if (fibers[thread].state == RUNS) resume(thread);
        }
        Fiber* const warp = fibers + first;
        void* brought[WARP];
        for (int i = 0; i < WARP && !failed(); ++i) {
            if (warp[i].state != warp[0].state) return fail("is not where the first thread of its warp waits", first + i);
            if (warp[i].state == IN_WARP && warp[i].together != warp[0].together)
                return fail("does another thing with its warp than the first thread of it", first + i);
            brought[i] = warp[i].brought;
        }
        if (failed() || warp[0].state != IN_WARP) return;
        warp[0].together(brought);
        for (int i = 0; i < WARP; ++i) warp[i].state = RUNS;
    }
}

static void run_block(int threads, bool reverse) {
    for (bool ended = false; !ended && !failed();) {
        for (int i = 0; i < threads && !failed(); i += WARP) run_warp(reverse ? threads - WARP - i : i, reverse);
        ended = fibers[0].state == ENDED;
        for (int i = 0; i < threads && !failed(); ++i) {
            if ((fibers[i].state == ENDED) != ended) fail("waits at a barrier that another thread never reaches, or is that one", i);
            if (!ended) fibers[i].state = RUNS;
        }
    }
}

// Shared memory is thread-local memory of the host: all of it that this library has.
struct Span {
    char* begin;
    size_t size;
};
static thread_local char probe;

static Span shared_memory() {
    probe = 0;  // there is none before it is touched
    Span found = {};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* found) {
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const Span span = {(char*)info->dlpi_tls_data, info->dlpi_phdr[i].p_memsz};
                if (info->dlpi_phdr[i].p_type != PT_TLS || &probe < span.begin || &probe >= span.begin + span.size) continue;
                *(Span*)found = span;
                return 1;
            }
            return 0;
        },
        &found);
    if (!found.size) abort();
    return found;
}

// `asked` bytes of the launch's own shared memory of `size` bytes may be used. Returns a sentence, empty if all went well.
static const char* launch(void (*kernel)(), int grid, int threads, bool reverse, const char* dynamic, size_t size, size_t asked) {
    error[0] = 0, body = kernel;
    blockDim = {unsigned(threads), 1, 1}, gridDim = {unsigned(grid), 1, 1}, blockIdx = {};
    if (threads < WARP || threads > 1024 || threads % WARP || asked > size) fail("cannot be launched so", 0);
    static char altstack[64 << 10];
    stack_t own = {}, other;
    own.ss_sp = altstack, own.ss_size = sizeof altstack;
    sigaltstack(&own, &other);
    struct sigaction mine = {}, before[sizeof FAULTS / sizeof *FAULTS];
    mine.sa_sigaction = on_fault, mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (size_t i = 0; i < sizeof FAULTS / sizeof *FAULTS; ++i) sigaction(FAULTS[i], &mine, before + i);
    fibers = (Fiber*)calloc(threads, sizeof(Fiber));
    char* const stacks = (char*)mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const Span shared = shared_memory();
    for (; int(blockIdx.x) < grid && !failed(); ++blockIdx.x) {
        memset(stacks, 0xFF, threads * STACK);
        memset(shared.begin, 0xFF, shared.size);
        for (int i = 0; i < threads; ++i) {
            fibers[i].state = RUNS;
            getcontext(&fibers[i].context);
            fibers[i].context.uc_stack.ss_sp = stacks + i * STACK, fibers[i].context.uc_stack.ss_size = STACK;
            makecontext(&fibers[i].context, begin, 0);
        }
        run_block(threads, reverse);
        for (int i = 0; i < threads && !failed(); ++i)
            if (stacks[i * STACK] != char(0xFF)) fail("has too small a stack: STACK of machine.h", i);
        for (size_t i = asked; i < size && !failed(); ++i)
            if (dynamic[i] != char(0xFF)) fail("or another wrote past the shared memory of the launch", 0);
    }
    munmap(stacks, threads * STACK);
    free(fibers);
    for (size_t i = 0; i < sizeof FAULTS / sizeof *FAULTS; ++i) sigaction(FAULTS[i], before + i, nullptr);
    sigaltstack(&other, nullptr);
    return error;
}

}  // namespace machine
