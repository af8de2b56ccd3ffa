// y = x W^T + bias for a few rows of x and rows of 4- and 8-bit codes, on tensor cores.
//
// Sixteen rows of W are the A operand of mma.m16n8k16, eight rows of x the B operand. Codes become halves of x's kind exactly
// (levels: rounded once), sums run in fp32, scales are applied to sums of blocks. Which element of a row takes which place in
// an mma does not matter as long as x takes the same: so lanes read their bytes as they come.
//
//   WIDE   bytes of a row that a lane reads at a time.   TALL  sixteens of rows.   TILES  eights of rows of x, 0: one row
//
// Sums have a fixed order: a warp takes every KS-th chunk of a row, and the warps' sums are added in order.

constexpr int LANE = WIDE * (NARROW ? 2 : 1);        // elements of a row that one lane takes in one chunk: WIDE bytes
constexpr int CHUNK = 4 * LANE;
constexpr int UNITS = LANE / 8;                      // eight elements are a unit: two mma
constexpr int GROUPS = BLOCK == 0 || BLOCK >= CHUNK ? 1 : CHUNK / BLOCK;  // blocks in a chunk; above 1 for one column only

struct Codes {
    u32 word[WIDE / 4];
};

__device__ __forceinline__ void load(Codes& c, const u8* p) {
    if (WIDE == 16) {
        const uint4 v = stream16(p);
        c.word[0] = v.x, c.word[1 % (WIDE / 4)] = v.y, c.word[2 % (WIDE / 4)] = v.z, c.word[3 % (WIDE / 4)] = v.w;
    } else if (WIDE == 8) {
        const uint2 v = __ldcs((const uint2*)p);
        c.word[0] = v.x, c.word[1 % (WIDE / 4)] = v.y;
    } else {
        c.word[0] = __ldcs((const u32*)p);
    }
}

// What a lane reads in one chunk: of two rows out of every sixteen.
struct Stage {
    Codes codes[TALL][2];
    u32 scale[TALL][2];  // as it lies in memory
};

