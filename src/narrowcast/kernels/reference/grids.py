"""Plain torch: fake quantization. x, gradients and results are [outer, channels, inner], with a scale per channel."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.layout import Grid
from narrowcast.kernels.reference.casts import NAN, cast_output, to_float32


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


def nearest_level(x: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """v = x / scale in fp32, and its level; both are NaN where x is."""
    v = to_float32(x) * (1.0 / scale).view(1, -1, 1)
    if grid.uniform:
        return v, v.round().clamp(grid.levels[0], grid.levels[-1])
    q = grid.levels[torch.searchsorted(grid.thresholds, v)]
    return v, torch.where(v.isnan(), NAN, q)
