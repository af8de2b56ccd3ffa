// out = the row that encodes the sum of RANKS rows of signs, in order, in fp32, with one bf16 scale for 64 elements. Its bits are the
// reference's.
//
//   RANKS rows, 2 to 8, `stride` bytes apart.   DIVIDE  0 no, 1 multiply by `factor`, a power of two.   LIMIT  of layout.Scaling, as bits
//
// A lane takes a block. Where the block's scales differ by less than 2^8, all their sums have 24 bits, and so has the sum of the sums'
// magnitudes: then no order matters, and a sum is one entry for the first four ranks and one for the others, of 16 each that the lane
// wrote before. Other blocks, and one that a row's end cuts short, are summed as the reference does.

constexpr u32 PAGE = 4096;  // bytes of shared memory of a warp: 16 entries of 256 bytes, half of them for ranks from the fourth on
constexpr u32 LOWEST = 64, HIGHEST = 240;  // exponents of fp32 between which nothing underflows or overflows

extern __shared__ __align__(1024) char memory[];

struct Block {
    uint2 words[RANKS];
    u32 scales[RANKS];
};

__device__ __forceinline__ void fetch(const u8* data, i64 block, i64 blocks, i64 scales_at, u32 stride, Block& it) {
    const i64 from = block < blocks ? block : 0;  // a lane with nothing to read reads what is there
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        it.words[rank] = __ldg((const uint2*)(data + from * 8 + u64(rank) * stride));
        it.scales[rank] = __ldg((const u16*)(data + scales_at + from * 2 + u64(rank) * stride));
    }
}

// Whether sums are exact in any order. Zeros do not count.
__device__ __forceinline__ bool exact(const u32* scales) {
    u32 high = 0, low = ~0u;  // one less than the smallest
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        const u32 size = scales[rank] & 0x7FFF;
        high = max(high, size), low = min(low, size - 1);
    }
    low = low + 1 >> 7, high = high >> 7;
    return high - low < 8 && low >= LOWEST && high <= HIGHEST;
}

// All sums of COUNT ranks from FIRST on, by their signs.
template <int FIRST, int COUNT>
__device__ __forceinline__ void fill_table(const u32* scales, u32 here) {
    float sums[16];
    sums[0] = __uint_as_float(scales[FIRST] << 16), sums[1] = -sums[0];
#pragma unroll
    for (int rank = 1; rank < COUNT; ++rank) {
        const float scale = __uint_as_float(scales[FIRST + rank] << 16);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < 1 << rank) sums[i + (1 << rank)] = __fadd_rn(sums[i], -scale), sums[i] = __fadd_rn(sums[i], scale);
    }
#pragma unroll
    for (int i = 0; i < 1 << COUNT; ++i) write_shared(here + i * 256, sums[i]);
}

// The signs of COUNT ranks, element by element: those of element 8 j + m are the low half of byte j of places[m], those of 8 j + 4 + m of
// places[4 + m]. The high halves are `base`.
template <int COUNT>
__device__ __forceinline__ void gather(const u32* words, u32 base, u32* places) {
    const u32 second = COUNT > 1 ? words[1 % COUNT] : 0, third = COUNT > 2 ? words[2 % COUNT] : 0, fourth = COUNT > 3 ? words[3 % COUNT] : 0;
    const u32 even = (words[0] & 0x55555555) | (second << 1 & 0xAAAAAAAA), odd = (words[0] >> 1 & 0x55555555) | (second & 0xAAAAAAAA);
    const u32 evens = (third & 0x55555555) | (fourth << 1 & 0xAAAAAAAA), odds = (third >> 1 & 0x55555555) | (fourth & 0xAAAAAAAA);
    const u32 four[4] = {(even & 0x33333333) | (evens << 2 & 0xCCCCCCCC), (odd & 0x33333333) | (odds << 2 & 0xCCCCCCCC),
                         (even >> 2 & 0x33333333) | (evens & 0xCCCCCCCC), (odd >> 2 & 0x33333333) | (odds & 0xCCCCCCCC)};
#pragma unroll
    for (int m = 0; m < 4; ++m) places[m] = (four[m] & 0x0F0F0F0F) | base, places[4 + m] = (four[m] >> 4 & 0x0F0F0F0F) | base;
}

constexpr int EARLY_RANKS = RANKS < 4 ? RANKS : 4, LATE = RANKS - EARLY_RANKS;

__device__ __forceinline__ float divided(float sum, int factor) { return DIVIDE ? __fmul_rn(sum, __uint_as_float(factor)) : sum; }

