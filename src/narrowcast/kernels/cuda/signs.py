"""Sums of rows of signs, encoded again, by signs.cu: Codec.decode_sum_encode of `sign` without an own row.

It is made for bf16 scales of 64 elements, two to eight ranks and Hopper, where it was measured. triton/ takes the rest.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from narrowcast.kernels.cuda import choose, nvrtc
from narrowcast.kernels.cuda.formats import sources
from narrowcast.kernels.cuda.launch import reading
from narrowcast.kernels.cuda.nvrtc import Int
from narrowcast.kernels.cuda.sums import bits_of, division, readable, runs_on
from narrowcast.kernels.layout import Element, Format, Recipe, Scale, layout, scaling

MOST_RANKS = 8
FEWEST = 1 << 24
"""Elements from which on it is faster than Triton, whose launches take the host less (bench/results/gpu-h200.md)."""

BLOCK = 64
WARPS = 20
"""Warps of a block; each processor has one block."""

PAGE = 4096
"""Shared memory of a warp. One more page is there, since the first begins at a multiple of its size."""


def decode_sum_encode(
    out: Tensor, data: Tensor, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
) -> bool:
    """Encode the sum of the rows of `data`, or return False. `out` is contiguous, at a multiple of 16 bytes."""
    divide, device = division(divisor), data.device
    if own is not None or numel < FEWEST or not 2 <= len(data) <= MOST_RANKS or divide == 2:
        return False
    if not _known(recipe.format) or not readable(data) or not runs_on(device):
        return False
    where, limit = layout(recipe.format, numel), scaling(recipe.format, recipe.peak).limit
    grid = min(choose._processors(device), -(-where.blocks // (32 * WARPS)))
    with torch.cuda.device(device):
        kernel = _compile(len(data), divide, limit, 32 * WARPS, device.index)
        sizes = (numel, where.scales_offset, where.row_bytes, Int(data.stride(0)), Int(bits_of(1.0 / divisor)))
        kernel(grid, 32 * WARPS, (WARPS + 1) * PAGE, (data, None, out, *sizes))
    return True


def takes(recipe: Recipe, device: torch.device) -> bool:
    """Whether large sums of a few rows, none of them own, are done here."""
    return _known(recipe.format) and runs_on(device)


@cache
def _compile(ranks: int, divide: int, limit: float, threads: int, device: int) -> nvrtc.Function:
    defines = {"RANKS": ranks, "DIVIDE": divide, "LIMIT": bits_of(limit), "THREADS": threads}
    defines |= {"X": 0, "SCALE": int(Scale.BF16), "BLOCK": BLOCK, "BIAS": -1, "UNROLL": 1}
    return nvrtc.function(sources("signs"), "signs", (*defines.items(), *reading()), device)


def _known(format: Format) -> bool:
    return format.element == Element.SIGN and format.scale == Scale.BF16 and format.block == BLOCK
