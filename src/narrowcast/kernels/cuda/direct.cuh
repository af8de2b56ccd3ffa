// From codes to pairs of halves of the kind of x with the fewest instructions, for ring.cu; a half is worth UNIT.
//
//   CODES  0 int8, 1 int4, 3 table of pairs (4-bit codes), 4 fp8_e4m3
//
// The low eight bits of a half are an integer times the smallest half that there is: below the first power of two and in the
// first octave above it halves lie evenly. So a code needs no exponent of its own, and one multiply-add, which is exact,
// takes it to a number of ordinary size and takes its offset away.

constexpr int TABLE = CODES == 3 ? 64 << 10 : 0;

// int4 and int8: the largest power of two is 2^15 or 2^127, the smallest half 2^-24 or 2^-133.
constexpr float UNIT = CODES > 1 ? 1.0f : X == 1 ? 512.0f : 64.0f;
constexpr u32 LARGEST = X == 1 ? 0x78007800u : 0x7F007F00u;         // 2^15, 2^127
constexpr u32 SIXTEENTH = X == 1 ? 0x68006800u : 0x7D007D00u;       // a sixteenth of it
constexpr u32 LESS_8 = X == 1 ? 0xA400A400u : 0xBE00BE00u;          // -8 / UNIT
constexpr u32 LESS_128 = X == 1 ? 0xB400B400u : 0xC000C000u;        // -128 / UNIT

// The eight elements of one unit as four pairs; `x_pairs` orders x alike.
__device__ __forceinline__ void decode(const u32* words, u32 lane, const void* table, u32* out) {
    if (CODES == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = fma_pair(prmt(words[i / 2] ^ 0x80808080u, 0, i % 2 ? 0x4342 : 0x4140), LARGEST, LESS_128);
    } else if (CODES == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 word = i < 2 ? words[0] : words[0] >> 8;
            out[i] = i % 2 ? fma_pair(insert(word, 0x00F000F0u, 0x00800080u), SIXTEENTH, LESS_8)
                           : fma_pair(insert(word, 0x000F000Fu, 0x00080008u), LARGEST, LESS_8);
        }
    } else if (CODES == 3) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = *(const u32*)((const u8*)table + prmt(words[0], lane * 4, 0x7604 | i << 4));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = i % 2 ? e4m3_pair<true>(words[i / 2]) : e4m3_pair<false>(words[i / 2]);
    }
}

// What a byte stands for, once for every lane: each has a bank of its own. Entries are 256 bytes apart, so that an address is a
// byte beside a lane's number: one instruction.
__device__ __forceinline__ void fill_table(uint4* table, const u32* levels, int threads) {
    if (!TABLE) return;
#pragma unroll 4
    for (int i = threadIdx.x; i < 256 * 8; i += threads) {
        const u32 v = __ldg(levels + i / 8);
        table[i / 8 * 16 + i % 8] = make_uint4(v, v, v, v);
    }
}
