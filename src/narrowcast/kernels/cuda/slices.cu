// y = x W^T + bias for up to 8 TILES rows of x and rows of 4- and 8-bit codes, on tensor cores; the arithmetic of tile.cu.
//
// A block keeps one slice of x's columns in shared memory, in the order in which lanes want it, and walks down W: after that no
// warp waits for another. A warp takes TALL times sixteen rows at a time; its codes come through a ring of its own, STAGES
// chunks of 64 bytes of each row, so that many bytes are on their way and none is in a register.
//
// Scales come 16 bytes of a row at a time, the last SPANS of them, since a few bytes cost as much.
//
//   TILES  eights of rows of x.   TALL  sixteens of rows of W, 1 or 2.   KS  warps.   STAGES  chunks in a ring
//   TEAM   warps that take neighbouring rows at the same time. 4: Hopper's wgmma, which reads x where it lies; 1: mma
//   WHOLE  1: a row is a whole number of chunks
//   SPLIT  1: x has more slices than one, y is fp32 [slices, batch, n], and total.cu adds its slices up, in order
//
// Sums have a fixed order: a warp adds the chunks of its slice up one after the other.

constexpr int LANE = NARROW ? 32 : 16;  // elements of a row that one lane takes in one chunk: 16 bytes
constexpr int CHUNK = 4 * LANE;
constexpr int GROUPS = BLOCK == 0 || BLOCK >= CHUNK ? 1 : CHUNK / BLOCK;  // blocks in a chunk: 1, 2 or 4
constexpr int UNITS = LANE / 8 / GROUPS;                                  // of a lane, in one of these
constexpr int EIGHTS = 2 * TALL, HEIGHT = 16 * TALL * TEAM;
constexpr int STAGE = EIGHTS * 512;
constexpr int SPANS = 4, SPAN = (16 / SCALE_BYTES) * (BLOCK > CHUNK ? BLOCK / CHUNK : 1) / GROUPS;  // chunks of 16 bytes of scales
static_assert(STAGES <= SPANS, "scales are overwritten before they are used");
constexpr int WIDTH = BLOCK ? BLOCK : 1, NEAR = TILES < 4 ? TILES : 4;

// In a warp, lane 4 g + t has rows g of all eights. It copies bytes 16 t to 16 t + 15 of each row's chunk, and reads its part of
// each block of a chunk: a stage has [eight][block][row][byte], so that neither meets a bank twice.
extern "C" __global__ __launch_bounds__(KS * 32, 1) void slices(const u8* __restrict__ w, const u16* x, void* __restrict__ y,
                                                                const void* bias, const u32* __restrict__ levels,
                                                                int batch, int n, int k, i64 stride, int scales, i64 x_stride,
                                                                int parts) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = (k + CHUNK - 1) / CHUNK, per = (chunks + parts - 1) / parts, tiles = (n + HEIGHT - 1) / HEIGHT;
    const int slice = blockIdx.x % parts, first = slice * per, mine = min(per, chunks - first);
    const int many = gridDim.x / parts * (KS / TEAM), begin = warp / TEAM * (gridDim.x / parts) + blockIdx.x / parts;
    const int own = warp % TEAM * (16 * TALL) + g;  // the first of a lane's rows in a tile
    u8* const ring = (u8*)(shared + per * (GROUPS * UNITS * TILES * 32)) + warp * (STAGES * STAGE + (BLOCK ? SPANS * EIGHTS * 128 : 0));
    u8* const held = ring + STAGES * STAGE;
    const int place = t * GROUPS / 4 * (512 / GROUPS) + g * (64 / GROUPS) + t % (4 / GROUPS) * 16;
    const u64 policy = used_once();
    int next = begin, chunk = 0, fetched = 0;  // what is read next: STAGES - 1 chunks before it is used
    const u8* rows[EIGHTS];
    auto locate = [&]() {
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) rows[j] = w + min(next * HEIGHT + own + j * 8, n - 1) * stride + first * 64 + t * 16;
    };
    auto fetch = [&](int slot) {
        if (next < tiles) {
            u8* const to = ring + slot * STAGE;
            const bool some = WHOLE || (first + chunk) * 64 + t * 16 < (NARROW ? k / 2 : k);  // past the row's end, zeros
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) copy16(to + j * 512 + place, some ? rows[j] : w, some, policy), rows[j] += 64;
            if (BLOCK && (chunk == 0 || (first + chunk) % SPAN == 0)) {
#pragma unroll
                for (int j = t; j < EIGHTS; j += 4)
                    copy16(held + (fetched * EIGHTS + j) * 128 + g * 16,
                           w + min(next * HEIGHT + own + j * 8, n - 1) * stride + scales + (first + chunk) / SPAN * 16, true, policy);
                fetched = (fetched + 1) % SPANS;
            }
        }
        end_lot();
        if (++chunk == mine) chunk = 0, next += many, locate();
    };
    admit_the_next();
    if (!READ_WEIGHTS_EARLY) after_the_last();
    locate();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
