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
//   ROWS, TEAMS, KS, UNROLL, WIDE, TILES: how the work is cut, see below

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int AHEAD = UNROLL;  // chunks whose loads are under way together

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

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

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

__device__ __forceinline__ float4 four(const void* x, int k) {
    if (X == 0) return *(const float4*)((const float*)x + k);
    uint2 v = *(const uint2*)((const u16*)x + k);
    if (X == 1) return make_float4(half_value(v.x & 0xFFFF), half_value(v.x >> 16), half_value(v.y & 0xFFFF), half_value(v.y >> 16));
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                       __uint_as_float(v.y & 0xFFFF0000u));
}

__device__ __forceinline__ float sixteen(uint4 v, const float4* xs) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float4 x = xs[32 * j];
        u32 q = (&v.x)[j] ^ 0x80808080u;
        sum = fmaf(integer(q, 0x7440), x.x, sum), sum = fmaf(integer(q, 0x7441), x.y, sum);
        sum = fmaf(integer(q, 0x7442), x.z, sum), sum = fmaf(integer(q, 0x7443), x.w, sum);
    }
    return sum;
}

// TEAMS teams of KS warps; a team takes ROWS rows at a time, its warps every KS-th chunk of 512 elements, a lane 16 of them.
extern "C" __global__ __launch_bounds__(TEAMS * KS * 32) void dot(const u8* __restrict__ w, const void* __restrict__ x, void* __restrict__ y,
                                                            const void* __restrict__ bias, int n, int k, i64 stride, int scales) {
    extern __shared__ float4 xs[];
    __shared__ float sums[TEAMS][KS][ROWS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / KS, part = warp % KS;
    const int chunks = (k + 511) / 512;
    {  // the first rows start on their way while x is brought in
        int row = (blockIdx.x * TEAMS + team) * ROWS;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            for (int at = (part * 32 + lane) * 128; at < k; at += KS * 32 * 128)
                if (row + r < n) prefetch(w + (row + r) * stride + at);
    }
    for (int i = threadIdx.x; i < chunks * 128; i += TEAMS * KS * 32) {
        int at = (i >> 7) * 512 + (i & 31) * 16 + ((i >> 5) & 3) * 4;
        xs[i] = at < k ? four(x, at) : make_float4(0, 0, 0, 0);
    }
    __syncthreads();
    for (int base = blockIdx.x * TEAMS * ROWS; base < n; base += gridDim.x * TEAMS * ROWS) {
        const int row = base + team * ROWS;
        float sum[ROWS];
        const u8* rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = 0, rows[r] = w + min(row + r, n - 1) * stride;
        auto step = [&](int c) {
            uint4 v[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) v[r] = stream16(rows[r] + c * 512 + lane * 16);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float s = sixteen(v[r], xs + c * 128 + lane);
                sum[r] = BLOCK ? fmaf(s, scale_at(rows[r] + scales, (c * 512 + lane * 16) / (BLOCK ? BLOCK : 1)), sum[r]) : sum[r] + s;
            }
        };
        const int whole = k / 512;
        int c = part;
#pragma unroll AHEAD
        for (; c < whole; c += KS) step(c);
        if (c < chunks && c * 512 + lane * 16 < k) step(c);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int o = 16; o; o >>= 1) sum[r] += __shfl_xor_sync(~0u, sum[r], o);
            if (!BLOCK) sum[r] *= scale_at(rows[r] + scales, 0);
        }
        if (KS == 1) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (lane == r && row + r < n) store(y, row + r, with_bias(sum[r], bias, row + r));
        } else {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (lane == 0) sums[team][part][r] = sum[r];
            __syncthreads();
            const int i = threadIdx.x;
            if (i < TEAMS * ROWS && base + i < n) {
                float total = 0;
#pragma unroll
                for (int p = 0; p < KS; ++p) total += sums[i / ROWS][p][i % ROWS];
                store(y, base + i, with_bias(total, bias, base + i));
            }
            __syncthreads();
        }
    }
}

#else  // -- tile ------------------------------------------------------------------------------------------------------

