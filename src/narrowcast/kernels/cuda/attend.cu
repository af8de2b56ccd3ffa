// Attention of one new position of each sequence over a cache of fixed size, for halves; what triton/attention.py says of it holds
// here too. One block takes one key head of one sequence, with all HEADS queries of it, and keeps the new key and value.
//
//   SIZE  of a head, 64 or 128.   HEADS  queries to a key.   KS  warps.   UNROLL  positions that a team reads at a time
//
// SIZE / 8 lanes are a team: they share a position, eight elements each. Teams take every TEAMS-th position and have softmaxes of
// their own, which are joined at the end: the teams of a warp as a tree, the warps in order.

constexpr int LANES = SIZE / 8, TEAMS = KS * 32 / LANES, HALF = SIZE / 2;
constexpr float LOG2_E = 1.4426950408889634f;
#define LOWEST __uint_as_float(0xFF800000u)  // minus infinity

struct Eight {
    float value[8];
};

__device__ __forceinline__ Eight eight(uint4 bits) {
    const u32 pair[4] = {bits.x, bits.y, bits.z, bits.w};
    Eight result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        result.value[2 * i] = X == 1 ? half_value(pair[i] & 0xFFFF) : __uint_as_float(pair[i] << 16);
        result.value[2 * i + 1] = X == 1 ? half_value(pair[i] >> 16) : __uint_as_float(pair[i] & 0xFFFF0000u);
    }
    return result;
}

__device__ __forceinline__ uint4 rounded(const Eight& x) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = half_of_x(x.value[2 * i]) | half_of_x(x.value[2 * i + 1]) << 16;
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

// A softmax under way: the largest score, in powers of two, the sum of shares, and the values weighed by them.
struct Mix {
    float top, mass, mixed[8];

    __device__ __forceinline__ void rise(float higher) {
        const float keep = top == higher ? 1.0f : exp2f(top - higher);
        top = higher, mass *= keep;
#pragma unroll
        for (int i = 0; i < 8; ++i) mixed[i] *= keep;
    }

    __device__ __forceinline__ void add(float score, const Eight& value) {
        const float share = score == LOWEST ? 0.0f : exp2f(score - top);
        mass += share;
#pragma unroll
        for (int i = 0; i < 8; ++i) mixed[i] = fmaf(share, value.value[i], mixed[i]);
    }
};

// The score of a team's position.
__device__ __forceinline__ float score_of(const Eight& query, const Eight& key) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(query.value[i], key.value[i], sum);
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    return sum;
}