// Codes of 32 elements; adds their magnitudes to four sums.
__device__ __forceinline__ u32 half_block(const u32* words, u32 page, u32 lane, int factor, float* magnitudes) {
    u32 early[8], late[8], codes = 0;
    const u32 base = page % 16 * 0x10101010u, ends = page / 16 << 8 | lane * 4;  // of addresses
    gather<EARLY_RANKS>(words, base, early);
    if (LATE) gather<(LATE ? LATE : 1)>(words + RANKS - LATE, base, late);
#pragma unroll
    for (int i = 31; i >= 0; --i) {
        const int m = i % 8, select = 0x6504 | i / 8 << 4;
        float sum = read_shared(prmt(early[m], ends, select));
        if (LATE) sum = __fadd_rn(sum, read_shared(prmt(late[m], ends | 128, select)));
        sum = divided(sum, factor);
        magnitudes[i % 4] = __fadd_rn(magnitudes[i % 4], fabsf(sum));
        codes = __funnelshift_l(__float_as_uint(sum), codes, 1);
    }
    return codes;
}

// As the reference does it: magnitudes in fp64, elements i and i + 32 first, then i + 16, and so on.
__device__ __forceinline__ double sum_slowly(const Block& it, int count, int factor, u32* codes) {
    double waiting[6], all = 0;
    codes[0] = codes[1] = 0;
#pragma unroll 1
    for (int step = 0; step < 64; ++step) {
        const int i = (step & 1) << 5 | (step & 2) << 3 | (step & 4) << 1 | (step & 8) >> 1 | (step & 16) >> 3 | step >> 5;
        float sum = 0;
#pragma unroll
        for (int rank = 0; rank < RANKS; ++rank) {
            const u32 sign = (i < 32 ? it.words[rank].x : it.words[rank].y) >> i % 32 << 31;
            const float term = __uint_as_float(it.scales[rank] << 16 ^ sign);
            sum = rank ? __fadd_rn(sum, term) : term;
        }
        sum = i < count ? divided(sum, factor) : 0.0f;
        if (i < 32) codes[0] |= __float_as_uint(sum) >> 31 << i;
        else codes[1] |= __float_as_uint(sum) >> 31 << (i - 32);
        all = fabsf(sum);
        bool alone = false;
#pragma unroll
        for (int level = 0; level < 6; ++level) {
            if (!alone && step >> level & 1) all = waiting[level] + all;
            else if (!alone) waiting[level] = all, alone = true;
        }
    }
    return all;
}

__device__ __forceinline__ void store(u8* out, i64 block, int count, i64 scales_at, float mean, bool finite, const u32* codes) {
    const float scale = fminf(__uint_as_float((__float_as_uint(mean) + 0xFFFF) & 0xFFFF0000u), __uint_as_float(u32(LIMIT)));
    *(u16*)(out + scales_at + block * 2) = finite ? __float_as_uint(scale) >> 16 : 0x7FC0;
    const u32 low = finite ? codes[0] : 0, high = finite ? codes[1] : 0;
    if (count == 64) {
        *(uint2*)(out + block * 8) = make_uint2(low, high);
        return;
    }
    for (int i = 0; i < count; i += 8) out[block * 8 + i / 8] = (i < 32 ? low : high) >> i % 32;
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void signs(const u8* __restrict__ data, const void* __restrict__, u8* __restrict__ out, i64 numel,
                                                               i64 scales_at, i64 row_bytes, u32 stride, int factor) {
    // A warp's tables are a page, so that bytes make its addresses.
    const u32 lane = threadIdx.x % 32, page = (shared_address(memory) + PAGE - 1) / PAGE + threadIdx.x / 32;
    const i64 blocks = (numel + 63) / 64, apart = i64(gridDim.x) * THREADS;
    Block it;
    fetch(data, i64(blockIdx.x) * THREADS + threadIdx.x, blocks, scales_at, stride, it);
    for (i64 block = i64(blockIdx.x) * THREADS + threadIdx.x; block < blocks; block += apart) {
        const int count = min(numel - block * 64, i64(64));
        u32 codes[2];
        float mean;
        bool finite = true;
        if (count == 64 && exact(it.scales)) {
            fill_table<0, EARLY_RANKS>(it.scales, page * PAGE + lane * 4);
            if (LATE) fill_table<RANKS - LATE, (LATE ? LATE : 1)>(it.scales, page * PAGE + lane * 4 + 128);
            float sums[4] = {0, 0, 0, 0};
            u32 low[RANKS], high[RANKS];
#pragma unroll
            for (int rank = 0; rank < RANKS; ++rank) low[rank] = it.words[rank].x, high[rank] = it.words[rank].y;
            fetch(data, block + apart, blocks, scales_at, stride, it);
            codes[0] = half_block(low, page, lane, factor, sums), codes[1] = half_block(high, page, lane, factor, sums);
            mean = __fmul_rn(__fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3])), 0.015625f);
        } else {
            const double all = sum_slowly(it, count, factor, codes);
            finite = all < __longlong_as_double(0x7FF0000000000000);
            mean = all / count;
            fetch(data, block + apart, blocks, scales_at, stride, it);
        }
        store(out, block, count, scales_at, mean, finite, codes);
    }
    const i64 codes_end = (numel + 7) / 8, end = scales_at + blocks * 2;
    if (blockIdx.x == 0 && threadIdx.x < 16) {
        if (codes_end + threadIdx.x < scales_at) out[codes_end + threadIdx.x] = 0;
        if (end + threadIdx.x < row_bytes) out[end + threadIdx.x] = 0;
    }
}