#if CODES >= 2
    fill_table(levels, KS * 32);
#endif
    if (READ_WEIGHTS_EARLY) after_the_last();
    // A warp takes eight rows of x in one block or chunk, a lane what it will want.
#pragma unroll 4
    for (int i = warp; i < TILES * mine * GROUPS; i += KS) {
        const int row = i % TILES * 8 + g, at = (first * GROUPS + i / TILES) * (CHUNK / GROUPS) + t * (8 * UNITS);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row < batch && at + u * 8 < k) v = x_pairs(*(const uint4*)(x + row * x_stride + at + u * 8));
            uint4* const unit = shared + (i / TILES * UNITS + u) * (TILES * 32);
#if TEAM == 4  // [unit][mma][half of its k][row of x][lane's pair]
            u32* const to = (u32*)unit + row * 4 + t;
            to[0] = v.x, to[TILES * 32] = v.y, to[TILES * 64] = v.z, to[TILES * 96] = v.w;
#else  // [unit][eight rows of x][lane]
            unit[i % TILES * 32 + lane] = v;
#endif
        }
    }
    show_tensor_cores();
    __syncthreads();
#if TEAM == 4
    const Place xs = place_of<8 * TILES>(shared);
#endif
    const u32 top = k ? TOP : 0;
    int slot = 0, span = SPANS - 1;
    for (int tile = begin; tile < tiles; tile += many) {
        float total[TALL][TILES * 4] = {}, sum[TALL][TILES * 4] = {};  // of a block, where it has a scale of its own
        for (int c = 0; c < mine; ++c) {
            await_lots<STAGES - 2>();
            __syncwarp();  // what other lanes copied; and all have read what is written next
            fetch(slot ? slot - 1 : STAGES - 1);
            const u8* const from = ring + slot * STAGE;
            slot = slot + 1 < STAGES ? slot + 1 : 0;
            if (BLOCK && (c == 0 || (first + c) % SPAN == 0)) span = (span + 1) % SPANS;
#pragma unroll
            for (int b = 0; b < GROUPS; ++b) {
                if (GROUPS > 1 && (first + c) * CHUNK + b * WIDTH >= k) continue;
                u32 words[EIGHTS][4 / GROUPS];
#pragma unroll
                for (int j = 0; j < EIGHTS; ++j) {
                    const u8* const part = from + j * 512 + b * (512 / GROUPS) + lane * (16 / GROUPS);
#pragma unroll
                    for (int i = 0; i < 4 / GROUPS; ++i) words[j][i] = ((const u32*)part)[i];
                }
                const int before = (c * GROUPS + b) * UNITS;  // units of x
                float(*const all)[TILES * 4] = BLOCK ? sum : total;
#if TEAM == 4
#pragma unroll
                for (int m = 0; m < TALL; ++m) {  // while the products of one m run, the next is decoded
                    u32 p[UNITS][2][4];
                    await_products<TALL - 1>(all[m]);  // which read the registers that are written next
#pragma unroll
                    for (int u = 0; u < UNITS; ++u)
#pragma unroll
                        for (int j = 0; j < 2; ++j) pairs(words[2 * m + j] + (NARROW ? u : 2 * u), lane, p[u][j], top);
                    begin_products();
#pragma unroll
                    for (int u = 0; u < UNITS; ++u)
#pragma unroll
                        for (int i = 0; i < 4; i += 2)
                            wgmma(all[m], p[u][0][i], p[u][1][i], p[u][0][i + 1], p[u][1][i + 1],
                                  further(xs, (before + u) * (TILES * 32) + i * (TILES * 8)), !(BLOCK && u == 0 && i == 0));
                    end_products();
                }
#else
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    u32 p[EIGHTS][4];
#pragma unroll
                    for (int j = 0; j < EIGHTS; ++j) pairs(words[j] + (NARROW ? u : 2 * u), lane, p[j], top);
#pragma unroll
                    for (int i = 0; i < TILES; i += NEAR) {
                        uint4 v[NEAR];
#pragma unroll
                        for (int e = 0; e < NEAR && i + e < TILES; ++e) v[e] = shared[((before + u) * TILES + i + e) * 32 + lane];
#pragma unroll
                        for (int e = 0; e < NEAR && i + e < TILES; ++e)
#pragma unroll
                            for (int m = 0; m < TALL; ++m)
                                mma(all[m] + 4 * (i + e), p[2 * m][0], p[2 * m + 1][0], p[2 * m][1], p[2 * m + 1][1],
                                    v[e].x, v[e].y);
#pragma unroll
                        for (int e = 0; e < NEAR && i + e < TILES; ++e)
#pragma unroll
                            for (int m = 0; m < TALL; ++m)
                                mma(all[m] + 4 * (i + e), p[2 * m][2], p[2 * m + 1][2], p[2 * m][3], p[2 * m + 1][3],
                                    v[e].z, v[e].w);
                    }
                }
#endif
                if (BLOCK && (TEAM == 4 || BLOCK <= CHUNK || c + 1 == mine || (first + c + 1) * CHUNK % WIDTH == 0)) {
                    const int at = ((first + c) * CHUNK + b * BLOCK) / WIDTH % (16 / SCALE_BYTES) * SCALE_BYTES;
#pragma unroll
                    for (int j = 0; j < EIGHTS; ++j) {
#if TEAM == 4
                        if (j == 0) await_products<TALL - 1>(sum[0]);
                        if (j == 2) await_products<0>(sum[TALL - 1]);
#endif
                        const float scale = scale_here(held + (span * EIGHTS + j) * 128 + g * 16 + at);
#pragma unroll
                        for (int i = 0; i < TILES; ++i)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int to = i * 4 + j % 2 * 2 + e;
                                total[j / 2][to] = fmaf(sum[j / 2][to], scale, total[j / 2][to]);
                                if (TEAM == 1) sum[j / 2][to] = 0;
                            }
                    }
                }
            }
        }
#if TEAM == 4
#pragma unroll
        for (int m = 0; m < TALL; ++m) await_products<0>(total[m]);
#endif
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            const int row = tile * HEIGHT + own + j * 8;
            if (row >= n) continue;
            const float scale = BLOCK ? 1.0f : scale_at(w + row * stride + scales, 0);
#pragma unroll
            for (int i = 0; i < TILES * 2; ++i) {
                const int column = i / 2 * 8 + 2 * t + i % 2;
                if (column >= batch) continue;
                const float one = total[j / 2][i / 2 * 4 + j % 2 * 2 + i % 2] * scale;
                if (SPLIT) ((float*)y)[(i64(slice) * batch + column) * n + row] = one;
                else store(y, i64(column) * n + row, with_bias(one, bias, row));
            }
        }
    }
    await_lots<0>();
}
