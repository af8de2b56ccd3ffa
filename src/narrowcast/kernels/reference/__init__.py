"""Plain torch: what every operation means.

Five operations on matrices of rows. The compiled kernels (native.py, gpu.py) take the same arguments and
return the same bytes, bit for bit (`linear` but for the order of its sums); where one is in doubt, this file is right.

    encode      floats [rows, numel]        -> bytes  [rows, row_bytes]
    decode      bytes  [rows, row_bytes]    -> floats [rows, numel]
    decode_sum  bytes  [ranks, row_bytes]   -> floats [numel], the fp32 sum of the rows in order
    reduce      bytes  [ranks, row_bytes]   -> bytes  [row_bytes], decode_sum and encode in one
    linear      floats [batch, numel], bytes [rows, row_bytes] -> floats [batch, rows], x W^T + bias

All arithmetic is fp32, one correctly rounded operation at a time; only the mean of `sign` is summed in fp64.
Nothing here is clever, nothing here is fast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import FLT_MAX, FLT_MIN, Element, Format, Grid, Recipe, Scale, layout, scaling
from narrowcast.kernels.reference.casts import NAN, cast_bits, cast_output, cast_value, to_float32
from narrowcast.kernels.reference.draws import uniform

LEAF = 64
"""Magnitudes are summed in leaves of this many elements; see `mean_magnitude`."""


def encode(rows: Tensor, recipe: Recipe, seed: int) -> Tensor:
    """Encode each row of `rows` [rows, numel] (fp64, fp32, fp16 or bf16)."""
    format = recipe.format
    count, numel = rows.shape
    where = layout(format, numel)
    out = torch.zeros(count, where.row_bytes, dtype=torch.uint8, device=rows.device)
    if out.numel() == 0:
        return out
    x = to_float32(rows)
    if format.scale == Scale.NONE:
        out[:, : where.codes_bytes] = pack(cast_bits(x, format.element), format.bits)
        return out

    blocks = pad(x, (0, where.groups * where.group_size - numel)).view(count, where.groups, -1)
    finite = (magnitude_bits(blocks).amax(-1) < 0x7F800000).unsqueeze(-1)
    blocks = torch.where(finite, blocks, 0.0)
    sizes = group_sizes(numel, where.group_size, where.groups, x.device)
    scale = choose_scale(blocks, sizes, recipe).unsqueeze(-1)
    zeros = zero_points(blocks, scale, format)
    draws = None
    if format.stochastic:
        draws = uniform(seed, count, where.groups, where.group_size, x.device)
    codes = quantize(blocks, scale, zeros, recipe, draws)
    codes = torch.where(finite, codes, 0).view(count, -1)[:, :numel]

    out[:, : where.codes_bytes] = pack(codes, format.bits)
    stored = scale_bits(torch.where(finite, scale, NAN).squeeze(-1), format.scale)
    out[:, where.scales_offset : where.zeros_offset] = stored
    if format.affine:
        zeros = torch.where(finite, zeros, 0).squeeze(-1)
        out[:, where.zeros_offset : where.zeros_offset + where.groups] = zeros.to(torch.uint8)
    return out


def decode(data: Tensor, numel: int, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Decode each row of `data` [rows, row_bytes] to `numel` elements of `dtype`."""
    return cast_output(decode_float32(data, numel, recipe), dtype)


def decode_sum(
    data: Tensor,
    numel: int,
    recipe: Recipe,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
    dtype: torch.dtype,
) -> Tensor:
    """Sum the rows of `data` in order, in fp32, and divide by `divisor`.

    Where `own` [numel] is given it stands, exact, in the place of row `own_rank`, which is then not read.
    """
    total = torch.zeros(numel, dtype=torch.float32, device=data.device)
    for rank in range(data.shape[0]):
        if own is not None and rank == own_rank:
            term = to_float32(own)
        else:
            term = decode_float32(data[rank : rank + 1], numel, recipe)[0]
        total = term if rank == 0 else total + term
    if divisor != 1:
        total = total / torch.full_like(total, divisor)  # a number instead of a tensor: CUDA multiplies by 1 / divisor
    return cast_output(torch.where(total.isnan(), NAN, total), dtype)


def reduce(
    data: Tensor, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int, seed: int
) -> Tensor:
    """`decode_sum`, then `encode` of the sum as one row."""
    total = decode_sum(data, numel, recipe, own, own_rank, divisor, torch.float32)
    return encode(total.unsqueeze(0), recipe, seed)[0]


