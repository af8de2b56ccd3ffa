// From codes to pairs of halves of the kind of x, exactly (levels: rounded once), for tensor cores.
//
//   CODES  0 int8, 1 int4, 2 table of bytes (8-bit codes), 3 table of pairs (4-bit codes)

// A small integer q in the low bits of a half under this exponent is 1024 + q or 128 + q.
constexpr u32 MAGIC = X == 1 ? 0x64086408u : 0x43084308u, OFFSET = X == 1 ? 0xE408E408u : 0xC308C308u;

// Two 4-bit integers, four apart, as a pair of halves.
__device__ __forceinline__ u32 nibbles(u32 word) { return plus(insert(word, 0x000F000Fu, MAGIC), OFFSET); }

// Two neighbouring bytes as a pair of halves. fp16: 1024 + 128 + q, top bit flipped. bf16 has no room for eight bits: the low
// seven on top of 128, less 128 or, where the top bit is set and the exponent one higher, 256.
// In tile.cu with two tiles the way through fp32 is faster, by 7% (bench/gpu_linear.py, int8 at batch 16).
#if !defined(TEAM) && TILES == 2
constexpr bool THROUGH_FP32 = X == 2;
#else
constexpr bool THROUGH_FP32 = false;
#endif
constexpr u32 TOP = X == 1 ? 0x64646464u : 0x43434343u;
__device__ __forceinline__ u32 picked_bytes(u32 word, u32 pick, u32 top) {
    if (X == 1) return plus(prmt(word ^ 0x80808080u, top, pick), 0xE480E480u);
    const u32 both = prmt(word, top, pick);
    return plus(both & 0xFF7FFF7Fu, insert(both, 0xFF80FF80u, 0x80008000u));
}
__device__ __forceinline__ u32 bytes(u32 word, int high, u32 top) {
    if (THROUGH_FP32) {
        const float a = __uint_as_float(prmt(word ^ 0x80808080u, 0x4B000000u, high ? 0x7442 : 0x7440)) - 8388736.0f;
        const float b = __uint_as_float(prmt(word ^ 0x80808080u, 0x4B000000u, high ? 0x7443 : 0x7441)) - 8388736.0f;
        return bfloat_pair(a, b);
    }
    return picked_bytes(word, high ? 0x4342 : 0x4140, top);
}

#if CODES >= 2
// What a byte stands for, once for every lane: each has a bank of its own. (Where bytes are FP8, there is none.)
#if defined(FP8) && FP8
__shared__ u32 table[1][32];
#else
__shared__ u32 table[256][32];
#endif
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

// The eight elements of one unit as four pairs; `x_pairs` orders x alike. `top` is TOP, as a variable where the compiler should
// keep it in a register: an instruction holds one constant, and prmt has two.
__device__ __forceinline__ void pairs(const u32* words, u32 lane, u32* out, u32 top = TOP) {
    if (CODES == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = bytes(words[i / 2], i % 2, top);
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

#if CODES >= 2
__device__ __forceinline__ void fill_table(const u32* levels, int threads) {
#pragma unroll 4
    for (int i = threadIdx.x; i < 256 * 8; i += threads) {
        const u32 v = __ldg(levels + i / 8);
        ((uint4*)table)[i] = make_uint4(v, v, v, v);
    }
}
#endif
