// out = the row that encodes the sum of RANKS rows of 4-bit codes, in order, in fp32. Its bits are the reference's.
//
//   RANKS rows, `stride` bytes apart.   OWN  the rank whose row is `own` instead, numbers of kind X; -1: none
//   CODES   1 int4, 3 table of 16 levels.   BLOCK  32 to 1024 elements, a power of two, with one bf16 scale
//   FUSED   1 where a product of code and scale is exact, so that it may be added in the same instruction
//   WIDE    ranks, as bits, whose codes become numbers in `numbers_of_bytes`; others by arithmetic or, as bf16, in `halves_of_bytes`
//   HELD    1 where the codes that are read next wait in registers, 0 in shared memory
//   DIVIDE  0 no, 1 multiply by `factor`, 2 divide by it
//   CHOICE  how the sum's codes are found: 0 whole numbers, 1 along a curve (BEND, SLOPE, MIDDLE), 2 in steps of 1 / SLOPE, STEPS of them
//   PEAK_STEP, LIMIT  of layout.Scaling. These and the curve are bits of fp32.
//
// A lane takes 32 neighbours, which is 16 bytes of each row; LANES lanes share a scale. The kernel is bound by the instructions it issues
// and by what shared memory gives, 128 bytes a cycle, not by memory: bench/results/gpu-h200.md counts both.

constexpr int LANES = BLOCK / 32;
constexpr bool INTEGERS = CODES == 1;
constexpr u32 ROOM = 256 * 256;          // of both tables of bytes: 256 bytes to an entry, so that prmt makes an address of a byte
constexpr u32 CELL = CHOICE == 1 ? 128 : 256;  // bytes to an entry of the table behind them
constexpr u32 CELLS = CHOICE == 0 ? 0 : CHOICE == 1 ? 16 : STEPS;
constexpr float HUGE_SCALE = 3.3230699894622897e35f;  // 2^118: with levels below 2^10, products with smaller scales are finite

constexpr int EACH = X == 0 ? 4 : 8;  // numbers of `own` in sixteen bytes
constexpr int STAGED = (HELD ? 0 : 512 * RANKS) + (OWN < 0 ? 0 : 1024 / EACH * 16);  // bytes that a warp has on their way

extern __shared__ __align__(1024) char memory[];

// Of each byte of two codes: both numbers in fp32 and, 128 bytes behind, in bf16; then the table of CHOICE. Each lane has its own banks.
__device__ __forceinline__ void fill_tables(const u32* numbers) {
    for (u32 i = threadIdx.x; i < 256 * 16; i += THREADS)
        *(uint2*)(memory + i / 16 * 256 + i % 16 * 8) = make_uint2(__ldg(numbers + i / 16 * 2), __ldg(numbers + i / 16 * 2 + 1));
    for (u32 i = threadIdx.x; i < 256 * 32; i += THREADS) *(u32*)(memory + i / 32 * 256 + 128 + i % 32 * 4) = __ldg(numbers + 512 + i / 32);
    for (u32 i = threadIdx.x; i < CELLS * 32; i += THREADS)
        *(u32*)(memory + ROOM + i / 32 * CELL + i % 32 * 4) = __ldg(numbers + 768 + i / 32);
}

// Two numbers in fp32, of byte BYTE of a word.
template <int BYTE>
__device__ __forceinline__ void wide_pair(u32 word, u32 lane, float* two) {
    const uint2 pair = *(const uint2*)(memory + prmt(word, lane % 16 * 8, 0x5504 | BYTE << 4));
    two[0] = __uint_as_float(pair.x), two[1] = __uint_as_float(pair.y);
}

// The same from bf16: half of shared memory's time, and one instruction more for each.
template <int BYTE>
__device__ __forceinline__ void narrow_pair(u32 word, u32 lane, float* two) {
    const u32 pair = *(const u32*)(memory + prmt(word, 128 + lane * 4, 0x5504 | BYTE << 4));
    two[0] = __uint_as_float(pair << 16), two[1] = __uint_as_float(pair & 0xFFFF0000u);
}

