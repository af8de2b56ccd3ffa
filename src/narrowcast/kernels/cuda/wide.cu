// y = x W^T + bias for many rows of x and rows of 4- and 8-bit codes, on Hopper's wgmma.
//
// A job is a tile of HEIGHT rows of W and WIDTH rows of x, along all of k or a part of it. One thread, the sender, asks for codes and x
// by tensor copies, STEP elements of k at a time, STAGES of them in a ring. Teams of four warps decode codes into registers, which is
// where wgmma takes them from; x it reads where it lies. While the products of sixteen elements run, the next are decoded. Teams wait
// for the ring alone and not for each other, so one decodes while another multiplies.
//
//   TILES  eights of rows of x.   TEAMS  of four warps, each with 64 rows of W.   STEP  64 or 128 elements.   STAGES  of the ring
//
// Jobs 0 to `whole` - 1 are tiles whole; after them each tile is `parts` jobs, whose sums go to `sums` as
// threads hold them, and are added up, in order, by join.cu. With `parts` 1 there is none. Tiles that share rows of W follow each other.

constexpr int SENDER = TEAMS * 4, THREADS = TEAMS * 128 + 128, WIDTH = 8 * TILES, HEIGHT = 64 * TEAMS;
constexpr int LINE = NARROW ? STEP / 2 : STEP, PIECES = LINE / 16;  // bytes of a row of W in a step; sixteens of them
constexpr int PANEL = WIDTH * 128, OF_X = STEP / 64 * PANEL;        // bytes of 64 elements of k of x; of all of a step
constexpr int STAGE = OF_X + HEIGHT * LINE;
constexpr int GROUPS = BLOCK && BLOCK < STEP ? STEP / BLOCK : 1, EACH = STEP / GROUPS;  // blocks in a step, and elements of one there
constexpr int HALVES_OF_PIECE = NARROW ? 2 : 1;
// Registers of a thread: of the sender, of all at the start, and of a team, which shares what the sender gives back.
constexpr int OF_SENDER = 24, AT_START = 65536 / THREADS / 8 * 8, SHARE = (AT_START * (TEAMS + 1) - OF_SENDER) / TEAMS / 8 * 8;
constexpr int REGISTERS = SHARE > 240 ? 240 : SHARE;
constexpr int PITCH = 64 * 2 + 16;  // of a row of a team's results
static_assert(!BLOCK || BLOCK % STEP == 0 || (STEP % BLOCK == 0 && BLOCK % 16 == 0), "a step is not whole blocks, nor a part of one");
static_assert(STAGE % 1024 == 0 && PIECES % 2 == 0, "a stage is not whole patterns of copies");

struct Job {
    int split, first, count, row, column;  // parts of its tile; steps; where the tile begins
};

