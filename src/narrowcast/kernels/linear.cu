// y = x W^T + bias with W as encoded rows ([codes][scales], see layout.py), for batches small enough that reading W is what
// takes the time. Compiled at run time (nvrtc.py) for one format at a time; gpu_linear.py chooses and launches.
//
//   dot   8-bit integers, one row of x, fp32 multiply-adds. x lies in shared memory as fp32.
//   tile  4- and 8-bit codes, tensor cores: sixteen rows of W are the A operand of mma.m16n8k16, columns of x the B operand.
//         Codes become fp16 or bf16 exactly (levels: rounded once), sums run in fp32, scales are applied to sums of blocks.
//
// Sums have a fixed order: a warp takes every KS-th chunk of a row, and the warps' sums are added in order. No atomics.
//
// Given by the compiler's command line:
//   CODES   0 int8, 1 int4, 2 table of bytes (8-bit codes), 3 table of pairs (4-bit codes)
//   X       0 fp32, 1 fp16, 2 bf16: x and y.   BIAS  -1 none, else the same numbers
//   SCALE   0 none, 1 fp32, 2 bf16, 3 fp16, 4 e8m0.   BLOCK  elements per scale, 0 where a row has one or none
//   ROWS, TEAMS, KS, UNROLL, WIDE, TALL, TILES: how the work is cut, see below.   RESIDENT  threads that a processor should hold

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int AHEAD = UNROLL;  // chunks whose loads are under way while one is worked on

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 select) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(select));
    return r;
}

// Weights pass by once: they do not belong into L1.
__device__ __forceinline__ uint4 stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// The next kernel of the stream may be set up while this one runs; until here it neither reads nor writes anything.
__device__ __forceinline__ void after_the_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float half_value(u32 bits) {
    float f;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(bits));
    return f;
}

template <int KIND>
__device__ __forceinline__ float number(const void* p, i64 i) {
    if (KIND == 0) return __ldg((const float*)p + i);
    u32 bits = __ldg((const u16*)p + i);
    return KIND == 1 ? half_value(bits) : __uint_as_float(bits << 16);
}

__device__ __forceinline__ float scale_at(const u8* scales, int i) {
    if (SCALE == 0) return 1.0f;
    if (SCALE == 4) {
        u32 e = __ldg(scales + i);
        return __uint_as_float(e == 255 ? 0x7FC00000u : e ? e << 23 : 0x00400000u);
    }
    return number<SCALE == 1 ? 0 : SCALE == 2 ? 2 : 1>(scales, i);
}

__device__ __forceinline__ void store(void* y, i64 i, float value) {
    if (X == 0) {
        ((float*)y)[i] = value;
    } else {
        u16 bits;
        if (X == 1) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        ((u16*)y)[i] = bits;
    }
}

__device__ __forceinline__ float with_bias(float value, const void* bias, int row) {
    return BIAS < 0 ? value : value + number<(BIAS < 0 ? 0 : BIAS)>(bias, row);
}

#ifdef DOT

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
    float scale[ROWS];
};

// TEAMS teams of KS warps; a team takes ROWS rows at a time, its warps every KS-th chunk.
extern "C" __global__ __launch_bounds__(TEAMS* KS * 32, RESIDENT / (TEAMS * KS * 32)) void dot(const u8* __restrict__ w, const void* __restrict__ x,
                                                               void* __restrict__ y, const void* __restrict__ bias, int n, int k,
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
                if (BLOCK) stage.scale[r] = scale_at(row + scales, at / (BLOCK ? BLOCK : 1));
            }
        }
        chunk += KS;
        if (chunk >= steps * KS) chunk = part, next += many;
    };
    after_the_last();
    Stage stages[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(stages[i]);
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
                for (int r = 0; r < ROWS; ++r) sum[r] = BLOCK ? fmaf(s[r], now.scale[r], sum[r]) : sum[r] + s[r];
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
    }
}

#else  // -- tile ------------------------------------------------------------------------------------------------------

constexpr bool NARROW = CODES == 1 || CODES == 3;    // 4-bit codes
constexpr int LANE = WIDE * (NARROW ? 2 : 1);        // elements of a row that one lane takes in one chunk: WIDE bytes
constexpr int CHUNK = 4 * LANE;
constexpr int UNITS = LANE / 8;                      // eight elements are a unit: two mma
constexpr int GROUPS = BLOCK == 0 || BLOCK >= CHUNK ? 1 : CHUNK / BLOCK;  // blocks in a chunk; above 1 for one column only

#if X == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#define FUSED "fma.rn.f16x2 %0, %1, %2, %3;"
constexpr u32 ONE = 0x3C003C00u, MAGIC = 0x64086408u, OFFSET = 0xE408E408u;  // 1024 + 8 + q
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#define FUSED "fma.rn.bf16x2 %0, %1, %2, %3;"
constexpr u32 ONE = 0x3F803F80u, MAGIC = 0x43084308u, OFFSET = 0xC308C308u;  // 128 + 8 + q
#endif

