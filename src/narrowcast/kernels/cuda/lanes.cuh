// From codes as they lie in a row to what a lane of wgmma holds of it, with the scale of its block: for wide.cu.
//
// Of sixteen elements of a row, lane t of four holds 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, two pairs of halves of the kind of x. x
// stays in the order in which it lies in memory, so a lane picks its codes out of those of all four.
//
//   SCALING  0: a row has one scale or none, which is left to the sums. 1: halves are multiplied by halves, which is exact but
//            for one rounding, where codes and scales are numbers of x's kind. 2: other codes or scales; in bf16 as sums of two
//            halves, which have 16 binary digits, before the product is rounded; in fp16 through fp32
//   FP8      0, or what bytes of a table are: 1 e4m3, 2 e5m2. The hardware knows them

// What a lane loads of one row: 32 codes of 4 bits, or its own of 16 codes of 8 bits.
constexpr int WORDS = NARROW ? 4 : 2;

// `factor` is a constant that the compiler should keep in a register: `there` is not 0.
struct Lane {
    u32 lane, pick, turn, factor;
};

__device__ __forceinline__ Lane lane_of(int lane, int there) {
    const u32 t = lane & 3;
    const u32 of_words = t & 1 ? 0x7632 : 0x5410, of_bytes = t & 1 ? 0x4342 : 0x4140, of_nibbles = X == 1 ? t | t << 8 : t | (4 + t) << 8;
    const u32 pick = CODES == 1 ? of_nibbles : CODES == 0 ? of_bytes : of_words;
    return {u32(lane), pick, (8 * t + 25) & 31, there ? (X == 1 ? 0x2C003C00u : 0x3E003F80u) : 0};
}

__device__ __forceinline__ void load_words(const u8* row, int t, u32 (&words)[WORDS]) {
    if (NARROW) {
        const uint4 v = *(const uint4*)row;
        words[0] = v.x, words[1] = v.y, words[2 % WORDS] = v.z, words[3 % WORDS] = v.w;
    } else {
        words[0] = *(const u32*)(row + t / 2 * 4), words[1] = *(const u32*)(row + t / 2 * 4 + 8);
    }
}

constexpr bool TWO_HALVES = SCALING == 2 && X == 2 && CODES != 2;

// The scale of a block as it is used: a pair of halves, and what they lack; or fp32.
struct Scale {
    u32 high, low;
};

__device__ __forceinline__ Scale scale_of(u32 bits) {
    if (SCALING == 1) return {bits | bits << 16, 0};
    const float value = scale_value(bits);
    if (!TWO_HALVES) return {__float_as_uint(value), 0};
    const u32 high = bfloat_pair(value, value);
    const float near = __uint_as_float(high << 16), rest = near == value ? 0.0f : value - near;  // also of an infinity
    return {high, bfloat_pair(rest, rest)};
}

constexpr u32 MINUS_ZERO = 0x80008000u;  // which, added, keeps the sign of a zero

__device__ __forceinline__ u32 times(u32 pair, Scale scale) {
    if (SCALING == 0) return pair;
    if (SCALING == 1) return fma_pair(pair, scale.high, MINUS_ZERO);
    if (TWO_HALVES) return fma_pair(pair, scale.high, SCALE == 2 || SCALE == 4 ? MINUS_ZERO : fma_pair(pair, scale.low, MINUS_ZERO));
    const float s = __uint_as_float(scale.high);
    if (X == 1) return pair_of(half_value(pair & 0xFFFF) * s, half_value(pair >> 16) * s);
    return pair_of(__uint_as_float(pair << 16) * s, __uint_as_float(pair & 0xFFFF0000u) * s);
}

// Two neighbouring 4-bit integers: the first in the low bits of a half, the other four (fp16) or three bits (bf16, whose
// fraction has seven) further up in the other half.
__device__ __forceinline__ u32 neighbours(u32 word, const Lane& own) {
    if (X == 1) return fma_pair(insert(prmt(word, word, own.pick), 0x00F0000Fu, 0x64806408u), own.factor, 0xD480E408u);
    return fma_pair(insert(prmt(word, word >> 1, own.pick), 0x0078000Fu, 0x43404308u), own.factor, 0xC1C0C308u);
}

// The numbers of a byte of the table: it has 128 bytes for each, the same for every lane.
__device__ __forceinline__ const char* place_in_table(u32 word, u32 turn, u32 lane) {
#if CODES >= 2
    return (const char*)table + ((rotate(word, turn) & 0x7F80) | lane);
#else
    return nullptr;
#endif
}

