// A GPU of one processor: the threads of a block as fibers of one thread of the host, blocks one after the other.
//
// A warp runs until each of its threads waits for others, then the next warp runs: so a thread is as far ahead of those
// of other warps as barriers allow, and with `reverse` as far behind. Copies that a gate waits for come as late as they may, and
// with `reverse` at once. What lacks a barrier gives another result one way or
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

enum State { RUNS, IN_WARP, AT_BARRIER, AT_GATE, ENDED };

// What the threads of a warp do together, on what each brought.
typedef void (*Together)(void* const* brought);

struct Fiber {
    ucontext_t context;
    State state;
    Together together;
    void* brought;
    int barrier, threads;  // which one, and for how many it is
    void* gate;
    unsigned phase;
};

// Where threads wait for `count` others, or for `owed` bytes of copies, in phases.
struct Gate {
    void* at;
    unsigned count, left, phases;
    long owed;
};
struct BoxCopy {
    Gate* gate;
    void (*copy)(const BoxCopy&);
    const void* map;
    void* to;
    long column, row, bytes;
};

static Fiber* fibers;
static Fiber* running;
static ucontext_t scheduler;
static void (*body)();
static char error[512];
static volatile sig_atomic_t fault;
static void* volatile fault_address;
constexpr int GATES = 64, BOXES = 256;  // of a block; copies on their way
static Gate gates[GATES];
static BoxCopy boxes[BOXES];
static int gate_count, box_count;
static bool copies_come_at_once;

static void wait(State state) {
    running->state = state;
    swapcontext(&running->context, &scheduler);
}

static void wait_in_warp(Together together, void* brought) {
    running->together = together, running->brought = brought;
    wait(IN_WARP);
}

static void wait_at_barrier(int barrier, int threads) {
    running->barrier = barrier, running->threads = threads;
    wait(AT_BARRIER);
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

static Gate* gate_at(const void* at) {
    for (int i = 0; i < gate_count; ++i)
        if (gates[i].at == at) return gates + i;
    fail("uses a gate that nobody has set", threadIdx.x);
    return gates;
}

static void set_gate(void* at, unsigned count) {
    if (gate_count == GATES || (size_t)at % 8) return fail("sets too many gates, or one that is not aligned", threadIdx.x);
    gates[gate_count++] = {at, count, count, 0, 0};
}

static void end_phase(Gate& gate) {
    if (!gate.left && !gate.owed) gate.left = gate.count, ++gate.phases;
}

static void pass(void* at, long owed) {
    Gate& gate = *gate_at(at);
    if (!gate.left) return fail("passes a gate once more than its phase is for", threadIdx.x);
    --gate.left, gate.owed += owed;
    end_phase(gate);
}

static void copy_box(BoxCopy box) {
    if (box_count == BOXES) return fail("has too many boxes on their way: BOXES of machine.h", threadIdx.x);
    if (copies_come_at_once) box.copy(box);
    boxes[box_count++] = box;
}

// Whether the phase has ended; the copies that it waits for come now.
static bool is_open(void* at, unsigned phase) {
    Gate& gate = *gate_at(at);
    if (!gate.left && gate.phases % 2 == phase) {
        int kept = 0;
        for (int i = 0; i < box_count; ++i) {
            if (boxes[i].gate != &gate) {
                boxes[kept++] = boxes[i];
                continue;
            }
            if (!copies_come_at_once) boxes[i].copy(boxes[i]);
            gate.owed -= boxes[i].bytes;
        }
        box_count = kept;
        if (gate.owed) fail("waits for other bytes than are copied, or before they are asked for", threadIdx.x);
        end_phase(gate);
    }
    return gate.phases % 2 != phase;
}

static void wait_at_gate(void* at, unsigned phase) {
    running->gate = at, running->phase = phase;
    wait(AT_GATE);
}

// Until no thread of the warp can go on without others. Returns whether one did.
static bool run_warp(int first, bool reverse) {
    Fiber* const warp = fibers + first;
    for (bool ever = false;; ever = true) {
        bool any = false, at_gate = false;
        for (int i = 0; i < WARP && !failed(); ++i) {
            Fiber& fiber = warp[reverse ? WARP - 1 - i : i];
            if (fiber.state == AT_GATE && is_open(fiber.gate, fiber.phase)) fiber.state = RUNS;
            if (fiber.state == RUNS) resume(first + (reverse ? WARP - 1 - i : i)), any = true;
            at_gate |= fiber.state == AT_GATE;
        }
        if (failed() || !any) return ever;
        void* brought[WARP];
        for (int i = 0; i < WARP && !at_gate; ++i) {
            if (warp[i].state != warp[0].state) return fail("is not where the first thread of its warp waits", first + i), true;
            if (warp[i].state == IN_WARP && warp[i].together != warp[0].together)
                return fail("does another thing with its warp than the first thread of it", first + i), true;
            brought[i] = warp[i].brought;
        }
        if (at_gate || warp[0].state != IN_WARP) continue;
        warp[0].together(brought);
        for (int i = 0; i < WARP; ++i) warp[i].state = RUNS;
    }
}

// Lets those go on that are all there are at their barrier. Returns whether there were any.
static bool open_barriers(int threads) {
    bool any = false;
    for (int barrier = 0; barrier < 16; ++barrier) {
        int count = 0, wanted = 0;
        for (int i = 0; i < threads; ++i)
            if (fibers[i].state == AT_BARRIER && fibers[i].barrier == barrier) ++count, wanted = fibers[i].threads;
        if (!count || count != wanted) continue;
        for (int i = 0; i < threads; ++i)
            if (fibers[i].state == AT_BARRIER && fibers[i].barrier == barrier) fibers[i].state = RUNS;
        any = true;
    }
    return any;
}

static void run_block(int threads, bool reverse) {
    for (bool any = true; any && !failed();) {
        any = false;
        for (int i = 0; i < threads && !failed(); i += WARP) any |= run_warp(reverse ? threads - WARP - i : i, reverse);
        any |= open_barriers(threads);
    }
    for (int i = 0; i < threads && !failed(); ++i)
        if (fibers[i].state != ENDED) fail("waits at a barrier that another thread never reaches, or is that one", i);
    if (box_count) fail("ends before copies that it asked for have come", 0);
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
    error[0] = 0, body = kernel, copies_come_at_once = reverse;
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
        gate_count = box_count = 0;
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