extern "C" __global__ __launch_bounds__(KS * 32, RESIDENT / (KS * 32)) void attend(const u16* queries, const u16* keys,
                                                                u16* __restrict__ out, const u16* values,
                                                                const float* __restrict__ turns, const i64* at,
                                                                u16* key_cache, u16* value_cache, int key_heads, i64 q_stride,
                                                                i64 k_stride, i64 v_stride, i64 cache_stride, i64 head_stride) {
    __shared__ float tops[KS][HEADS], masses[KS][HEADS], mixes[KS][HEADS][SIZE];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = threadIdx.x / LANES, d = threadIdx.x % LANES * 8;
    const int head = blockIdx.x % key_heads;
    const i64 row = blockIdx.x / key_heads;
    const bool low = d < HALF;
    const int near = low ? d + HALF : d - HALF;
    admit_the_next();
    if (!READ_WEIGHTS_EARLY) after_the_last();
    // Where the sequence is, and what the cache has of it, was written before this step began.
    const int now = int(at[row]);
    u16* const known = key_cache + row * cache_stride + head * head_stride + d;
    u16* const weighed = value_cache + row * cache_stride + head * head_stride + d;
    uint4 key[AHEAD], value[AHEAD];
    auto fetch = [&](int first) {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int place = first + u * TEAMS;
            key[u] = place < now ? *(const uint4*)(known + i64(place) * SIZE) : make_uint4(0, 0, 0, 0);
            value[u] = place < now ? *(const uint4*)(weighed + i64(place) * SIZE) : make_uint4(0, 0, 0, 0);
        }
    };
    fetch(team);
    Eight cosine, sine;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float* angle = turns + i64(now) * SIZE + (low ? d : near) + i;
        cosine.value[i] = __ldg(angle), sine.value[i] = low ? -__ldg(angle + HALF) : __ldg(angle + HALF);
    }
    if (READ_WEIGHTS_EARLY) after_the_last();
    auto turned = [&](const u16* x) {
        const Eight one = eight(*(const uint4*)(x + d)), other = eight(*(const uint4*)(x + near));
        Eight result;
#pragma unroll
        for (int i = 0; i < 8; ++i) result.value[i] = one.value[i] * cosine.value[i] + other.value[i] * sine.value[i];
        return result;
    };
    Eight query[HEADS];
    Mix mix[HEADS];
    const float scale = LOG2_E / sqrtf(float(SIZE));
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        query[h] = turned(queries + row * q_stride + (head * HEADS + h) * SIZE);
#pragma unroll
        for (int i = 0; i < 8; ++i) query[h].value[i] *= scale, mix[h].mixed[i] = 0;
        mix[h].top = LOWEST, mix[h].mass = 0;
    }
    const uint4 new_key = rounded(turned(keys + row * k_stride + head * SIZE));
    const uint4 new_value = *(const uint4*)(values + row * v_stride + head * SIZE + d);
    for (int base = 0; base < now; base += AHEAD * TEAMS) {
        const int first = base + team;
        uint4 old_key[AHEAD], old_value[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) old_key[u] = key[u], old_value[u] = value[u];
        fetch(first + AHEAD * TEAMS);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            float score[AHEAD], higher = mix[h].top;
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                score[u] = score_of(query[h], eight(old_key[u]));
                if (first + u * TEAMS >= now) score[u] = LOWEST;
                higher = fmaxf(higher, score[u]);
            }
            mix[h].rise(higher);
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) mix[h].add(score[u], eight(old_value[u]));
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {  // the new position is the first team's; all lanes of its warp take part in the sum
        const float score = score_of(query[h], eight(new_key));
        if (team == 0) mix[h].rise(fmaxf(mix[h].top, score)), mix[h].add(score, eight(new_value));
#pragma unroll
        for (int o = LANES; o < 32; o <<= 1) {
            Mix other;
            other.top = __shfl_xor_sync(~0u, mix[h].top, o), other.mass = __shfl_xor_sync(~0u, mix[h].mass, o);
#pragma unroll
            for (int i = 0; i < 8; ++i) other.mixed[i] = __shfl_xor_sync(~0u, mix[h].mixed[i], o);
            const float higher = fmaxf(mix[h].top, other.top);
            mix[h].rise(higher), other.rise(higher);
            mix[h].mass += other.mass;
#pragma unroll
            for (int i = 0; i < 8; ++i) mix[h].mixed[i] += other.mixed[i];
        }
        if (lane < LANES) {
            if (lane == 0) tops[warp][h] = mix[h].top, masses[warp][h] = mix[h].mass;
#pragma unroll
            for (int i = 0; i < 8; ++i) mixes[warp][h][d + i] = mix[h].mixed[i];
        }
    }
    if (team == 0) {
        *(uint4*)(known + i64(now) * SIZE) = new_key;
        *(uint4*)(weighed + i64(now) * SIZE) = new_value;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * SIZE; i += KS * 32) {
        const int h = i / SIZE;
        float top = tops[0][h], mass = 0, mixed = 0;
#pragma unroll
        for (int w = 1; w < KS; ++w) top = fmaxf(top, tops[w][h]);
#pragma unroll
        for (int w = 0; w < KS; ++w) {
            const float keep = exp2f(tops[w][h] - top);
            mass = fmaf(masses[w][h], keep, mass), mixed = fmaf(mixes[w][h][i % SIZE], keep, mixed);
        }
        out[(row * key_heads + head) * (HEADS * SIZE) + i] = half_of_x(mixed / mass);
    }
}
