"""Plain torch: rows of floats to rows of bytes, and back.

encode             floats [rows, numel]      -> bytes  [rows, row_bytes]
decode             bytes  [rows, row_bytes]  -> floats [rows, numel]
decode_sum         bytes  [ranks, row_bytes] -> floats [numel], the fp32 sum of the rows in order
decode_sum_encode  bytes  [ranks, row_bytes] -> bytes  [row_bytes], both in one
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import Count, Element, Format, Layout, Recipe, Scale, layout
from narrowcast.kernels.reference.casts import NAN, cast_bits, cast_output, cast_value, to_float32
from narrowcast.kernels.reference.codes import dequantize, pack, quantize, unpack
from narrowcast.kernels.reference.draws import uniform
from narrowcast.kernels.reference.scales import (
    block_sizes,
    choose_scale,
    magnitude_bits,
    scale_bits,
    scale_value,
    zero_points,
)


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

    blocks, finite = as_blocks(x, where)
    sizes = block_sizes(numel, where.block_size, where.blocks, x.device)
    scale = choose_scale(blocks, sizes, recipe).unsqueeze(-1)
    zeros = zero_points(blocks, scale, format)
    draws = None
    if format.stochastic:
        draws = uniform(seed, count, where.blocks, where.block_size, x.device)
    codes = quantize(blocks, scale, zeros, recipe, draws)
    write_blocks(out, codes, scale, zeros, finite, format, numel)
    return out


def as_blocks(x: Tensor, where: Layout) -> tuple[Tensor, Tensor]:
    """fp32 rows [rows, numel] as blocks [rows, blocks, size], zeros behind the last element; and which are finite.

    Blocks that hold an infinity or a NaN come out as zeros.
    """
    count, numel = x.shape
    blocks = pad(x, (0, where.blocks * where.block_size - numel)).view(count, where.blocks, -1)
    finite = (magnitude_bits(blocks).amax(-1) < 0x7F800000).unsqueeze(-1)
    return torch.where(finite, blocks, 0.0), finite


def write_blocks(
    out: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, finite: Tensor, format: Format, numel: int
) -> None:
    """Write codes [rows, blocks, size], scales and zero points [rows, blocks, 1] into rows of bytes."""
    where = layout(format, numel)
    codes = torch.where(finite, codes, 0).view(len(out), -1)[:, :numel]
    out[:, : where.codes_bytes] = pack(codes, format.bits)
    stored = scale_bits(torch.where(finite, scale, NAN).squeeze(-1), format.scale)
    out[:, where.scales_offset : where.zeros_offset] = stored
    if format.affine:
        zeros = torch.where(finite, zeros, 0).squeeze(-1)
        out[:, where.zeros_offset : where.zeros_offset + where.blocks] = zeros.to(torch.uint8)


def decode(data: Tensor, numel: Count, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """Decode each row of `data` [rows, row_bytes] to `numel` elements of `dtype`."""
    return cast_output(decode_float32(data, numel, recipe), dtype)


def decode_sum(
    data: Tensor,
    numel: Count,
    dtype: torch.dtype,
    recipe: Recipe,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
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


def decode_sum_encode(
    data: Tensor, numel: Count, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int, seed: int
) -> Tensor:
    """`decode_sum`, then `encode` of the sum as one row."""
    total = decode_sum(data, numel, torch.float32, recipe, own, own_rank, divisor)
    return encode(total.unsqueeze(0), recipe, seed)[0]


def decode_float32(data: Tensor, numel: int, recipe: Recipe) -> Tensor:
    """Decode each row of `data` to fp32."""
    format = recipe.format
    where = layout(format, numel)
    if data.numel() == 0:
        return torch.zeros(data.shape[0], numel, dtype=torch.float32, device=data.device)
    codes = unpack(data[:, : where.codes_bytes], numel, format.bits)
    if format.scale == Scale.NONE:
        return cast_value(codes, format.element)
    scale = scale_value(data[:, where.scales_offset : where.zeros_offset], format.scale)
    scale = scale.repeat_interleave(where.block_size, 1)[:, :numel]
    zeros = None
    if format.affine:
        zeros = data[:, where.zeros_offset : where.zeros_offset + where.blocks].long()
        zeros = zeros.repeat_interleave(where.block_size, 1)[:, :numel]
    if format.element == Element.INT:
        half = 2 ** (format.bits - 1)
        codes = (codes ^ half) - half
    value = dequantize(codes, scale, zeros, recipe)
    return torch.where(value.isnan(), NAN, value)
