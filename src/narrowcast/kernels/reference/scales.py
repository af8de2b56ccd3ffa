"""Plain torch: a block's scale and zero point, and scales as the bytes that a row stores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import FLT_MIN, Element, Format, Recipe, Scale, scaling
from narrowcast.kernels.reference.casts import NAN

LEAF = 64
"""Magnitudes are summed in leaves of this many elements; see `mean_magnitude`."""


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
    """Rounded scales [rows, blocks] as the bytes [rows, blocks * size] that a row stores."""
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
    """Inverse of `scale_bits`: bytes [rows, blocks * size] as fp32 [rows, blocks]."""
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


def block_sizes(numel: int, block_size: int, blocks: int, device: torch.device) -> Tensor:
    """How many elements each block really holds: the last one may be short."""
    sizes = torch.full((blocks,), block_size, dtype=torch.float64, device=device)
    sizes[-1] = numel - (blocks - 1) * block_size
    return sizes


def extreme_is_negative(blocks: Tensor) -> Tensor:
    """Whether the element of largest magnitude is negative; of equals, a negative one counts."""
    bits = blocks.contiguous().view(torch.int32)
    keys: Tensor = ((magnitude_bits(blocks).long() << 1) | (bits < 0)).amax(-1)
    return keys % 2 == 1


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as integers: they order like the magnitudes, with infinity and NaN on top."""
    return x.contiguous().view(torch.int32) & 0x7FFFFFFF