extern "C" __global__ __launch_bounds__(THREADS, 1) void wide(const __grid_constant__ Map codes, const __grid_constant__ Map inputs,
                                                              u16* __restrict__ y, const void* bias,
                                                              const u32* __restrict__ levels, float4* __restrict__ sums,
                                                              const u8* __restrict__ w, int batch, int n, int k, u32 stride, u32 scales,
                                                              int columns, int whole, int parts) {
    extern __shared__ __align__(1024) uint4 shared[];
    u8* const ring = (u8*)shared;
    Gate *const full = (Gate*)(ring + STAGES * STAGE + TEAMS * WIDTH * PITCH), *const empty = full + STAGES;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int tiles = (n + HEIGHT - 1) / HEIGHT * columns, jobs = whole + (tiles - whole) * parts, steps = k / STEP;
    admit_the_next();
    if (thread == 0) {
        announce(codes), announce(inputs);
        for (int i = 0; i < STAGES; ++i) set_gate(full + i, 1), set_gate(empty + i, SENDER);
        show_gates();
    }
    if (!READ_WEIGHTS_EARLY) after_the_last();
#if CODES >= 2
    fill_levels(levels, THREADS);
#endif
    __syncthreads();
    auto find = [&](int job) {
        const int tile = job < whole ? job : whole + (job - whole) / parts, part = job < whole ? 0 : (job - whole) % parts;
        const int split = job < whole ? 1 : parts, per = (steps + split - 1) / split, first = part * per;
        return Job{split, first, min(per, steps - first), tile / columns * HEIGHT, tile % columns * WIDTH};
    };
    if (warp >= SENDER) {
        give_registers<OF_SENDER>();
        if (thread > SENDER * 32) return;
        auto send_codes = [&](const Job& job, int step, int slot) {
            expect(full + slot, STAGE);
            copy_box(ring + slot * STAGE + OF_X, codes, (job.first + step) * LINE, job.row, full + slot);
        };
        int slot = 0, ahead = 0;
        u32 phase = 1;
        if (READ_WEIGHTS_EARLY) {
            const Job job = find(blockIdx.x);
            for (; ahead < min(STAGES, job.count); ++ahead) send_codes(job, ahead, ahead);
            after_the_last();
        }
        for (int number = blockIdx.x; number < jobs; number += gridDim.x) {
            const Job job = find(number);
            for (int step = 0; step < job.count; ++step) {
                if (ahead) --ahead;
                else await_gate(empty + slot, phase), send_codes(job, step, slot);
                for (int i = 0; i < STEP / 64; ++i)
                    copy_box(ring + slot * STAGE + i * PANEL, inputs, (job.first + step) * STEP * 2 + i * 128, job.column, full + slot);
                if (++slot == STAGES) slot = 0, phase ^= 1;
            }
        }
        return;
    }
    take_registers<REGISTERS>();
    if (READ_WEIGHTS_EARLY) after_the_last();
    const int g = lane >> 2, t = lane & 3, team = warp / 4;
    const int own = warp * 16 + g;  // the first of a lane's rows in a tile
    const u32 turn = (LINE == 128 ? g : LINE == 64 ? g >> 1 : g >> 2) * 16 % LINE;  // how the copy exchanges sixteens of that row
    u8* const results = ring + STAGES * STAGE + team * (WIDTH * PITCH);
    const Lane mine = lane_of(lane, k);
    const u32 top = k ? TOP : 0;
    int slot = 0;
    u32 phase = 0;
    for (int number = blockIdx.x; number < jobs; number += gridDim.x) {
        const Job job = find(number);
        const int rows[2] = {min(job.row + own, n - 1), min(job.row + own + 8, n - 1)};
        const u8* const row_scales[2] = {w + u64(u32(rows[0])) * stride + scales, w + u64(u32(rows[1])) * stride + scales};
        u32 bits[GROUPS][2];  // scales of the step after this one
        Scale scale[GROUPS][2] = {};
        auto load_scales = [&](int step) {
            const u32 first = u32(job.first + step) * STEP / (BLOCK ? BLOCK : 1);
#pragma unroll
            for (int i = 0; i < GROUPS * 2; ++i) bits[i / 2][i % 2] = scale_bits(row_scales[i % 2], first + i / 2);
        };
        u32 words[2][2][WORDS], a[2][4];
        auto load_piece = [&](int from, int piece) {
            const u8* const at = ring + from * STAGE + OF_X + own * LINE + (piece * 16 ^ turn);
            load_words(at, t, words[piece % 2][0]), load_words(at + 8 * LINE, t, words[piece % 2][1]);
        };
        float total[TILES * 4];
        if (BLOCK) load_scales(0);
        await_gate(full + slot, phase);
        load_piece(slot, 0);
        for (int step = 0; step < job.count; ++step) {
            const int last = slot ? slot - 1 : STAGES - 1, next = slot + 1 < STAGES ? slot + 1 : 0;
            if (BLOCK) {
#pragma unroll
                for (int i = 0; i < GROUPS * 2; ++i) scale[i / 2][i % 2] = scale_of(bits[i / 2][i % 2]);
                if (step + 1 < job.count) load_scales(step + 1);
            }
            const Place xs = place_of_lines(ring + slot * STAGE);
#pragma unroll
            for (int s = 0; s < STEP / 16; ++s) {
                const int piece = s / HALVES_OF_PIECE, half = s % HALVES_OF_PIECE, block = s * 16 / EACH, b = s % 2;
                if (half == 0 && piece + 1 < PIECES) load_piece(slot, piece + 1);
                if (s == STEP / 16 - 2 && step + 1 < job.count) await_gate(full + next, next ? phase : phase ^ 1);
                if (half == 0 && piece + 1 == PIECES) load_piece(next, 0);  // of what was there before, at the end
                await_operands<1>();  // which leaves `a[b]`
                if (s == 1 && step > 0 && lane == 0) pass(empty + last);
#pragma unroll
                for (int i = 0; i < 2; ++i) decode(words[piece % 2][i], half, mine, scale[block][i], top, a[b][i], a[b][i + 2]);
                begin_products();
                wgmma(total, a[b][0], a[b][1], a[b][2], a[b][3], further(xs, s / 4 * (PANEL / 16) + s % 4 * 2), step > 0 || s > 0);
                end_products();
            }
            slot = next, phase ^= next == 0;
        }
        await_products<0>(total);
        if (lane == 0) pass(empty + (slot ? slot : STAGES) - 1);
        float row_scale[2], row_bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row_scale[i] = BLOCK ? 1.0f : scale_at(row_scales[i], 0);
            row_bias[i] = job.split > 1 ? 0.0f : with_bias(0.0f, bias, rows[i]);
        }
        if (job.split > 1) {
            float4* const to = sums + i64(number - whole) * (TILES * TEAMS * 128) + thread;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const float *const c = total + 4 * i, *const s = row_scale;
                to[i * (TEAMS * 128)] = make_float4(c[0] * s[0], c[1] * s[0], c[2] * s[1], c[3] * s[1]);
            }
            continue;
        }
#pragma unroll
        for (int i = 0; i < TILES; i += 2) {
            u32 p[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = (i + j / 2) * 4 + j % 2 * 2;
                p[j] = pair_of(fmaf(total[at], row_scale[j % 2], row_bias[j % 2]),
                               fmaf(total[at + 1], row_scale[j % 2], row_bias[j % 2]));
            }
            store_turned(results + (i * 8 + lane / 16 * 8 + lane % 8) * PITCH + (warp % 4 * 16 + lane / 8 % 2 * 8) * 2, p[0], p[1], p[2],
                         p[3]);
        }
        meet(1 + team, 128);
        for (int i = thread % 128; i < WIDTH * 8; i += 128) {
            const int at = i / 8, down = i % 8 * 8, row = job.row + team * 64 + down;
            if (job.column + at < batch && row < n)
                *(uint4*)(y + i64(job.column + at) * n + row) = *(const uint4*)(results + at * PITCH + down * 2);
        }
        meet(1 + team, 128);
    }
}