constexpr bool NARROW = CODES == 1 || CODES == 3;    // 4-bit codes
constexpr int LANE = WIDE * (NARROW ? 2 : 1);        // elements of a row that one lane takes in one chunk: WIDE bytes
constexpr int CHUNK = 4 * LANE;
constexpr int UNITS = LANE / 8;                      // eight elements are a unit: two mma
constexpr int GROUPS = BLOCK == 0 || BLOCK >= CHUNK ? 1 : CHUNK / BLOCK;  // blocks in a chunk; above 1 for one column only
constexpr int COLUMNS = 8 * TILES;                   // TILES 0: one column of x

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

// The eight elements of one unit as four pairs; `x_pair` orders x alike. Every lane has its own bank of `table`.
__device__ __forceinline__ void pairs(const u32* words, const u32* table, u32* out) {
    if (CODES == 0) {
        u32 a = words[0] ^ 0x80808080u, b = words[1] ^ 0x80808080u;
        out[0] = bytes(a, 0), out[1] = bytes(a, 1), out[2] = bytes(b, 0), out[3] = bytes(b, 1);
    } else if (CODES == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = nibbles(words[0] >> (4 * i));
    } else if (CODES == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 word = words[i / 2] >> (16 * (i & 1));
            out[i] = prmt(table[32 * (word & 0xFF)], table[32 * ((word >> 8) & 0xFF)], 0x5410);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = table[32 * ((words[0] >> (8 * i)) & 0xFF)];
    }
}

