// What one instruction of the GPU does that CUDA has no word for; all of the assembly is here.
//
// tests/kernels/emulated/ has the same functions in plain C++, to run the kernels on a CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Shared memory has addresses of its own, which count from its beginning.
__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Four bytes picked out of eight.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 select) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
    return r;
}

// (word & mask) ^ base
__device__ __forceinline__ u32 insert(u32 word, u32 mask, u32 base) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(word), "r"(mask), "r"(base));
    return r;
}

// Weights pass by once: they do not belong into L1.
__device__ __forceinline__ uint4 stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// For copies that leave L2 to others.
__device__ __forceinline__ u64 used_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Sixteen bytes on their way to shared memory, past the registers; where there are none to read, zeros.
__device__ __forceinline__ void copy16(void* to, const void* from, bool some, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                 :: "r"(shared_address(to)), "l"(from), "r"(some ? 16 : 0), "l"(policy) : "memory");
}

// The same of what others read too. (With a policy, and an address that is the same for all threads but for a part that is not,
// ptxas 13.0 makes an instruction that an H200 does not know.)
__device__ __forceinline__ void copy16(void* to, const void* from, bool some) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(some ? 16 : 0) : "memory");
}

// Shared memory by an address that was put together. In the order of the program.
__device__ __forceinline__ float read_shared(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}
__device__ __forceinline__ void write_shared(u32 address, float value) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(value)); }

// What this thread has copied since the last time is one lot.
__device__ __forceinline__ void end_lot() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all lots of this thread have arrived but the last LEFT.
template <int LEFT>
__device__ __forceinline__ void await_lots() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// The next kernel of the stream may be set up from here on, while this one runs. It waits with `after_the_last`.
__device__ __forceinline__ void admit_the_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// What kernels before this one wrote may be read from here on, and nothing is written before. Weights may be read earlier
// where READ_WEIGHTS_EARLY is set: the caller knows that they were written long ago (kernels/early.py).
//
// Pointers to what those kernels write (x, sums, a bias, queries, the cache) must not be `const __restrict__`, and __ldg must not
// read it: the compiler takes such memory for one that nobody writes, and moves its loads ahead of this wait.
__device__ __forceinline__ void after_the_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float half_value(u32 bits) {
    float f;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits));
    return f;
}

__device__ __forceinline__ u16 half_bits(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 bfloat_bits(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// pair + offset, in halves of the kind of x.
__device__ __forceinline__ u32 plus(u32 pair, u32 offset) {
    u32 r;
#if X == 1
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0x3C003C00u), "r"(offset));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(0x3F803F80u), "r"(offset));
#endif
    return r;
}

// a b + c, in halves of the kind of x, rounded once.
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 r;
#if X == 1
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
#endif
    return r;
}

// Two numbers as a pair of halves of the kind of x.
__device__ __forceinline__ u32 pair_of(float low, float high) {
#if X == 1
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return bfloat_pair(low, high);
#endif
}

// Two bytes of fp8 (e5m2, or e4m3) as a pair of fp16, exactly. Compute capability 8.9 and later have it.
__device__ __forceinline__ u32 fp8_pair(u32 bytes, bool e5m2) {
    u32 r;
    if (e5m2) asm("{ .reg .b16 b; cvt.u16.u32 b, %1; cvt.rn.f16x2.e5m2x2 %0, b; }" : "=r"(r) : "r"(bytes));
    else asm("{ .reg .b16 b; cvt.u16.u32 b, %1; cvt.rn.f16x2.e4m3x2 %0, b; }" : "=r"(r) : "r"(bytes));
    return r;
}

// Bits `by` to `by` + 31 of a word that is repeated without end.
__device__ __forceinline__ u32 rotate(u32 word, u32 by) {
    u32 r;
    asm("shf.r.wrap.b32 %0, %1, %1, %2;" : "=r"(r) : "r"(word), "r"(by));
    return r;
}

// c [16, 8] += a [16, 16] b [16, 8]; a and b are halves of the kind of x, spread over the warp as PTX says of m16n8k16.
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if X == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// What was written to shared memory is there for tensor cores too, after the next barrier.
__device__ __forceinline__ void show_tensor_cores() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if TEAM == 4 || defined(RING)
// A tensor in memory from which boxes of rows are copied (cuTensorMapEncodeTiled).
struct alignas(64) Map {
    u64 opaque[16];
};

// Where threads wait for copies, or for each other (an mbarrier), in phases that are even (0) and odd (1) by turns.
typedef u64 Gate;

// A phase ends when `count` threads have passed and all copies have come that were expected.
__device__ __forceinline__ void set_gate(Gate* gate, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(gate)), "r"(count) : "memory");
}

// Gates that this thread has set may be used after the next barrier.
__device__ __forceinline__ void show_gates() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void pass(Gate* gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(gate)) : "memory");
}

// Pass, and make the phase wait for copies of so many bytes too.
__device__ __forceinline__ void expect(Gate* gate, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(gate)), "r"(bytes) : "memory");
}