// The integer at bits 4 I of a word that ends below bit 23: under a fitting exponent its last bit weighs 1.
template <int I>
__device__ __forceinline__ float integer(u32 word) {
    return __uint_as_float(insert(word, 15u << 4 * I, u32(150 - 4 * I) << 23 ^ 8u << 4 * I)) - float((1 << (23 - 4 * I)) + 8);
}

__device__ __forceinline__ void numbers_of(u32 word, u32 lane, bool wide, float* eight) {
    if (wide) {
        wide_pair<0>(word, lane, eight), wide_pair<1>(word, lane, eight + 2);
        wide_pair<2>(word, lane, eight + 4), wide_pair<3>(word, lane, eight + 6);
    } else if (INTEGERS) {
        const u32 rest = word >> 20;
        eight[0] = integer<0>(word), eight[1] = integer<1>(word), eight[2] = integer<2>(word), eight[3] = integer<3>(word);
        eight[4] = integer<4>(word), eight[5] = integer<0>(rest), eight[6] = integer<1>(rest), eight[7] = integer<2>(rest);
    } else {
        narrow_pair<0>(word, lane, eight), narrow_pair<1>(word, lane, eight + 2);
        narrow_pair<2>(word, lane, eight + 4), narrow_pair<3>(word, lane, eight + 6);
    }
}

__device__ __forceinline__ float plus_product(float sum, float number, float scale, bool first) {
    if (FUSED) return first && !INTEGERS ? __fmul_rn(number, scale) : fmaf(number, scale, first ? 0.0f : sum);
    const float product = __fmul_rn(number, scale);
    return first ? product : __fadd_rn(sum, product);
}

__device__ __forceinline__ float plus_own(float sum, float own) {
    // A zero times a negative scale is a zero all the same: once the sum is no -0.0, no integer makes it one.
    return OWN > 0 ? __fadd_rn(sum, own) : INTEGERS && RANKS > 1 ? __fadd_rn(own, 0.0f) : own;
}

// Where sixteen bytes of `own` lie in shared memory: lanes that read at a time, or that write, find them in different banks.
__device__ __forceinline__ u32 own_place(u32 unit) { return (unit ^ unit / 8 % 8) * 16; }

// Adds this lane's elements of `own`, of which `count` exist; all 32 are found in shared memory.
__device__ __forceinline__ void add_own(const void* own, const char* here, i64 first, int count, u32 lane, float (&sum)[32]) {
    if (count < 32) {
#pragma unroll
        for (int i = 0; i < 32; ++i) sum[i] = plus_own(sum[i], i < count ? number<X>(own, first + i) : 0.0f);
        return;
    }
#pragma unroll
    for (int i = 0; i < 32; i += EACH) {
        const uint4 read = *(const uint4*)(here + own_place(lane * (32 / EACH) + i / EACH));
        const u32 words[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const u32 bits = X == 0 ? words[j % 4] : words[j / 2] >> 16 * (j % 2) & 0xFFFF;
            sum[i + j] = plus_own(sum[i + j], X == 0 ? __uint_as_float(bits) : X == 1 ? half_value(bits) : __uint_as_float(bits << 16));
        }
    }
}

// As the reference does it, for scales that no encoder writes: a product may overflow, which fused would not be infinite.
__device__ __forceinline__ void sum_slowly(const u8* codes, const u8* scales, u32 stride, const void* own, const char* here, i64 first, int count, u32 lane,
                                           float (&sum)[32]) {
#pragma unroll 1
    for (int rank = 0; rank < RANKS; ++rank) {
        if (rank == OWN) {
            add_own(own, here, first, count, lane, sum);
            continue;
        }
        const float scale = __uint_as_float(u32(__ldg((const u16*)(scales + u64(rank) * stride))) << 16);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float eight[8];
            numbers_of(__ldg((const u32*)(codes + u64(rank) * stride) + w), lane, !INTEGERS, eight);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float product = __fmul_rn(eight[i], scale), before = rank ? sum[8 * w + i] : -0.0f;
                sum[8 * w + i] = __fadd_rn(before, INTEGERS ? __fadd_rn(product, 0.0f) : product);
            }
        }
    }
}