__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shifted(u32 pair, u32 offset) {
    u32 r;
    asm(FUSED : "=r"(r) : "r"(pair), "r"(ONE), "r"(offset));
    return r;
}

// Two 4-bit integers, four apart, as a pair of halves.
__device__ __forceinline__ u32 nibbles(u32 word) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(word), "r"(0x000F000Fu), "r"(MAGIC));
    return shifted(r, OFFSET);
}

// Two neighbouring bytes, top bits flipped, as a pair of halves.
__device__ __forceinline__ u32 bytes(u32 word, int high) {
    if (X == 1) return shifted(prmt(word, 0x64646464u, high ? 0x4342 : 0x4140), 0xE480E480u);  // 1024 + 128 + q
    float a = __uint_as_float(prmt(word, 0x4B000000u, high ? 0x7442 : 0x7440)) - 8388736.0f;
    float b = __uint_as_float(prmt(word, 0x4B000000u, high ? 0x7443 : 0x7441)) - 8388736.0f;
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

#if CODES >= 2
// What a byte stands for, once for every lane: each has a bank of its own.
__shared__ u32 table[256][32];
#endif

// The entry of byte AT of a word.
template <int AT>
__device__ __forceinline__ u32 entry(u32 word, u32 lane) {
#if CODES >= 2
    const u32 row = (AT ? word >> (8 * AT - 7) : word << 7) & 0x7F80;  // 128 bytes to an entry
    return *(const u32*)((const char*)table + (row | lane * 4));
#else
    return 0;
#endif
}

// The eight elements of one unit as four pairs; `x_pairs` orders x alike.
__device__ __forceinline__ void pairs(const u32* words, u32 lane, u32* out) {
    if (CODES == 0) {
        u32 a = words[0] ^ 0x80808080u, b = words[1] ^ 0x80808080u;
        out[0] = bytes(a, 0), out[1] = bytes(a, 1), out[2] = bytes(b, 0), out[3] = bytes(b, 1);
    } else if (CODES == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = nibbles(words[0] >> (4 * i));
    } else if (CODES == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            out[2 * i] = prmt(entry<0>(words[i], lane), entry<1>(words[i], lane), 0x5410);
            out[2 * i + 1] = prmt(entry<2>(words[i], lane), entry<3>(words[i], lane), 0x5410);
        }
    } else {
        out[0] = entry<0>(words[0], lane), out[1] = entry<1>(words[0], lane);
        out[2] = entry<2>(words[0], lane), out[3] = entry<3>(words[0], lane);
    }
}

__device__ __forceinline__ uint4 x_pairs(uint4 v) {
    if (CODES != 1) return v;
    return make_uint4(prmt(v.x, v.z, 0x5410), prmt(v.x, v.z, 0x7632), prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
}

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
    float scale[TALL][2];
};

// A team of KS warps takes TALL times sixteen rows at a time, each warp every KS-th chunk. In a warp, lane 4 g + t reads rows g
// and g + 8 of every sixteen, elements [t * LANE, (t + 1) * LANE) of the chunk. TILES 0: x lies in shared memory, and all
// eight columns of B are the same x, or, where a chunk holds GROUPS blocks, 8 / GROUPS columns are x in one block and zero in the
// others, so that the sums of blocks come apart. Else x comes through L1, eight rows of it to a tile.
extern "C" __global__ __launch_bounds__(KS * 32, RESIDENT / (KS * 32)) void tile(const u8* __restrict__ w, const u16* __restrict__ x,
                                                                                void* __restrict__ y, const void* __restrict__ bias,
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
        const int at = chunk * CHUNK + t * LANE, block = (GROUPS == 1 ? chunk * CHUNK : at) / (BLOCK ? BLOCK : 1);
        if (next < tiles && chunk < chunks) {
#pragma unroll
            for (int m = 0; m < TALL; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (at < k) load(stage.codes[m][i], rows[m][i] + at / (NARROW ? 2 : 1));
                    if (BLOCK && (GROUPS == 1 || at < k)) stage.scale[m][i] = scale_at(rows[m][i] + scales, block);
                }
        }
        chunk += KS;
        if (chunk >= steps * KS) chunk = part, next += gridDim.x, locate();
    };
    after_the_last();
    locate();
    Stage stages[AHEAD] = {};
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(stages[i]);
#if CODES >= 2
#pragma unroll 4
    for (int i = threadIdx.x; i < 256 * 8; i += KS * 32) {
        const u32 v = __ldg(levels + i / 8);
        ((uint4*)table)[i] = make_uint4(v, v, v, v);
    }
#endif
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
                        else if (at < k) v[i] = x_pairs(__ldg((const uint4*)column));
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
                                total[m][i][j] = fmaf(all, now.scale[m][j / 2], total[m][i][j]);
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
#endif