// Until the phase of this parity has ended. The one before the first is odd, and has.
__device__ __forceinline__ void await_gate(Gate* gate, u32 phase) {
    asm volatile("{ .reg .pred ended; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1; @ended bra END; bra AGAIN; END: }"
                 :: "r"(shared_address(gate)), "r"(phase) : "memory");
}

// That boxes of this tensor will be asked for soon.
__device__ __forceinline__ void announce(const Map& map) { asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory"); }

// A box of rows from byte `column` and row `row` on, zeros where the tensor has none. Sixteen bytes i of row r come to place
// i ^ r % 8 (rows of 128 bytes), i ^ r / 2 % 4 (64) or i ^ r / 4 % 2 (32).
__device__ __forceinline__ void copy_box(void* to, const Map& map, int column, int row, Gate* gate) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(to)), "l"(&map), "r"(column), "r"(row), "r"(shared_address(gate)) : "memory");
}

// A barrier of some of the block's warps, `threads` in all. Number 0 is __syncthreads.
__device__ __forceinline__ void meet(int number, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory"); }

// Bytes of a row, a multiple of sixteen, for which the gate was told to wait.
__device__ __forceinline__ void copy_line(void* to, const void* from, u32 bytes, Gate* gate) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(gate)) : "memory");
}

// Two fp8_e4m3, in the low half of a word or its high one, as halves of the kind of x: fp8_pair in fewer instructions.
template <bool HIGH>
__device__ __forceinline__ u32 e4m3_pair(u32 word) {
    u32 r;
    if (HIGH) asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(r) : "r"(word));
    else asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(r) : "r"(word));
#if X == 1
    return r;
#else
    float a, b;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }" : "=f"(a), "=f"(b) : "r"(r));
    return bfloat_pair(a, b);
#endif
}

#endif

#if TEAM == 4
// From here on the four warps of this thread have so many registers for each, fewer than at the start or more.
template <int COUNT>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }

// Products from here on may use registers that were written before; those of one lot are waited for together.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all lots are done but the last LEFT. `c`, the sums, must not be read before.
template <int LEFT, int COUNT>
__device__ __forceinline__ void await_products(float (&c)[COUNT]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(c[i]) :: "memory");
}

// The same, for products whose sums are not read yet: their other operands may be written again.
template <int LEFT>
__device__ __forceinline__ void await_operands() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// Four matrices [8, 8] of halves, spread over the warp as the sums of mma are, to shared memory with rows and columns
// exchanged: lane 8 i + j says where column j of matrix i goes.
__device__ __forceinline__ void store_turned(void* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared_address(to)), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

#if X == 1
#define HALVES "f16.f16"
#else
#define HALVES "bf16.bf16"
#endif

#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)

// Where a matrix [.., N] of wgmma lies in shared memory, as [2 halves of k][N][8]; and `many` times 16 bytes further.
typedef u64 Place;
template <int N>
__device__ __forceinline__ Place place_of(const void* b) {
    const u32 from = (shared_address(b) & 0x3FFFF) >> 4;
    return u64(128 >> 4) << 32 | N << 16 | from;  // bytes to eight more of N; to the other half
}

// The same as [N][64 of k], with sixteen bytes i of line n in place i ^ n % 8, so that neither lines nor columns meet a bank
// twice. It begins at a multiple of 1024 bytes.
__device__ __forceinline__ Place place_of_lines(const void* b) {
    const u32 from = (shared_address(b) & 0x3FFFF) >> 4;
    return u64(1) << 62 | u64(1024 >> 4) << 32 | 1 << 16 | from;  // the pattern; bytes to eight more of N
}
__device__ __forceinline__ Place further(Place b, int many) { return b + u32(many); }

// c [64, N] += a [64, 16] b [16, N] of four warps, each with sixteen rows of a and c, spread as mma has them; where `more` is
// not set, c is not read. Done when it was waited for.
template <int COUNT>
__device__ __forceinline__ void wgmma(float (&c)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, Place b, bool more) {
    static_assert(COUNT == 8 || COUNT == 16 || COUNT == 32 || COUNT == 64 || COUNT == 128, "no such product is written out here");
    if constexpr (COUNT == 8)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." HALVES " "
                     "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                     "{%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
                     : EIGHT(0)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)) : "memory");
    else if constexpr (COUNT == 16)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." HALVES " "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                     "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
                     : EIGHT(0), EIGHT(8)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)) : "memory");
    else if constexpr (COUNT == 32)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." HALVES " "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                     "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                     : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)) : "memory");
    else if constexpr (COUNT == 64)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." HALVES " "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                     "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
                     : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)) : "memory");
    else if constexpr (COUNT == 128)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." HALVES " "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                     "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                     "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                     "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                     "{%128, %129, %130, %131}, %132, p, 1, 1, 0; }"
                     : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56), EIGHT(64),
                       EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104), EIGHT(112), EIGHT(120)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(more)) : "memory");
}
#endif