def linear(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    """`x` [batch, numel] times the transpose of the decoded rows, plus `bias` [rows], in fp32; rounded once.

    The one operation whose sums have no fixed order: other kernels come as near as fp32 sums in another order do.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = decode_float32(data, x.shape[1], recipe).to(wide)
    out = torch.empty(len(x), len(weight), dtype=wide, device=x.device)
    torch.mm(x.to(wide), weight.t(), out=out)  # autocast leaves alone what is written into `out`
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


# -- fake quantization: x, gradients and results are [outer, channels, inner], with a scale for each channel -----------


def fake_quantize(x: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """`x`, each element at its level: what encoding with these scales and decoding would make of it."""
    _, q = nearest_level(x, scale, grid)
    value = q * scale.view(1, -1, 1)
    value = value + 0.0 if grid.uniform else value  # integer codes know no negative zero
    return cast_output(torch.where(value.isnan(), NAN, value), x.dtype)


def fake_quantize_backward(grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The straight-through gradients of x and of the scales.

    `grad` passes where v = x / scale is not beyond the outermost levels. The scale's is the sum of grad * (q - v) there
    and of grad * q beyond: fp32 terms, summed in fp64. The order of the sum is left to each kernel.
    """
    v, q = nearest_level(x, scale, grid)
    outside = (v < grid.levels[0]) | (v > grid.levels[-1])
    of_x = torch.where(outside, 0.0, grad)
    terms = to_float32(grad) * torch.where(outside, q, q - v)
    return of_x, terms.double().sum((0, 2)).float()


def integer_linear(x: Tensor, weight: Tensor) -> Tensor:
    """int8 `x` [batch, k] times the transpose of int8 `weight` [rows, k], in int32: fp64 holds every sum exactly."""
    return (x.double() @ weight.double().t()).to(torch.int32)


def nearest_level(x: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """v = x / scale in fp32, and its level; both are NaN where x is."""
    v = to_float32(x) * (1.0 / scale).view(1, -1, 1)
    if grid.uniform:
        return v, v.round().clamp(grid.levels[0], grid.levels[-1])
    q = grid.levels[torch.searchsorted(grid.thresholds, v)]
    return v, torch.where(v.isnan(), NAN, q)


# -- scales ----------------------------------------------------------------------------------------------------


def choose_scale(blocks: Tensor, sizes: Tensor, recipe: Recipe) -> Tensor:
    """The scale of each block, already rounded to the format it is stored in. Blocks are finite here."""
    format = recipe.format
    step, limit = scaling(format, recipe.peak)
    if format.element == Element.SIGN:
        return round_up(mean_magnitude(blocks, sizes), format.scale, limit)
    if format.affine:
        spread = blocks.amax(-1).clamp(min=0.0) * step - blocks.amin(-1).clamp(max=0.0) * step
    else:
        spread = blocks.abs().amax(-1) * step
    scale = round_up(spread.clamp(min=FLT_MIN), format.scale, limit)
    return torch.where(extreme_is_negative(blocks), scale, -scale) if format.signed_scale else scale


def zero_points(blocks: Tensor, scale: Tensor, format: Format) -> Tensor:
    """The code that stands for zero in each block: 0 unless the codes are affine."""
    if not format.affine:
        return torch.zeros_like(scale, dtype=torch.int64)
    lowest = blocks.amin(-1, keepdim=True).clamp(max=0.0)
    codes = -lowest * (1.0 / scale)
    codes = codes.ceil() if format.stochastic else codes.round()
    return codes.clamp(0, 2**format.bits - 1).long()


def round_up(scale: Tensor, kind: int, limit: float) -> Tensor:
    """The smallest number of the stored format that is not below `scale`, at most `limit`."""
    bits = scale.view(torch.int32)
    if kind == Scale.BF16:
        scale = ((bits + 0xFFFF) >> 16 << 16).view(torch.float32)
    elif kind == Scale.E8M0:
        scale = ((bits + 0x7FFFFF) >> 23 << 23).view(torch.float32)
    elif kind == Scale.FP16:
        scale = scale.clamp(max=limit)
        half = scale.half()
        half = (half.view(torch.int16) + (half.float() < scale).to(torch.int16)).view(torch.float16)
        scale = half.float()
    return scale.clamp(max=limit)


def scale_bits(scale: Tensor, kind: int) -> Tensor:
    """Rounded scales [rows, groups] as the bytes [rows, groups * size] that a row stores."""
    scale = torch.where(scale.isnan(), NAN, scale)
    if kind == Scale.FP16:
        return scale.half().view(torch.uint8)
    bits = scale.contiguous().view(torch.int32)
    if kind == Scale.BF16:
        return (bits >> 16).to(torch.int16).view(torch.uint8)
    if kind == Scale.E8M0:
        return (bits >> 23).to(torch.uint8)
    return bits.view(torch.uint8)


def scale_value(stored: Tensor, kind: int) -> Tensor:
    """Inverse of `scale_bits`: bytes [rows, groups * size] as fp32 [rows, groups]."""
    stored = stored.clone(memory_format=torch.contiguous_format)  # aligned, whatever `stored` is a view of
    if kind == Scale.FP16:
        return stored.view(torch.float16).float()
    if kind == Scale.BF16:
        return (stored.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    if kind == Scale.E8M0:
        value = (stored.to(torch.int32) << 23).view(torch.float32)
        return torch.where(stored == 255, NAN, value)
    return stored.view(torch.float32)


def mean_magnitude(blocks: Tensor, sizes: Tensor) -> Tensor:
    """Mean of |x| over each block, summed in fp64 in one fixed order.

    Leaves of 64 elements are folded in halves (element i with i + 32, then i + 16, ...), and the leaves' sums
    are added in adjacent pairs until one is left; what is missing counts as zero.
    """
    leaves = -(-blocks.shape[-1] // LEAF)
    sums = pad(blocks.double().abs(), (0, leaves * LEAF - blocks.shape[-1]))
    sums = sums.view(*blocks.shape[:-1], leaves, LEAF)
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    sums = sums.squeeze(-1)
    while sums.shape[-1] > 1:
        sums = pad(sums, (0, sums.shape[-1] % 2))
        sums = sums[..., 0::2] + sums[..., 1::2]
    return (sums.squeeze(-1) / sizes).float()


def group_sizes(numel: int, group_size: int, groups: int, device: torch.device) -> Tensor:
    """How many elements each group really holds: the last one may be short."""
    sizes = torch.full((groups,), group_size, dtype=torch.float64, device=device)
    sizes[-1] = numel - (groups - 1) * group_size
    return sizes


# -- codes -----------------------------------------------------------------------------------------------------


def quantize(blocks: Tensor, scale: Tensor, zeros: Tensor, recipe: Recipe, draws: Tensor | None) -> Tensor:
    """The code of every element, as an integer tensor; only the low `bits` bits count."""
    format, table = recipe.format, recipe.table
    if format.element == Element.SIGN:
        return blocks.view(torch.int32) < 0
    y = blocks * (1.0 / scale)
    if format.element in (Element.E4M3, Element.E5M2):
        return cast_bits(y, format.element)
    if format.element == Element.LEVELS:
        assert table is not None
        return torch.searchsorted(table[1].contiguous(), y.contiguous())
    if draws is None:
        whole = y.round()
    else:
        whole = y.floor()
        whole = whole + (draws < y - whole)
    if format.affine:
        top = 2**format.bits - 1
        return (whole.clamp(-top, top).long() + zeros).clamp(0, top)
    top = 2 ** (format.bits - 1) - 1
    return whole.clamp(-top - 1 if format.signed_scale else -top, top).long()


def decode_float32(data: Tensor, numel: int, recipe: Recipe) -> Tensor:
    format, table = recipe.format, recipe.table
    where = layout(format, numel)
    if data.numel() == 0:
        return torch.zeros(data.shape[0], numel, dtype=torch.float32, device=data.device)
    codes = unpack(data[:, : where.codes_bytes], numel, format.bits)
    if format.scale == Scale.NONE:
        return cast_value(codes, format.element)
    scale = scale_value(data[:, where.scales_offset : where.zeros_offset], format.scale)
    scale = scale.repeat_interleave(where.group_size, 1)[:, :numel]
    if format.element == Element.SIGN:
        value = torch.where(codes == 1, -scale, scale)
    elif format.element == Element.INT:
        half = 2 ** (format.bits - 1)
        value = ((codes ^ half) - half).float() * scale + 0.0  # a zero times a negative scale is a zero all the same
    elif format.affine:
        zeros = data[:, where.zeros_offset : where.zeros_offset + where.groups].long()
        value = (codes - zeros.repeat_interleave(where.group_size, 1)[:, :numel]).float() * scale
        value = value.clamp(-FLT_MAX, FLT_MAX)
    elif format.element == Element.LEVELS:
        assert table is not None
        value = table[0][codes] * scale
    else:
        value = cast_value(codes, format.element) * scale
    return torch.where(value.isnan(), NAN, value)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] as the little-endian bit stream [rows, ceil(n * bits / 8)]."""
    rows, n = codes.shape
    if bits >= 8:
        return codes.to({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]).contiguous().view(torch.uint8)
    codes = pad(codes.long() & (2**bits - 1), (0, -n % 8)).view(rows, -1, 8)
    steps = torch.arange(8, dtype=torch.int64, device=codes.device)
    words = (codes << (steps * bits)).sum(-1, keepdim=True)
    packed = (words >> (steps[:bits] * 8)) & 0xFF
    return packed.to(torch.uint8).view(rows, -1)[:, : -(-n * bits // 8)]


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """Inverse of `pack`: codes [rows, n] as non-negative int64 (16- and 32-bit codes keep their sign)."""
    rows = data.shape[0]
    data = data.clone(memory_format=torch.contiguous_format)  # aligned, whatever `data` is a view of
    if bits >= 8:
        return data.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]).long()
    groups = -(-n // 8)
    data = pad(data, (0, groups * bits - data.shape[1])).view(rows, groups, bits).long()
    steps = torch.arange(8, dtype=torch.int64, device=data.device)
    words = (data << (steps[:bits] * 8)).sum(-1, keepdim=True)
    codes: Tensor = (words >> (steps * bits)) & (2**bits - 1)
    return codes.view(rows, -1)[:, :n]


def extreme_is_negative(blocks: Tensor) -> Tensor:
    """Whether the element of largest magnitude is negative; of equals, a negative one counts."""
    bits = blocks.contiguous().view(torch.int32)
    keys: Tensor = ((magnitude_bits(blocks).long() << 1) | (bits < 0)).amax(-1)
    return keys % 2 == 1


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as integers: they order like the magnitudes, with infinity and NaN on top."""
    return x.contiguous().view(torch.int32) & 0x7FFFFFFF
