// What wide.cu left in parts: y = the sum of `sums` [tile][PARTS][WIDTH][HEIGHT] over the parts, in order, + bias, for the tiles from
// `whole` on. A thread takes four neighbours of y.

extern "C" __global__ __launch_bounds__(256) void join(const float4* __restrict__ sums, const void* __restrict__ bias,
                                                       u16* __restrict__ y, int batch, int n, int columns, int whole) {
    constexpr int LINE = HEIGHT / 4, EACH = WIDTH * LINE, BLOCKS = EACH / 256;
    admit_the_next();
    after_the_last();
    const int tile = whole + blockIdx.x / BLOCKS, in = blockIdx.x % BLOCKS * 256 + threadIdx.x;
    const int row = tile / columns * HEIGHT + in % LINE * 4, column = tile % columns * WIDTH + in / LINE;
    if (row >= n || column >= batch) return;
    const float4* const from = sums + i64(blockIdx.x / BLOCKS) * (PARTS * EACH) + in;
    float4 part[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) part[p] = from[p * EACH];
    float4 all = part[0];
#pragma unroll
    for (int p = 1; p < PARTS; ++p) all.x += part[p].x, all.y += part[p].y, all.z += part[p].z, all.w += part[p].w;
    *(uint2*)(y + i64(column) * n + row) =
        make_uint2(half_of_x(with_bias(all.x, bias, row)) | half_of_x(with_bias(all.y, bias, row + 1)) << 16,
                   half_of_x(with_bias(all.z, bias, row + 2)) | half_of_x(with_bias(all.w, bias, row + 3)) << 16);
}
