// y [batch, n] = the sum of `sums` [PARTS, batch, n], in order, + bias; a thread takes WIDE neighbours, 1 or 4.

extern "C" __global__ __launch_bounds__(256) void total(const float* sums, const void* bias, void* __restrict__ y,
                                                        i64 count, int n) {
    admit_the_next();
    after_the_last();
    const i64 at = (i64(blockIdx.x) * 256 + threadIdx.x) * WIDE;
    if (at >= count) return;
    float part[PARTS][WIDE];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (WIDE == 4) *(float4*)part[p] = *(const float4*)(sums + p * count + at);
        else part[p][0] = sums[p * count + at];
    }
    const int row = at % n;
    u32 bits[WIDE];
#pragma unroll
    for (int i = 0; i < WIDE; ++i) {
        float all = part[0][i];
#pragma unroll
        for (int p = 1; p < PARTS; ++p) all += part[p][i];
        bits[i] = half_of_x(with_bias(all, bias, row + i));
    }
    if (WIDE == 4) *(uint2*)((u16*)y + at) = make_uint2(bits[0] | bits[1 % WIDE] << 16, bits[2 % WIDE] | bits[3 % WIDE] << 16);
    else ((u16*)y)[at] = bits[0];
}
