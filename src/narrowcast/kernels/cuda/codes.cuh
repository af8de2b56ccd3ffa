// Whether codes have 4 bits, and the order in which x meets them.
//
//   CODES  1 int4, 3 table of pairs; others have 8 bits

constexpr bool NARROW = CODES == 1 || CODES == 3;

// Eight elements of x as four pairs: in the order of the pairs that four shifts of a word make of 4-bit integers.
__device__ __forceinline__ uint4 x_pairs(uint4 v) {
    if (CODES != 1) return v;
    return make_uint4(prmt(v.x, v.z, 0x5410), prmt(v.x, v.z, 0x7632), prmt(v.y, v.w, 0x5410), prmt(v.y, v.w, 0x7632));
}
