// y = x W^T + bias for one row of x and rows of 8-bit integers: fp32 multiply-adds, x in shared memory as fp32.
//
// TEAMS teams of KS warps; a team takes ROWS rows of W at a time, its warps every KS-th chunk of 512 elements, a lane 16 of
// them. Sums have a fixed order: a lane's chunks one after the other, the lanes of a warp as a tree, the warps in order.

// A byte of `word`, top bit flipped, under the exponent of 2^23: taking 2^23 + 128 away leaves the integer.
__device__ __forceinline__ float integer(u32 word, u32 select) { return __uint_as_float(prmt(word, 0x4B000000u, select)) - 8388736.0f; }

// Eight elements of x, as fp32.
__device__ __forceinline__ void eight(const void* x, int at, float4* out) {
    if (X == 0) {
        out[0] = *(const float4*)((const float*)x + at), out[1] = *(const float4*)((const float*)x + at + 4);
        return;
    }
    const uint4 v = *(const uint4*)((const u16*)x + at);
    auto low = [](u32 pair) { return X == 1 ? half_value(pair & 0xFFFF) : __uint_as_float(pair << 16); };
    auto high = [](u32 pair) { return X == 1 ? half_value(pair >> 16) : __uint_as_float(pair & 0xFFFF0000u); };
    out[0] = make_float4(low(v.x), high(v.x), low(v.y), high(v.y)), out[1] = make_float4(low(v.z), high(v.z), low(v.w), high(v.w));
}

// What a warp reads of its rows in one chunk of 512 elements: 16 to a lane.
struct Stage {
    uint4 codes[ROWS];
    u32 scale[ROWS];  // as it lies in memory
};

extern "C" __global__ __launch_bounds__(TEAMS* KS * 32, RESIDENT / (TEAMS * KS * 32)) void dot(const u8* __restrict__ w, const void* x,
                                                               void* __restrict__ y, const void* bias, int n, int k,
                                                               i64 stride, int scales) {
    extern __shared__ float4 xs[];
    __shared__ float sums[2][TEAMS][KS][ROWS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / KS, part = warp % KS;
    const int chunks = (k + 511) / 512, steps = (chunks + KS * AHEAD - 1) / (KS * AHEAD) * AHEAD, many = gridDim.x * TEAMS * ROWS;
    int next = (blockIdx.x * TEAMS + team) * ROWS, chunk = part;  // what is read next: AHEAD chunks before it is used
    auto fetch = [&](Stage& stage) {
        const int at = chunk * 512 + lane * 16;
        if (at < k && next < n) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const u8* row = w + min(next + r, n - 1) * stride;
                stage.codes[r] = stream16(row + at);
                if (BLOCK) stage.scale[r] = scale_bits(row + scales, at / (BLOCK ? BLOCK : 1));
            }
        }
        chunk += KS;
        if (chunk >= steps * KS) chunk = part, next += many;
    };
    admit_the_next();
    if (!READ_WEIGHTS_EARLY) after_the_last();
    Stage stages[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(stages[i]);
    if (READ_WEIGHTS_EARLY) after_the_last();
    // Several loads at a time: one after the other, their latency would be most of a small layer's time.
#pragma unroll 4
    for (int i = threadIdx.x; i < chunks * 64; i += TEAMS * KS * 32) {
        const int at = i * 8, place = at / 512 * 128 + at % 16 / 4 * 32 + at % 512 / 16;  // float4 j of lane l at [chunk][j][l]
        float4 v[2] = {};
        if (at < k) eight(x, at, v);
        xs[place] = v[0], xs[place + 32] = v[1];
    }
    __syncthreads();
    int turn = 0;
    for (int base = blockIdx.x * TEAMS * ROWS; base < n; base += many, turn ^= 1) {
        float sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = 0;
        for (int step = 0; step < steps; step += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const Stage now = stages[i];
                fetch(stages[i]);
                const int c = part + (step + i) * KS;
                if (c * 512 + lane * 16 >= k) continue;
                float s[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) s[r] = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float4 v = xs[c * 128 + 32 * j + lane];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        const u32 q = (&now.codes[r].x)[j] ^ 0x80808080u;
                        s[r] = fmaf(integer(q, 0x7440), v.x, s[r]), s[r] = fmaf(integer(q, 0x7441), v.y, s[r]);
                        s[r] = fmaf(integer(q, 0x7442), v.z, s[r]), s[r] = fmaf(integer(q, 0x7443), v.w, s[r]);
                    }
                }
#pragma unroll
                for (int r = 0; r < ROWS; ++r) sum[r] = BLOCK ? fmaf(s[r], scale_value(now.scale[r]), sum[r]) : sum[r] + s[r];
            }
        }
        const int row = base + team * ROWS;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int o = 16; o; o >>= 1) sum[r] += __shfl_xor_sync(~0u, sum[r], o);
            if (lane == 0) sums[turn][team][part][r] = sum[r];
        }
        if (KS == 1) __syncwarp();
        else __syncthreads();  // one for each turn will do: the other half of `sums` is written next
        if (part == 0 && lane < ROWS && row + lane < n) {
            float total = 0;
#pragma unroll
            for (int p = 0; p < KS; ++p) total += sums[turn][team][p][lane];
            if (!BLOCK) total *= scale_at(w + (row + lane) * stride + scales, 0);
            store(y, row + lane, with_bias(total, bias, row + lane));
        }
    }}