__device__ __forceinline__ uint4 x_pairs(uint4 v) {
    if (CODES != 1) return v;
    return make_uint4(prmt(v.x, v.z, 0x5410), prmt(v.x, v.z, 0x7632), prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
}

struct Codes {
    u32 word[WIDE / 4];
};

__device__ __forceinline__ Codes load(const u8* p, bool there) {
    Codes c;
#pragma unroll
    for (int i = 0; i < WIDE / 4; ++i) c.word[i] = 0;
    if (there) {
        if (WIDE == 16) {
            uint4 v = stream16(p);
            c.word[0] = v.x, c.word[1 % (WIDE / 4)] = v.y, c.word[2 % (WIDE / 4)] = v.z, c.word[3 % (WIDE / 4)] = v.w;
        } else if (WIDE == 8) {
            uint2 v = __ldcs((const uint2*)p);
            c.word[0] = v.x, c.word[1 % (WIDE / 4)] = v.y;
        } else {
            c.word[0] = __ldcs((const u32*)p);
        }
    }
    return c;
}

// A team of KS warps takes sixteen rows at a time, each warp every KS-th chunk. In a warp, lane 4 g + t reads rows g and g + 8,
// elements [t * LANE, (t + 1) * LANE) of the chunk. TILES 0: all eight columns of B are the same x, or, where a chunk holds
// GROUPS blocks, 8 / GROUPS columns are x in one block and zero in the others, so that the sums of blocks come apart.
extern "C" __global__ __launch_bounds__(KS * 32) void tile(const u8* __restrict__ w, const u16* __restrict__ x, void* __restrict__ y,
                                                          const void* __restrict__ bias, const u32* __restrict__ levels, int batch,
                                                          int n, int k, i64 stride, int scales, i64 x_stride) {
    extern __shared__ uint4 shared[];
    constexpr int WIDTH = TILES ? COLUMNS : 1;
    __shared__ float sums[KS][16][WIDTH];
    const int lane = threadIdx.x & 31, part = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int chunks = (k + CHUNK - 1) / CHUNK, tiles = (n + 15) / 16;
    uint4* xs = shared;
    const u32* table = nullptr;
    {
        int row = blockIdx.x * 16 + (lane & 15);
        if (row < n)
            for (int at = (part * 2 + (lane >> 4)) * 128; at < (NARROW ? k / 2 : k); at += KS * 256) prefetch(w + row * stride + at);
    }
    if (CODES >= 2) {
        for (int i = threadIdx.x; i < 256 * 8; i += KS * 32) {
            u32 v = __ldg(levels + i / 8);
            xs[i] = make_uint4(v, v, v, v);
        }
        table = (const u32*)xs + lane;
        xs += 256 * 8;
    }
    if (!TILES) {  // x in the order in which lanes want it, zeros to the chunk's end, and one chunk of zeros
        for (int i = threadIdx.x; i < (chunks + 1) * (CHUNK / 8); i += KS * 32) {
            int chunk = i / (CHUNK / 8), unit = i % (CHUNK / 8) / 4, at = chunk * CHUNK + (i % 4) * LANE + unit * 8;
            xs[i] = at < k ? x_pairs(*(const uint4*)(x + at)) : make_uint4(0, 0, 0, 0);
        }
    }
    if (CODES >= 2 || !TILES) __syncthreads();
    const bool mine = GROUPS == 1 || t * GROUPS / 4 == g * GROUPS / 8;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u8* row0 = w + min(tile * 16 + g, n - 1) * stride;
        const u8* row1 = w + min(tile * 16 + g + 8, n - 1) * stride;
        float total[TILES ? TILES : 1][4] = {};
        auto step = [&](int c) {
            const int at = c * CHUNK + t * LANE;
            const bool there = at < k;
            const Codes a = load(row0 + c * CHUNK / (NARROW ? 2 : 1) + t * WIDE, there), b = load(row1 + c * CHUNK / (NARROW ? 2 : 1) + t * WIDE, there);
            float first = 1, second = 1;
            if (BLOCK) {
                int block = GROUPS == 1 ? c * CHUNK / (BLOCK ? BLOCK : 1) : min(at, k - 1) / (BLOCK ? BLOCK : 1);
                first = scale_at(row0 + scales, block), second = scale_at(row1 + scales, block);
            }
            float sum[TILES ? TILES : 2][4];
            if (BLOCK) {
#pragma unroll
                for (int i = 0; i < (TILES ? TILES : 2); ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[i][j] = 0;
            }
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                u32 p[4], q[4];
                pairs(a.word + (NARROW ? u : 2 * u), table, p), pairs(b.word + (NARROW ? u : 2 * u), table, q);
                if (!TILES) {
                    uint4 v = xs[(mine ? c : chunks) * (CHUNK / 8) + u * 4 + t];
                    float* one = BLOCK ? sum[0] : total[0];
                    mma(one, p[0], q[0], p[1], q[1], v.x, v.y);
                    mma(BLOCK ? sum[1 % (TILES ? TILES : 2)] : one, p[2], q[2], p[3], q[3], v.z, v.w);
                } else {
#pragma unroll
                    for (int i = 0; i < TILES; ++i) {
                        const u16* column = x + min(i * 8 + g, batch - 1) * x_stride + at + u * 8;
                        uint4 v = there ? x_pairs(__ldg((const uint4*)column)) : make_uint4(0, 0, 0, 0);
                        float* one = BLOCK ? sum[i] : total[i];
                        mma(one, p[0], q[0], p[1], q[1], v.x, v.y);
                        mma(one, p[2], q[2], p[3], q[3], v.z, v.w);
                    }
                }
            }
            if (BLOCK && !TILES) {
                total[0][0] = fmaf(sum[0][0] + sum[1 % (TILES ? TILES : 2)][0], first, total[0][0]);
                total[0][2] = fmaf(sum[0][2] + sum[1 % (TILES ? TILES : 2)][2], second, total[0][2]);
            } else if (BLOCK) {
#pragma unroll
                for (int i = 0; i < TILES; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) total[i][j] = fmaf(sum[i][j], j < 2 ? first : second, total[i][j]);
            }
        };
#pragma unroll AHEAD
        for (int c = part; c < chunks; c += KS) step(c);
        if (!BLOCK) {
            float first = scale_at(row0 + scales, 0), second = scale_at(row1 + scales, 0);
#pragma unroll
            for (int i = 0; i < (TILES ? TILES : 1); ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) total[i][j] *= j < 2 ? first : second;
        }
        if (!TILES) {
            if (GROUPS >= 4) total[0][0] += __shfl_xor_sync(~0u, total[0][0], 1), total[0][2] += __shfl_xor_sync(~0u, total[0][2], 1);
            if (GROUPS >= 2) total[0][0] += __shfl_xor_sync(~0u, total[0][0], 2), total[0][2] += __shfl_xor_sync(~0u, total[0][2], 2);
            if (t == 0) sums[part][g][0] = total[0][0], sums[part][g + 8][0] = total[0][2];
        } else {
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[part][g + j / 2 * 8][i * 8 + 2 * t + j % 2] = total[i][j];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * WIDTH; i += KS * 32) {
            const int row = tile * 16 + i % 16, column = i / 16;
            if (row < n && column < batch) {
                float all = 0;
#pragma unroll
                for (int p = 0; p < KS; ++p) all += sums[p][i % 16][column];
                store(y, i64(column) * n + row, with_bias(all, bias, row));
            }
        }
        __syncthreads();
    }
}
#endif
