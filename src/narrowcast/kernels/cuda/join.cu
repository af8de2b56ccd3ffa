// What wide.cu left in parts: y = the sum of `sums` [tile][PARTS][TILES][threads of teams][4] over the parts, in order, + bias, for
// the tiles from `whole` on. A thread takes four sums, as a lane of wgmma has them: rows g and g + 8 of W, two rows of x. It exchanges
// two of them with the lane of row g ^ 1, so that it stores pairs of neighbours.

extern "C" __global__ __launch_bounds__(256) void join(const float4* sums, const void* bias,
                                                       u16* __restrict__ y, int batch, int n, int columns, int whole) {
    constexpr int THREADS = TEAMS * 128, EACH = TILES * THREADS, BLOCKS = EACH / 256;
    admit_the_next();
    after_the_last();
    const int tile = whole + blockIdx.x / BLOCKS, in = blockIdx.x % BLOCKS * 256 + threadIdx.x;
    const float4* const from = sums + i64(blockIdx.x / BLOCKS) * (PARTS * EACH) + in;
    float4 part[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) part[p] = from[p * EACH];
    float4 all = part[0];
#pragma unroll
    for (int p = 1; p < PARTS; ++p) all.x += part[p].x, all.y += part[p].y, all.z += part[p].z, all.w += part[p].w;
    const int thread = in % THREADS, g = thread % 32 / 4, odd = g % 2;
    const int row = tile / columns * (64 * TEAMS) + thread / 32 * 16 + g - odd;
    const int column = tile % columns * (8 * TILES) + in / THREADS * 8 + thread % 4 * 2 + odd;
    const float near = __shfl_xor_sync(~0u, odd ? all.x : all.y, 4), far = __shfl_xor_sync(~0u, odd ? all.z : all.w, 4);
    if (column >= batch) return;
    u32* const to = (u32*)(y + i64(column) * n + row);
    if (row < n)
        to[0] = pair_of(with_bias(odd ? near : all.x, bias, row), with_bias(odd ? all.y : near, bias, row + 1));
    if (row + 8 < n)
        to[4] = pair_of(with_bias(odd ? far : all.z, bias, row + 8), with_bias(odd ? all.w : far, bias, row + 9));
}
