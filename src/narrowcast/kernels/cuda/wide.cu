// y = x W^T + bias for many rows of x and rows of 4- and 8-bit codes, on Hopper's wgmma.
//
// A job is a tile of HEIGHT rows of W and WIDTH rows of x, along all of k or a part of it. Codes and x come to shared memory by
// asynchronous copies, STEP elements of k at a time, STAGES of them in a ring. Two teams of four warps decode codes into registers,
// which is where wgmma takes them from; x it reads where it lies. While the products of sixteen elements run, the next
// are decoded.
//
//   TILES   eights of rows of x: 8, 16 or 32.   TALL  sixty-fours of rows of W that a team takes: 1 or 2
//   STEP    64 or 128 elements.   STAGES  of a ring, at least 3.   RESIDENT  blocks that a processor should hold
//
// Jobs 0 to `whole` - 1 are tiles whole; after them each tile is `parts` jobs, whose sums go to `sums` [job][WIDTH][HEIGHT] and are
// added up, in order, by join.cu. With `parts` 1 there is none. Tiles that share rows of W follow each other.

constexpr int TEAMS = 2, THREADS = TEAMS * 128, WIDTH = 8 * TILES, HEIGHT = 64 * TALL * TEAMS;
constexpr int PIECES = (NARROW ? STEP / 2 : STEP) / 16, X_PIECES = STEP / 8;  // sixteen bytes of a row of W, of x
constexpr int ROW_GAP = 128 / PIECES;                                         // so that copies of one row meet other banks
constexpr int APART = HEIGHT * 16 + ROW_GAP, PANEL = WIDTH * 128;             // bytes from piece to piece; 64 of k of x
constexpr int OF_X = STEP / 64 * PANEL, STAGE = (OF_X + PIECES * APART + 1023) / 1024 * 1024, LEAD = STAGES - 2;
constexpr int COPIES_OF_W = HEIGHT * PIECES / THREADS, COPIES_OF_X = WIDTH * X_PIECES / THREADS;
constexpr int GROUPS = BLOCK && BLOCK < STEP ? STEP / BLOCK : 1, EACH = STEP / GROUPS;  // blocks in a step, and elements of one there
constexpr int HALVES_OF_PIECE = NARROW ? 2 : 1;
constexpr int PITCH = HEIGHT * 2 + 16, RESULTS = WIDTH * PITCH;  // of a row of y in shared memory, at the end of the ring
constexpr int FREE = STAGES * STAGE > RESULTS ? (STAGES * STAGE - RESULTS) / STAGE : 0, SOON = FREE < LEAD ? FREE : LEAD;
constexpr int RESULTS_AT = STAGES * STAGE > RESULTS ? STAGES * STAGE - RESULTS : 0;
static_assert(!BLOCK || BLOCK % STEP == 0 || (STEP % BLOCK == 0 && BLOCK % 16 == 0), "a step is not whole blocks, nor a part of one");

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void wide(const u8* __restrict__ w, const u16* __restrict__ x,
                                                                     u16* __restrict__ y, const void* __restrict__ bias,
                                                                     const u32* __restrict__ levels, float* __restrict__ sums,
                                                                     int batch, int n, int k, u32 stride, u32 scales, u32 x_stride,
                                                                     int columns, int whole, int parts) {
    extern __shared__ __align__(1024) uint4 shared[];
    u8 *const ring = (u8*)shared, *const results = ring + RESULTS_AT / 16 * 16;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    const int tiles = (n + HEIGHT - 1) / HEIGHT * columns, jobs = whole + (tiles - whole) * parts, steps = k / STEP;
    const int own = warp / 4 * (64 * TALL) + warp % 4 * 16 + g;  // the first of a lane's rows in a tile
    const int w_row = thread / PIECES, w_piece = thread % PIECES, x_row = thread / X_PIECES, x_piece = thread % X_PIECES;
    const Lane mine = lane_of(lane, k);
    const u32 top = k ? TOP : 0;
    admit_the_next();
    if (!READ_WEIGHTS_EARLY) after_the_last();
#if CODES >= 2
    fill_levels(levels, THREADS);
#endif
    struct Job {
        int split, first, count, row, column;  // parts of its tile; steps; where the tile begins
    };
    auto find = [&](int job) {
        const int tile = job < whole ? job : whole + (job - whole) / parts, part = job < whole ? 0 : (job - whole) % parts;
        const int split = job < whole ? 1 : parts, per = (steps + split - 1) / split, first = part * per;
        return Job{split, first, min(per, steps - first), tile / columns * HEIGHT, tile % columns * WIDTH};
    };
    auto copy_w = [&](const Job& job, int step, int slot) {
        u8* const to = ring + slot * STAGE + OF_X + w_piece * APART + w_row * 16;
        const u8* const from = w + (u32(job.first + step) * (PIECES * 16) + w_piece * 16);
#pragma unroll
        for (int i = 0; i < COPIES_OF_W; ++i) {
            const int down = i * (THREADS / PIECES);
            copy16(to + down * 16, from + u64(u32(min(job.row + w_row + down, n - 1))) * stride, true);
        }
    };
    auto copy_x = [&](const Job& job, int step, int slot) {
        u8* const to = ring + slot * STAGE + x_piece / 8 * PANEL + x_row * 128 + ((x_piece ^ x_row) & 7) * 16;
        const u16* const from = x + (u32(job.first + step) * STEP + x_piece * 8);
#pragma unroll
        for (int i = 0; i < COPIES_OF_X; ++i) {
            const int down = i * (THREADS / X_PIECES), at = job.column + x_row + down;
            copy16(to + down * 128, from + u64(u32(min(at, batch - 1))) * x_stride, at < batch);
        }
    };
    u32 bits[GROUPS][TALL][2];  // scales of the step after this one
    auto load_scales = [&](const Job& job, int step) {
#pragma unroll
        for (int i = 0; i < GROUPS * TALL * 2; ++i) {
            const int b = i / (2 * TALL), m = i / 2 % TALL, at = min(job.row + own + m * 64 + i % 2 * 8, n - 1);
            bits[b][m][i % 2] = scale_bits(w + u64(u32(at)) * stride + scales, u32(job.first + step) * STEP / (BLOCK ? BLOCK : 1) + b);
        }
    };
    // The first steps of a job, a lot each. Those before SOON are on their way while the results of the job before leave.
    auto begin = [&](const Job& job, int from, int to, bool with_w) {
        for (int i = from; i < to; ++i) {
            if (with_w && i < job.count) copy_w(job, i, i);
            if (i < job.count) copy_x(job, i, i);
            end_lot();
        }
    };
    Job job = find(blockIdx.x);
    for (int i = 0; i < LEAD; ++i)
        if (i < job.count) copy_w(job, i, i);
    if (BLOCK) load_scales(job, 0);
    if (READ_WEIGHTS_EARLY) after_the_last();
    begin(job, 0, LEAD, false);
    for (int number = blockIdx.x; number < jobs; number += gridDim.x) {
        float total[TALL][TILES * 4];
        u32 scale[GROUPS][TALL][2] = {};
        int slot = 0, next = LEAD;
        for (int step = 0; step < job.count; ++step) {
            await_lots<LEAD - 1>();
            show_tensor_cores();
            __syncthreads();  // all copies of this step are there; products of the step before the last are done
            if (BLOCK) {
#pragma unroll
                for (int i = 0; i < GROUPS * TALL * 2; ++i)
                    scale[i / (2 * TALL)][i / 2 % TALL][i % 2] = scale_of(bits[i / (2 * TALL)][i / 2 % TALL][i % 2]);
                if (step + 1 < job.count) load_scales(job, step + 1);
            }
            const u8* const from = ring + slot * STAGE + OF_X + own * 16;
            const Place xs = place_of_lines(ring + slot * STAGE);
            u32 words[2][TALL][2][WORDS], a[2][TALL][4];
            auto load_piece = [&](int piece) {
#pragma unroll
                for (int i = 0; i < TALL * 2; ++i)
                    load_words(from + piece * APART + (i / 2 * 64 + i % 2 * 8) * 16, t, words[piece % 2][i / 2][i % 2]);
            };
            load_piece(0);
#pragma unroll
            for (int s = 0; s < STEP / 16; ++s) {
                const int piece = s / HALVES_OF_PIECE, half = s % HALVES_OF_PIECE, block = s * 16 / EACH, b = s % 2;
                if (half == 0 && piece + 1 < PIECES) load_piece(piece + 1);
                await_operands<1>();  // which leaves `a[b]`
#pragma unroll
                for (int i = 0; i < TALL * 2; ++i)
                    decode(words[piece % 2][i / 2][i % 2], half, mine, scale[block][i / 2][i % 2], top, a[b][i / 2][i % 2],
                           a[b][i / 2][i % 2 + 2]);
                begin_products();
#pragma unroll
                for (int m = 0; m < TALL; ++m)
                    wgmma(total[m], a[b][m][0], a[b][m][1], a[b][m][2], a[b][m][3], further(xs, s / 4 * (PANEL / 16) + s % 4 * 2),
                          step > 0 || s > 0);
                end_products();
                if (s == 1) {
                    if (step + LEAD < job.count) copy_w(job, step + LEAD, next), copy_x(job, step + LEAD, next);
                    end_lot();
                }
            }
            slot = slot + 1 < STAGES ? slot + 1 : 0, next = next + 1 < STAGES ? next + 1 : 0;
        }
#pragma unroll
        for (int m = 0; m < TALL; ++m) await_products<0>(total[m]);
        await_lots<0>();
        __syncthreads();  // the ring is free
        const Job done = job;
        const bool more = number + int(gridDim.x) < jobs;
        if (more) {
            job = find(number + gridDim.x);
            begin(job, 0, SOON, true);
            if (BLOCK) load_scales(job, 0);
        }
        float row_scale[TALL][2], row_bias[TALL][2];
#pragma unroll
        for (int i = 0; i < TALL * 2; ++i) {
            const int at = min(done.row + own + i / 2 * 64 + i % 2 * 8, n - 1);
            row_scale[i / 2][i % 2] = BLOCK ? 1.0f : scale_at(w + u64(u32(at)) * stride + scales, 0);
            row_bias[i / 2][i % 2] = done.split > 1 ? 0.0f : with_bias(0.0f, bias, at);
        }
        if (done.split > 1) {
            float* const to = sums + i64(number - whole) * (WIDTH * HEIGHT) + own;
#pragma unroll
            for (int m = 0; m < TALL; ++m)
#pragma unroll
                for (int i = 0; i < TILES * 4; ++i)
                    to[(i / 4 * 8 + 2 * t + i % 2) * HEIGHT + m * 64 + i % 4 / 2 * 8] = total[m][i] * row_scale[m][i % 4 / 2];
            if (more) begin(job, SOON, LEAD, true);
            continue;
        }
#pragma unroll
        for (int m = 0; m < TALL; ++m)
#pragma unroll
            for (int i = 0; i < TILES; i += 2) {
                u32 p[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = (i + j / 2) * 4 + j % 2 * 2;
                    p[j] = pair_of(fmaf(total[m][at], row_scale[m][j % 2], row_bias[m][j % 2]),
                                   fmaf(total[m][at + 1], row_scale[m][j % 2], row_bias[m][j % 2]));
                }
                store_turned(results + (i * 8 + lane / 16 * 8 + lane % 8) * PITCH + (own - g + m * 64 + lane / 8 % 2 * 8) * 2, p[0], p[1],
                             p[2], p[3]);
            }
        __syncthreads();
        for (int i = thread; i < WIDTH * (HEIGHT / 8); i += THREADS) {
            const int at = i / (HEIGHT / 8), down = i % (HEIGHT / 8) * 8;
            if (done.column + at < batch && done.row + down < n)
                *(uint4*)(y + i64(done.column + at) * n + done.row + down) = *(const uint4*)(results + at * PITCH + down * 2);
        }
        __syncthreads();
        if (more) begin(job, SOON, LEAD, true);
    }
}
