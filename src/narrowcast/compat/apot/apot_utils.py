"""From numbers to codes and levels, and back.

Levels are ascending, perhaps with repeats; `indices` holds the code of each. A number goes to the nearest level, ties
to the lower one, and of equal levels to the first. Every function takes a number or a tensor of any shape, on any
device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowcast.errors import PayloadError, QuantizeError
from narrowcast.kernels.fake import Grid, fake_quantize

WIDEST = 256
"""The most levels that the kernels hold; larger grids are searched by torch."""


def float_to_apot(x: Tensor | float, levels: Tensor, indices: Tensor, alpha: Tensor | float) -> Tensor:
    """The codes of `x`, clipped to [-alpha, alpha]."""
    values = _as_floats(x, levels)
    if bool(values.isnan().any()):
        raise QuantizeError(
            "x: holds a NaN, and no code stands for one. Usually a training run diverged: look at the tensor first, or "
            "pass x.nan_to_num(). quant_dequant_APoT and APoTFakeQuantize keep NaN as it is."
        )
    return indices.to(values.device)[_place(clipped(values, alpha), levels.to(values.device))]


def apot_to_float(x_apot: Tensor | int, levels: Tensor, indices: Tensor) -> Tensor:
    """The levels that codes stand for."""
    codes = torch.as_tensor(x_apot).long()
    ordered, place = indices.to(codes.device).sort()
    found = torch.searchsorted(ordered, codes.contiguous()).clamp_(max=len(ordered) - 1)
    if not bool((ordered[found] == codes).all()):
        raise PayloadError(
            f"x_apot: holds a code that is none of the {len(ordered)} in indices, {int(ordered[0])} to "
            f"{int(ordered[-1])}. The codes were made with another b, k or sign: use the quantizer that made them."
        )
    return levels.to(codes.device)[place[found]]


def quant_dequant_util(x: Tensor | float, levels: Tensor, indices: Tensor | None = None) -> Tensor:
    """`x` at the nearest levels, in its own dtype; a NaN stays one. `indices` does not count."""
    values = _as_floats(x, levels)
    distinct = torch.unique_consecutive(levels.to(values.device))
    if len(distinct) > WIDEST:
        nearest = distinct[_place(values, distinct)].to(values.dtype)
        return torch.where(values.isnan(), math.nan, nearest)
    one = torch.ones(1, device=values.device)
    return fake_quantize(values, one, Grid(distinct, thresholds(distinct), False), None)


def clipped(x: Tensor, alpha: Tensor | float) -> Tensor:
    """`x` within [-alpha, alpha]; a NaN stays one."""
    bound = torch.as_tensor(alpha, device=x.device).to(x.dtype).reshape(())
    return x.clamp(-bound, bound)


def thresholds(levels: Tensor) -> Tensor:
    """Between fp32 levels: the largest fp32 numbers that are not above the middles, so that ties go down."""
    middles = (levels[1:].double() + levels[:-1].double()) / 2
    rounded = middles.float()
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return torch.where(rounded.double() > middles, below, rounded)


def _place(values: Tensor, levels: Tensor) -> Tensor:
    """Where in `levels` the nearest to each value is, the first of equals: how many thresholds lie below the value."""
    if values.dtype == torch.float64:
        bounds = (levels[1:].double() + levels[:-1].double()) / 2
    else:
        values, bounds = values.float(), thresholds(levels)
    first = torch.searchsorted(levels, levels)
    return first[torch.searchsorted(bounds, values.contiguous())]


def _as_floats(x: Tensor | float, levels: Tensor) -> Tensor:
    values = x.detach() if isinstance(x, Tensor) else torch.tensor(x, device=levels.device)
    return values if values.is_floating_point() else values.float()