// A lane's two integers of a word, which are its low or its high bytes.
__device__ __forceinline__ u32 scaled_integers(u32 word, const Lane& own, Scale scale, u32 top) {
    if (SCALING != 2 || TWO_HALVES) return times(picked_bytes(word, own.pick, top), scale);
    const u32 both = prmt(word ^ 0x80808080u, 0, own.pick);
    const float low = __uint_as_float(prmt(both, 0x4B000000u, 0x7440)) - 8388736.0f, s = __uint_as_float(scale.high);
    const float high = __uint_as_float(prmt(both, 0x4B000000u, 0x7442)) - 8388736.0f;
    return pair_of(low * s, high * s);
}

// Bytes 2 i and 2 i + 1 of four of a table, or fp8.
__device__ __forceinline__ u32 scaled_bytes(u32 word, int i, const Lane& own, Scale scale) {
    const float s = SCALING == 0 ? 1.0f : SCALING == 1 ? __uint_as_float(scale.high << 16) : __uint_as_float(scale.high);
    if (FP8) {
        const u32 pair = fp8_pair(i ? word >> 16 : word & 0xFFFF, FP8 == 2);
        return X == 1 ? times(pair, scale) : pair_of(half_value(pair & 0xFFFF) * s, half_value(pair >> 16) * s);
    }
    if (SCALING != 2) {
        const u32 low = i ? entry<2>(word, own.lane) : entry<0>(word, own.lane);
        return times(prmt(low, i ? entry<3>(word, own.lane) : entry<1>(word, own.lane), 0x5410), scale);
    }
    float both[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) both[j] = *(const float*)place_in_table(word, (25 + 8 * (2 * i + j)) & 31, own.lane * 4);
    return pair_of(both[0] * s, both[1] * s);
}

// What the product of levels and a scale has besides that of their first halves.
__device__ __forceinline__ u32 times_rest(uint2 both, Scale scale) {
    const u32 rest = fma_pair(both.y, scale.high, MINUS_ZERO);
    return SCALE == 2 || SCALE == 4 ? rest : fma_pair(both.x, scale.low, rest);
}

// The two pairs of the sixteen elements `part` of a lane's words.
__device__ __forceinline__ void decode(const u32 (&words)[WORDS], int part, const Lane& own, Scale scale, u32 top, u32& low, u32& high) {
    if (CODES == 0) {
        low = scaled_integers(words[0], own, scale, top), high = scaled_integers(words[1], own, scale, top);
        return;
    }
    if (CODES == 2) {
        const u32 word = prmt(words[0], words[1], own.pick);
        low = scaled_bytes(word, 0, own, scale), high = scaled_bytes(word, 1, own, scale);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 word = words[(2 * part + i) % WORDS];
        u32 pair;
        if (CODES == 1) {
            pair = times(neighbours(word, own), scale);
        } else if (SCALING == 2) {
            const uint2 both = *(const uint2*)place_in_table(word, own.turn, own.lane % 16 * 8);
            const float s = __uint_as_float(scale.high);
            if (TWO_HALVES) pair = fma_pair(both.x, scale.high, times_rest(both, scale));
            else pair = pair_of(__uint_as_float(both.x) * s, __uint_as_float(both.y) * s);
        } else {
            pair = times(*(const u32*)place_in_table(word, own.turn, own.lane * 4), scale);
        }
        (i ? high : low) = pair;
    }
}

#if CODES >= 2
// `levels`: for each byte a pair of halves; with SCALING 2 fp32, two numbers for two codes of 4 bits, else one.
__device__ __forceinline__ void fill_levels(const u32* levels, int threads) {
    if (FP8) return;
    for (int i = threadIdx.x; i < 256 * 8; i += threads) {
        const bool two = SCALING == 2 && NARROW;
        u32 a = __ldg(levels + (two ? i / 8 * 2 : i / 8)), b = __ldg(levels + (two ? i / 8 * 2 + 1 : i / 8));
        if (two && TWO_HALVES) {
            const float low = __uint_as_float(a), high = __uint_as_float(b);
            a = bfloat_pair(low, high);
            b = bfloat_pair(low - __uint_as_float(a << 16), high - __uint_as_float(a & 0xFFFF0000u));
        }
        ((uint4*)table)[i] = make_uint4(a, b, a, b);
    }
}
#endif