__device__ __forceinline__ void add_row(const uint4& words, float scale, u32 lane, int rank, float (&sum)[32]) {
    const u32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float eight[8];
        numbers_of(four[w], lane, WIDE >> rank % 8 & 1, eight);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[8 * w + i] = plus_product(sum[8 * w + i], eight[i], scale, rank == 0);
    }
}

// What a warp reads next. A lane has its own bytes of each row's codes; `own` is read by all.
struct Piece {
    char* codes;
    uint4 words[RANKS];
    char* own;
    u32 scales[RANKS];
};

__device__ __forceinline__ void fetch(const u8* data, const void* own, i64 at, i64 numel, i64 scales_at, u32 stride, u32 lane, Piece& piece) {
    const i64 first = at * 1024 + lane * 32, from = first < numel ? first : 0;  // a lane with nothing to read reads what is there
    const u8 *const codes = data + from / 2, *const scales = data + scales_at + from / BLOCK * 2;
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank)
        if (rank != OWN) {
            if (HELD) piece.words[rank] = stream16(codes + u64(rank) * stride);
            else copy16(piece.codes + 512 * rank, codes + u64(rank) * stride, true);
            piece.scales[rank] = __ldg((const u16*)(scales + u64(rank) * stride));
        }
#pragma unroll
    for (u32 unit = lane; OWN >= 0 && unit < 1024 / EACH; unit += 32) {
        const i64 element = at * 1024 + unit * EACH;
        const bool whole = element + EACH <= numel;
        copy16(piece.own + own_place(unit), (const u8*)own + (whole ? element : 0) * (16 / EACH), whole);
    }
    end_lot();
}

// Whether every product is finite.
__device__ __forceinline__ bool sum_ranks(const Piece& piece, const void* own, i64 first, int count, u32 lane, float (&sum)[32]) {
    float largest = 0;
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        if (rank == OWN) {
            add_own(own, piece.own, first, count, lane, sum);
        } else {
            const float scale = __uint_as_float(piece.scales[rank] << 16);
            if (FUSED) largest = fmaxf(largest, fabsf(scale));
            add_row(HELD ? piece.words[rank] : *(const uint4*)(piece.codes + 512 * rank), scale, lane, rank, sum);
        }
    }
    return !(FUSED && RANKS > 1 && largest > HUGE_SCALE);
}

__device__ __forceinline__ u32 turned(u32 bits) { return bits << 1 | bits >> 31; }

// The block's largest magnitude as bits with its sign below them; of equals, a negative one counts.
__device__ __forceinline__ u32 largest_of(const float (&sum)[32]) {
    u32 low = 0;
    int high = int(0x80000000u);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const u32 a = __float_as_uint(sum[i]), b = __float_as_uint(sum[i + 1]);
        low = max(max(low, a), b), high = max(max(high, int(a)), int(b));
    }
    u32 key = max(turned(low), turned(u32(high)));
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) key = max(key, __shfl_xor_sync(~0u, key, distance));
    return key;
}

// The codes of eight numbers.
__device__ __forceinline__ u32 codes_of(const float* eight, float inverse, u32 lane) {
    u32 word = 0, half[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float y = __fmul_rn(eight[i], inverse);
        if (CHOICE == 0) {
            word += __float_as_uint(__fadd_rn(fminf(y, 7.0f), 12582920.0f)) << 4 * i;  // 1.5 * 2^23 + 8
        } else if (CHOICE == 1) {
            // A quarter of the sum's bits is fraction: 2^-7, so that the guess is where an address has it.
            const float curve = fmaf(__uint_as_float(u32(BEND)), fabsf(y), __uint_as_float(u32(SLOPE)));
            const u32 guess = (__float_as_uint(fmaf(curve, y, __uint_as_float(u32(MIDDLE)))) & 0x780) | lane * 4;
            half[i / 4] += guess << i % 4 * 4;
            if (y > *(const float*)(memory + ROOM + guess)) half[i / 4] += 128 << i % 4 * 4;
        } else {
            const u32 cell = __float_as_uint(__fmaf_ru(y, __uint_as_float(u32(SLOPE)), __uint_as_float(u32(MIDDLE))));
            word += *(const u32*)(memory + ROOM + prmt(cell, lane * 4, 0x5504)) << 4 * i;
        }
    }
    if (CHOICE == 0) return word - 0x4B400000u * 0x11111111u ^ 0x88888888u;
    return CHOICE == 1 ? (half[0] - lane * 0x4444) >> 7 | (half[1] - lane * 0x4444) >> 7 << 16 : word;
}

