// y = x W^T + bias for one row of x and rows of 4- and 8-bit codes, on Hopper: tensor cores, and codes by the copy engine.
//
// A block takes `height` rows of W, sixteen at a time. Its last warp, the sender, asks for their codes and scales, SPAN elements
// of each row at a time, into a ring of STAGES in shared memory; KS other warps multiply, each every KS-th chunk of a span. They wait
// for the ring alone, so that the memory is asked for more while they work, and, where weights may be read early, while the kernel
// before this one ends.
//
// In a warp, lane 4 g + t has rows g and g + 8 of the sixteen, elements [t * LANE, (t + 1) * LANE) of a chunk. They are the A operand
// of mma.m16n8k16. All eight columns of B are the same x, or, where a chunk holds GROUPS blocks, 8 / GROUPS columns are x in one
// block and zero in the others, so that the sums of blocks come apart.
//
// Sums have a fixed order: a warp's chunks one after the other, and the warps' sums in order.

constexpr int LANE = NARROW ? 32 : 16, CHUNK = 4 * LANE, UNITS = LANE / 8;  // elements; eights of them: two mma
constexpr int CHUNKS = SPAN / CHUNK / KS;                                    // that a warp has in a span
constexpr int GROUPS = BLOCK == 0 || BLOCK >= CHUNK ? 1 : CHUNK / BLOCK;     // blocks in a chunk
constexpr int LINE = NARROW ? SPAN / 2 : SPAN;                               // bytes of codes of a row in a stage
constexpr int SCALES = BLOCK ? ((SPAN + BLOCK - 1) / (BLOCK ? BLOCK : 1) * SCALE_BYTES + 15) / 16 * 16 : 0;  // of scales
constexpr int PITCH = (LINE + SCALES + 63) / 128 * 128 + 64;  // from row to row: lanes of two rows do not meet in a bank
constexpr int STAGE = 16 * PITCH, THREADS = KS * 32 + 32;
static_assert(SPAN % (CHUNK * KS) == 0, "warps have no whole chunks");

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void ring(const u8* __restrict__ w, const u16* __restrict__ x, void* __restrict__ y,
                                                                     const void* __restrict__ bias, const u32* __restrict__ levels, int n,
                                                                     int k, i64 stride, int scales, int height) {
    extern __shared__ __align__(1024) uint4 shared[];
    u8* const stages = (u8*)shared + TABLE;
    Gate *const full = (Gate*)(stages + STAGES * STAGE), *const empty = full + STAGES;
    float(*const sums)[KS] = (float(*)[KS])(empty + STAGES);  // [height, to whole sixteens]
    uint4* const xs = TABLE ? shared : (uint4*)(sums + (height + 15) / 16 * 16);
    const int lane = threadIdx.x & 31, part = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int first = blockIdx.x * height, rows = min(height, n - first), spans = (k + SPAN - 1) / SPAN;
    const int chunks = (k + CHUNK - 1) / CHUNK, steps = (rows + 15) / 16 * spans;
    const bool whole = spans == 1;  // then scales follow codes, as they do in memory
    admit_the_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) set_gate(full + i, 1), set_gate(empty + i, KS);
        show_gates();
    }
    if (!READ_WEIGHTS_EARLY) after_the_last();
    __syncthreads();
    int slot = 0;
    u32 turn = 0;
    if (part == KS) {
        for (int step = 0; step < steps; ++step) {
            const int tile = step / spans, span = step % spans, there = min(16, rows - tile * 16), codes = NARROW ? k / 2 : k;
            const int from = span * LINE, of_scales = BLOCK ? ((k + BLOCK - 1) / (BLOCK ? BLOCK : 1) * SCALE_BYTES + 15) / 16 * 16 : 0;
            const int line = min(LINE, codes - from), more = min(SCALES, of_scales - span * SCALES);
            await_gate(empty + slot, turn ^ 1);
            if (lane == 0) expect(full + slot, there * (line + more));
            __syncwarp();
            if (lane % 16 < there) {
                const u8* const row = w + (first + tile * 16 + lane % 16) * stride;
                u8* const to = stages + slot * STAGE + lane % 16 * PITCH;
                if (whole && lane < 16) copy_line(to, row, line + more, full + slot);
                if (!whole && lane < 16) copy_line(to, row + from, line, full + slot);
                if (!whole && lane >= 16 && BLOCK) copy_line(to + LINE, row + scales + span * SCALES, more, full + slot);
            }
            if (++slot == STAGES) slot = 0, turn ^= 1;
        }
        if (READ_WEIGHTS_EARLY) after_the_last();
    } else {
        fill_table(shared, levels, KS * 32);
        if (READ_WEIGHTS_EARLY) after_the_last();
        // x in the order in which lanes want it, zeros to the chunk's end, and one chunk of zeros
#pragma unroll 4
        for (int i = threadIdx.x; i < (chunks + 1) * (CHUNK / 8); i += KS * 32) {
            const int at = i / (CHUNK / 8) * CHUNK + (i % 4) * LANE + i % (CHUNK / 8) / 4 * 8;
            xs[place_of_x(i)] = at < k ? x_pairs(*(const uint4*)(x + at)) : make_uint4(0, 0, 0, 0);
        }
        meet(1, KS * 32);
        const bool mine = GROUPS == 1 || t * GROUPS / 4 == g * GROUPS / 8;
        for (int tile = 0; tile * 16 < rows; ++tile) {
            float total[4] = {};
            u32 flags[2] = {};
            for (int span = 0; span < spans; ++span) {
                const u8* const top = stages + slot * STAGE + g * PITCH;
                await_gate(full + slot, turn);
#pragma unroll
                for (int i = 0; i < CHUNKS; ++i) {
                    const int own = i * KS + part, c = span * (SPAN / CHUNK) + own, at = c * CHUNK + t * LANE;
                    if (c >= chunks) continue;
                    const u8* const p = top + own * 64 + t * 16;
                    uint4 codes[2] = {};  // past the row's end x is zero, and what it meets must not be a NaN
                    if (at < k) codes[0] = *(const uint4*)p, codes[1] = *(const uint4*)(p + 8 * PITCH);
                    float sum[4] = {}, odd[4] = {};  // two sums, since one waits for its last mma
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) {
                        const uint4 v = xs[place_of_x((mine ? c : chunks) * (CHUNK / 8) + u * 4 + t)];
                        u32 a[4], b[4];
                        decode(&codes[0].x + (NARROW ? u : 2 * u), lane, shared, a, flags[0]);
                        decode(&codes[1].x + (NARROW ? u : 2 * u), lane, shared, b, flags[1]);
                        mma(sum, a[0], b[0], a[1], b[1], v.x, v.y);
                        mma(odd, a[2], b[2], a[3], b[3], v.z, v.w);
                    }
#pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        float scale = 1;
                        if (BLOCK) {
                            const int block = (GROUPS == 1 ? own * CHUNK : own * CHUNK + t * LANE) / (BLOCK ? BLOCK : 1);
                            scale = GROUPS == 1 || at < k ? scale_here(top + j * 4 * PITCH + (whole ? scales : LINE) + block * SCALE_BYTES) : 0;
                        }
                        total[j] = BLOCK ? fmaf(sum[j] + odd[j], scale, total[j]) : total[j] + (sum[j] + odd[j]);
                    }
                }
                __syncwarp();
                if (lane == 0) pass(empty + slot);
                if (++slot == STAGES) slot = 0, turn ^= 1;
            }
            if (FLAGGED) mma(total, nans(flags[0]), nans(flags[1]), 0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                float one = total[j];
                if (GROUPS >= 4) one += __shfl_xor_sync(~0u, one, 1);
                if (GROUPS >= 2) one += __shfl_xor_sync(~0u, one, 2);
                if (t == 0) sums[tile * 16 + j * 4 + g][part] = one;
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        float all = 0;
#pragma unroll
        for (int p = 0; p < KS; ++p) all += sums[i][p];
        all *= UNIT;
        if (!BLOCK) all *= scale_at(w + (first + i) * stride + scales, 0);
        store(y, first + i, with_bias(all, bias, first + i));
    }
}
