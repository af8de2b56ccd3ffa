"""Where to clip: start values from data.

A clip is the magnitude at which a grid saturates: that of its top level. clip / top is the scale. Data comes as rows,
[channels, n]: each channel gets a clip of its own.

    max         nothing is clipped
    percentile  all but a small share of the elements is within
    mse         the least mean squared error, out of 100 candidates between 1/80 and 5/4 of "max"

A channel of zeros takes the largest clip of the other channels, or 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.errors import QuantizeError
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.nn.qat.grids import CodecGrid

STARTS = ("max", "percentile", "mse")
SHARE = 0.999
"""The share of elements that "percentile" keeps within the clip."""

FRACTIONS = [step / 80 for step in range(1, 101)]
SEARCHED = 1 << 20
"""Elements of one channel that are searched at most; of more, evenly spaced ones are taken."""


def scale_of(clip: Tensor, top: float) -> Tensor:
    """clip / top, correctly rounded on every device: CUDA multiplies by 1 / top where top is a Python number."""
    return clip / torch.full_like(clip, top)


def clip_of(rows: Tensor, grid: CodecGrid, start: str) -> Tensor:
    """The clip of each row, fp32 [channels], positive."""
    rows = _thinned(rows.detach().float())
    low, high = rows.amin(1), rows.amax(1)
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise QuantizeError(
            "x: clips are chosen from data, and this data holds an infinity or a NaN. Usually the model diverged, or "
            "fp16 overflowed: look at the batch, or at the weights, before quantizing."
        )
    if start == "percentile":
        place = max(1, math.ceil(SHARE * rows.shape[1]))
        bound = rows.abs().kthvalue(place, 1).values
        low, high = torch.maximum(low, -bound), torch.minimum(high, bound)
    clip = smallest_clip(low, high, grid)
    return search_clip(rows, clip, grid) if start == "mse" else clip


def smallest_clip(low: Tensor, high: Tensor, grid: CodecGrid) -> Tensor:
    """The smallest clips at which nothing in [low, high] saturates."""
    levels = grid.levels
    first, last = float(levels[0]), float(levels[-1])
    scale = torch.zeros_like(high)
    if last > 0:
        scale = torch.maximum(scale, high / last)
    if first < 0:
        scale = torch.maximum(scale, low / first)
    clip = scale * grid.top
    return _like_others(clip, clip > 0)


def search_clip(rows: Tensor, largest: Tensor, grid: CodecGrid, weights: Tensor | None = None) -> Tensor:
    """The fraction of each clip in `largest` with the least squared error; `weights` counts the elements."""
    kernel = grid.on(rows.device)
    best, least = largest.clone(), torch.full_like(largest, math.inf)
    rows = rows.contiguous()
    for fraction in FRACTIONS:
        clip = largest * fraction
        error = (fake_quantize(rows, scale_of(clip, grid.top).clamp(min=2.0**-126), kernel, 0) - rows).square_()
        total = (error if weights is None else error * weights).sum(1)
        better = total < least
        best, least = torch.where(better, clip, best), torch.where(better, total, least)
    return _like_others(best, (rows != 0).any(1))  # zeros lose nothing at any clip


def _like_others(clip: Tensor, chosen: Tensor) -> Tensor:
    """`clip`; where none was `chosen`, the largest of the others, or 1."""
    return torch.where(chosen, clip, float(clip[chosen].max()) if bool(chosen.any()) else 1.0)


def _thinned(rows: Tensor) -> Tensor:
    return rows[:, :: -(-rows.shape[1] // SEARCHED)] if rows.shape[1] > SEARCHED else rows
