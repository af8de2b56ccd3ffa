"""How a GPU finds the level nearest to a number: a table cut into cells.

A cell is `round(clamp(y * slope + middle, 0, cells - 1))` in fp32: a function that never falls as y grows. So thresholds
in earlier cells lie below y, those in later cells do not, and only the ones in y's own cell need a comparison.
Laid out so that no cell holds more than one threshold, a lookup and a comparison find any code, exactly.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.kernels.layout import to_float32

MOST_CELLS = 1024
REMEMBERED = 256


class Cells(NamedTuple):
    """A table of levels as kernels search it."""

    entries: Tensor
    """int64 per cell: how many thresholds lie in the cells before, and below that the bits of the cell's threshold."""
    thresholds: Tensor
    """fp32, with infinities behind the last, so that a search may look ahead."""
    slope: float
    middle: float
    steps: int
    """Halvings that settle a cell: it holds at most 2**steps - 1 thresholds."""
    table: Tensor
    """Keeps the memory alive whose address `cells` remembers this by."""


_remembered: OrderedDict[tuple[str, int, int], Cells] = OrderedDict()


def cells(table: Tensor) -> Cells:
    """The cells of a codec's table (`Recipe.table`), laid out once: that reads the table, and waits for the device."""
    key = (str(table.device), table.data_ptr(), table.shape[1])
    found = _remembered.get(key)
    if found is None:
        found = lay_out(table)
        _remembered[key] = found
        if len(_remembered) > REMEMBERED:
            _remembered.popitem(last=False)
    return found


def lay_out(table: Tensor) -> Cells:
    thresholds = table[1].cpu()
    thresholds = thresholds[thresholds.isfinite()]
    count = 32
    while True:
        slope, middle = line(thresholds, count)
        owner = cell_of(thresholds, slope, middle, count)
        crowd = int(torch.bincount(owner, minlength=count).max())
        if crowd <= 1 or count == MOST_CELLS:
            break
        count *= 2
    before = torch.searchsorted(owner, torch.arange(count))
    own = torch.full((count,), torch.inf)
    own[owner] = thresholds
    entries = (before << 32) | (own.view(torch.int32).long() & 0xFFFFFFFF)
    steps = crowd.bit_length()
    padded = torch.cat([thresholds, torch.full((table.shape[1] + 2**steps - len(thresholds),), torch.inf)])
    return Cells(entries.to(table.device), padded.to(table.device), slope, middle, steps, table)


def line(thresholds: Tensor, count: int) -> tuple[float, float]:
    """The slope and middle that spread the thresholds over all cells."""
    low, high = float(thresholds[0]), float(thresholds[-1])
    slope = to_float32(min((count - 1) / (high - low), 1e30)) if high > low else 1.0
    return slope, to_float32(-low * slope)


def cell_of(y: Tensor, slope: float, middle: float, count: int) -> Tensor:
    """What `gpu_codes.count_below` computes, rounding for rounding."""
    return (y * slope + middle).clamp(0.0, count - 1.0).round().long()
