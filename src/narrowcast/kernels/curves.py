"""A curve through the thresholds of a table of levels, for kernels that guess a number's code from it."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.layout import to_float32

REACH = 1.02
"""Scales are rounded up, so scaled elements hardly exceed the largest level: by 0.8% at most, unless the scale was cut
at its format's limit far below what it should be, which bf16 and fp32 have no need of.
"""
ROOM = 0.1
"""How far a curve must stay from where its guess would be wrong: far more than fp32 can err."""


def fit(thresholds: Tensor, reach: float, count: int) -> tuple[float, float, float] | None:
    """(bend, slope, middle) such that round((bend * |y| + slope) * y + middle) is the code of y or one less.

    None where no such curve leaves `ROOM`. Wherever a threshold lies, both its sides must get the same guess, so the
    curve should pass each at its number: least squares, again and again, with more weight where it misses by more.
    """
    ends = torch.tensor([reach], dtype=torch.float64, device="cpu")
    x = torch.cat([-ends, thresholds, ends])
    last = len(thresholds) - 1
    aims = torch.arange(-1, last + 2, dtype=torch.float64, device="cpu").clamp(0, last)
    powers = torch.stack([x * x.abs(), x, torch.ones_like(x)], 1)
    weights = torch.ones_like(x)
    curve = torch.zeros(3, dtype=torch.float64, device="cpu")
    for _ in range(60):
        curve = torch.linalg.lstsq(powers * weights[:, None], (aims * weights)[:, None]).solution[:, 0]
        weights = weights * ((powers @ curve - aims).abs() + 1e-3).sqrt()
        weights = weights / weights.max()
    bend, slope, middle = (to_float32(float(part)) for part in curve)
    for code in range(last + 2):
        y = torch.linspace(float(x[code]), float(x[code + 1]), 1001, dtype=torch.float64, device="cpu")
        guess = (bend * y.abs() + slope) * y + middle
        lowest, highest = max(code - 1, 0) - 0.5, min(code, count - 1) + 0.5
        if not (guess.min() > lowest + ROOM and guess.max() < highest - ROOM):
            return None
    return bend, slope, middle
