// y = x W^T + bias for one row of x and rows of 4- and 8-bit codes, on Hopper: tensor cores, and codes by the copy engine.
//
// Blocks share the rows of W out, as many to each or one more, and take eight at a time: a tile, which lies in memory as one piece,
// with scales and gaps. The last warp, the sender, has tiles copied into a ring of STAGES in shared memory; KS other warps multiply,
// each every KS-th pair of chunks of the rows. They wait for the ring alone, so that memory is read while they work, and, where
// weights may be read early, while the kernel before this one ends.
//
// In a warp, lane 4 g + t has row g, elements [t * LANE, (t + 1) * LANE) of two chunks. Rows of A in mma.m16n8k16 are the eight rows
// in one chunk and then the same rows in the other; columns 0 to 3 of B are x in the first chunk and 4 to 7 in the second. Where a
// chunk holds two blocks (GROUPS), every other two columns are x in one block and zero in the other. So each lane finds one
// block's sum: of row g, in columns 2 t and on. Odd rows may have their chunks the other way around, to read from other banks.
// A warp has the same EACH pairs of every row, so it holds their x in registers.
//
// Sums have a fixed order: a warp's chunks one after the other, a row's blocks as a tree, and the warps' sums in order.

constexpr int LANE = NARROW ? 32 : 16, CHUNK = 4 * LANE, UNITS = LANE / 8;  // elements; eights of them: two mma
constexpr int GROUPS = BLOCK == 0 || BLOCK >= CHUNK ? 1 : CHUNK / BLOCK;     // blocks in a chunk
constexpr int THREADS = KS * 32 + 32;
static_assert(GROUPS <= 2, "a chunk holds too many blocks");
static_assert(BLOCK || !SCALE, "rows with one scale are not for this kernel");

// Where the rows of a block begin.
__device__ __forceinline__ int first_row(int n, u32 block) { return u64(u32(n)) * block / gridDim.x; }

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void ring(const u8* __restrict__ w, const u16* x, void* __restrict__ y,
                                                                     const void* bias, const u32* __restrict__ levels, int n,
                                                                     int k, int stride, int row_bytes, int scales) {
    extern __shared__ __align__(1024) uint4 shared[];
    const int lane = threadIdx.x & 31, part = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int first = first_row(n, blockIdx.x), rows = first_row(n, blockIdx.x + 1) - first, tile = 8 * stride;
    u8* const tiles = (u8*)shared + TABLE;
    Gate *const full = (Gate*)(tiles + STAGES * tile), *const empty = full + STAGES;
    float(*const sums)[KS] = (float(*)[KS])(empty + STAGES);  // [rows, to whole tiles]
    admit_the_next();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) set_gate(full + i, 1), set_gate(empty + i, KS);
        show_gates();
    }
    if (!READ_WEIGHTS_EARLY) after_the_last();
    __syncthreads();
    int slot = 0;
    u32 phase = 0;
    if (part == KS) {
        for (int row = 0; row < rows && lane == 0; row += 8) {
            const int bytes = min(7, rows - row - 1) * stride + row_bytes;  // no gap behind the last
            await_gate(empty + slot, phase ^ 1);
            expect(full + slot, bytes);
            copy_line(tiles + slot * tile, w + i64(first + row) * stride, bytes, full + slot);
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
        if (READ_WEIGHTS_EARLY) after_the_last();
    } else {
        fill_table(shared, levels, KS * 32);
        if (READ_WEIGHTS_EARLY) after_the_last();
        const bool mine = GROUPS == 1 || t / 2 == g / 2 % 2;  // whether x is not zero in this column
        uint4 xs[EACH][UNITS] = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                if (mine) xs[i][u] = x_pairs(*(const uint4*)(x + (2 * (part + i * KS) + g / 4) * CHUNK + t * LANE + u * 8));
        if (TABLE) meet(1, KS * 32);
        const int other = stride % 128 ? 0 : g & 1;  // which chunk comes first in this row
        const bool below = (t >> 1) != other;        // the sum is in the lower rows of the product
        const int of_block = (t >> 1) * CHUNK + (GROUPS == 1 ? 0 : t % 2 * (CHUNK / 2));
        const u8* const own = tiles + g * stride;
        for (int row = 0; row < rows; row += 8) {
            float total = 0;
            const u8* const here = own + slot * tile;
            await_gate(full + slot, phase);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int pair = part + i * KS;
                const u8* const codes = here + pair * 128 + t * 16;
                const uint4 upper = *(const uint4*)(codes + other * 64), lower = *(const uint4*)(codes + 64 - other * 64);
                const float scale = BLOCK ? scale_here(here + scales + (pair * 2 * CHUNK + of_block) / (BLOCK ? BLOCK : 1) * SCALE_BYTES) : 1;
                float sum[4] = {}, odd[4] = {};  // two sums, since one waits for its last mma
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    const uint4 v = xs[i][u];
                    u32 a[4], b[4];
                    decode(&upper.x + (NARROW ? u : 2 * u), lane, shared, a);
                    decode(&lower.x + (NARROW ? u : 2 * u), lane, shared, b);
                    mma(sum, a[0], b[0], a[1], b[1], v.x, v.y);
                    mma(odd, a[2], b[2], a[3], b[3], v.z, v.w);
                }

                const float both = below ? sum[2] + odd[2] : sum[0] + odd[0];
                total = BLOCK ? fmaf(both, scale, total) : total + both;
            }
            __syncwarp();
            if (lane == 0) pass(empty + slot);
            if (++slot == STAGES) slot = 0, phase ^= 1;
            if (GROUPS == 2) total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (t == 0) sums[row + g][part] = total;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        float all = 0;
#pragma unroll
        for (int p = 0; p < KS; ++p) all += sums[i][p];
        store(y, first + i, with_bias(all * UNIT, bias, first + i));
    }
}