// A team of KS warps takes TALL times sixteen rows at a time, each warp every KS-th chunk. In a warp, lane 4 g + t reads rows g
// and g + 8 of every sixteen, elements [t * LANE, (t + 1) * LANE) of the chunk. TILES 0: x lies in shared memory, and all
// eight columns of B are the same x, or, where a chunk holds GROUPS blocks, 8 / GROUPS columns are x in one block and zero in the
// others, so that the sums of blocks come apart. Else x comes through L1, eight rows of it to a tile.
extern "C" __global__ __launch_bounds__(KS * 32, RESIDENT / (KS * 32)) void tile(const u8* __restrict__ w, const u16* x,
                                                                                void* __restrict__ y, const void* bias,
                                                                                const u32* __restrict__ levels, int batch, int n,
                                                                                int k, i64 stride, int scales, i64 x_stride) {
    constexpr int HEIGHT = 16 * TALL, WIDTH = TILES ? 8 * TILES : 1, COLUMNS = TILES ? TILES : 1;
    extern __shared__ uint4 shared[];
    float(*sums)[KS][HEIGHT][WIDTH] = (float(*)[KS][HEIGHT][WIDTH])shared;  // two turns of them
    uint4* xs = shared + 2 * KS * HEIGHT * WIDTH / 4;
    const int lane = threadIdx.x & 31, part = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = (k + CHUNK - 1) / CHUNK, tiles = (n + HEIGHT - 1) / HEIGHT;
    const int steps = (chunks + KS * AHEAD - 1) / (KS * AHEAD) * AHEAD;
    int next = blockIdx.x, chunk = part;  // what is read next: AHEAD chunks before it is used
    const u8* rows[TALL][2];
    auto locate = [&]() {
#pragma unroll
        for (int m = 0; m < TALL; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) rows[m][i] = w + min(next * HEIGHT + m * 16 + i * 8 + g, n - 1) * stride;
    };
    auto fetch = [&](Stage& stage) {
        const u32 at = chunk * CHUNK + t * LANE, block = (GROUPS == 1 ? chunk * CHUNK : at) / (BLOCK ? BLOCK : 1);
        if (next < tiles && chunk < chunks) {
#pragma unroll
            for (int m = 0; m < TALL; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    // Past the row's end x is zero, and what it meets must not be a NaN left from another row.
                    if (at < u32(k)) load(stage.codes[m][i], rows[m][i] + at / (NARROW ? 2 : 1));
                    else stage.codes[m][i] = Codes{};
                    if (BLOCK) stage.scale[m][i] = GROUPS == 1 || at < u32(k) ? scale_bits(rows[m][i] + scales, block) : 0;
                }
        }
        chunk += KS;
        if (chunk >= steps * KS) chunk = part, next += gridDim.x, locate();
    };
    admit_the_next();
    if (!READ_WEIGHTS_EARLY) after_the_last();
    locate();
    Stage stages[AHEAD] = {};
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(stages[i]);
#if CODES >= 2
    fill_table(levels, KS * 32);
#endif
    if (READ_WEIGHTS_EARLY) after_the_last();
    if (!TILES) {  // x in the order in which lanes want it, zeros to the chunk's end, and one chunk of zeros
#pragma unroll 4
        for (int i = threadIdx.x; i < (chunks + 1) * (CHUNK / 8); i += KS * 32) {
            const int at = i / (CHUNK / 8) * CHUNK + (i % 4) * LANE + i % (CHUNK / 8) / 4 * 8;
            xs[i] = at < k ? x_pairs(*(const uint4*)(x + at)) : make_uint4(0, 0, 0, 0);
        }
    }
    if (CODES >= 2 || !TILES) __syncthreads();
    const bool mine = GROUPS == 1 || t * GROUPS / 4 == g * GROUPS / 8;
    int turn = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        float total[TALL][COLUMNS][4] = {};
        for (int step = 0; step < steps; step += AHEAD) {
#pragma unroll
            for (int ahead = 0; ahead < AHEAD; ++ahead) {
                const Stage now = stages[ahead];
                fetch(stages[ahead]);
                const int c = part + (step + ahead) * KS, at = c * CHUNK + t * LANE;
                if (c >= chunks) continue;
                float sum[TALL][COLUMNS][4] = {}, odd[TALL][4] = {};  // one column: two sums, since one waits for its last mma
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    uint4 v[COLUMNS] = {};
#pragma unroll
                    for (int i = 0; i < COLUMNS; ++i) {
                        const u16* column = x + min(i * 8 + g, batch - 1) * x_stride + at + u * 8;
                        if (!TILES) v[i] = xs[(mine ? c : chunks) * (CHUNK / 8) + u * 4 + t];
                        else if (at < k) v[i] = x_pairs(*(const uint4*)column);
                    }
#pragma unroll
                    for (int m = 0; m < TALL; ++m) {
                        u32 p[4], q[4];
                        pairs(now.codes[m][0].word + (NARROW ? u : 2 * u), lane, p);
                        pairs(now.codes[m][1].word + (NARROW ? u : 2 * u), lane, q);
#pragma unroll
                        for (int i = 0; i < COLUMNS; ++i) {
                            float* one = BLOCK ? sum[m][i] : total[m][i];
                            mma(one, p[0], q[0], p[1], q[1], v[i].x, v[i].y);
                            mma(BLOCK && !TILES ? odd[m] : one, p[2], q[2], p[3], q[3], v[i].z, v[i].w);
                        }
                    }
                }
                if (BLOCK) {
#pragma unroll
                    for (int m = 0; m < TALL; ++m)
#pragma unroll
                        for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                const float all = TILES ? sum[m][i][j] : sum[m][i][j] + odd[m][j];
                                total[m][i][j] = fmaf(all, scale_value(now.scale[m][j / 2]), total[m][i][j]);
                            }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < TALL; ++m)
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float one = total[m][i][j];
                    if (!TILES && j % 2) continue;
                    if (GROUPS >= 4) one += __shfl_xor_sync(~0u, one, 1);
                    if (GROUPS >= 2) one += __shfl_xor_sync(~0u, one, 2);
                    if (TILES || t == 0) sums[turn][part][m * 16 + j / 2 * 8 + g][TILES ? i * 8 + 2 * t + j % 2 : 0] = one;
                }
        __syncthreads();  // one for each turn will do: the other half of `sums` is written next
        for (int i = threadIdx.x; i < HEIGHT * WIDTH; i += KS * 32) {
            const int row = tile * HEIGHT + i % HEIGHT, column = i / HEIGHT;
            if (row < n && column < batch) {
                float all = 0;
#pragma unroll
                for (int p = 0; p < KS; ++p) all += sums[turn][p][i % HEIGHT][column];
                if (!BLOCK) all *= scale_at(w + row * stride + scales, 0);
                store(y, i64(column) * n + row, with_bias(all, bias, row));
            }
        }
    }
}