__device__ __forceinline__ void encode(u8* out, i64 scales_at, i64 first, int count, u32 lane, const float (&sum)[32]) {
    const u32 key = largest_of(sum);
    const float spread = fmaxf(__fmul_rn(__uint_as_float(key >> 1), __uint_as_float(u32(PEAK_STEP))), 1.1754943508222875e-38f);
    float scale = fminf(__uint_as_float((__float_as_uint(spread) + 0xFFFF) & 0xFFFF0000u), __uint_as_float(u32(LIMIT)));
    if (INTEGERS && !(key & 1)) scale = -scale;
    const bool finite = key < 0xFF000000u;
    const float inverse = __frcp_rn(scale);
    if (lane % LANES == 0 && count > 0) *(u16*)(out + scales_at + first / BLOCK * 2) = finite ? __float_as_uint(scale) >> 16 : 0x7FC0;
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = finite ? codes_of(sum + 8 * w, inverse, lane) : 0;
    if (count == 32) {
        *(uint4*)(out + first / 2) = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {  // a byte at a time; zeros follow the last code
        const u32 byte = words[i / 8] >> i % 8 * 4 & (i + 1 < count ? 0xFF : 0x0F);
        if (i < count) out[first / 2 + i / 2] = byte;
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void sums(const u8* __restrict__ data, const u32* __restrict__ numbers, u8* __restrict__ out,
                                                              const void* __restrict__ own, i64 numel, i64 scales_at, i64 row_bytes, u32 stride,
                                                              int factor) {
    const u32 lane = threadIdx.x % 32;
    fill_tables(numbers);
    __syncthreads();
    const i64 pieces = (numel + 1023) / 1024, apart = i64(gridDim.x) * (THREADS / 32);
    i64 at = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    char* const mine = memory + ROOM + CELLS * CELL + threadIdx.x / 32 * STAGED;
    Piece piece;
    piece.codes = mine + lane * 16, piece.own = mine + (HELD ? 0 : 512 * RANKS);
    fetch(data, own, at, numel, scales_at, stride, lane, piece);
    for (; at < pieces; at += apart) {
        const i64 first = at * 1024 + lane * 32;
        const int count = max(0, int(min(numel - first, i64(32))));
        float sum[32];
        await_lots<0>();
        if (OWN >= 0) __syncwarp();
        if (!sum_ranks(piece, own, first, count, lane, sum)) {
            const i64 from = count ? first : 0;
            sum_slowly(data + from / 2, data + scales_at + from / BLOCK * 2, stride, own, piece.own, first, count, lane, sum);
        }
        if (OWN >= 0) __syncwarp();
        fetch(data, own, at + apart, numel, scales_at, stride, lane, piece);
#pragma unroll
        for (int i = 0; DIVIDE && i < 32; ++i) sum[i] = DIVIDE == 1 ? __fmul_rn(sum[i], __uint_as_float(factor)) : __fdiv_rn(sum[i], __uint_as_float(factor));
        if (count < 32)
#pragma unroll
            for (int i = 0; i < 32; ++i) sum[i] = i < count ? sum[i] : 0.0f;
        encode(out, scales_at, first, count, lane, sum);
    }
    const i64 codes_end = (numel + 1) / 2, end = scales_at + (numel + BLOCK - 1) / BLOCK * 2;
    if (blockIdx.x == 0 && threadIdx.x < 16) {
        if (codes_end + threadIdx.x < scales_at) out[codes_end + threadIdx.x] = 0;
        if (end + threadIdx.x < row_bytes) out[end + threadIdx.x] = 0;
    }
}
