"""How a GPU finds the level nearest to a number: a table cut into cells.

A cell is `round(clamp(y * slope + middle, 0, cells - 1))` in fp32: a function that never falls as y grows. So
thresholds in earlier cells lie below y, those in later cells do not, and only those in y's own need a comparison.
Laid out so that no cell holds more than one threshold, a lookup and a comparison find any code, exactly.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.kernels.layout import to_float32

MOST_CELLS = 1024
REACH = 1.02
"""Scales are rounded up, so scaled elements hardly exceed the largest level: by 0.8% at most, unless the scale was cut
at its format's limit far below what it should be, which bf16 and fp32 have no need of.
"""
REMEMBERED = 256


class Cells(NamedTuple):
    """A table of levels as kernels search it."""

    entries: Tensor
    """int32: for each cell how many thresholds lie in the cells before; then, as bits of fp32, the threshold in each
    cell where there is at most one (`steps` is 1), or else all thresholds, with infinities behind the last.
    """
    size: int
    searched: int
    """Thresholds listed, a power of two, where cells hold several."""
    slope: float
    middle: float
    steps: int
    """Halvings that settle a cell: it holds at most 2**steps - 1 thresholds."""
    whole: bool
    """Whether the levels are whole numbers of at most 13 bits, whose product with a 16-bit scale is exact."""
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
    levels = table[0].cpu()
    reach = REACH * float(levels[levels.isfinite()].abs().max())
    count = 32
    while True:
        slope, middle = line(reach, count)
        owner = cell_of(thresholds, slope, middle, count)
        crowd = int(torch.bincount(owner, minlength=count).max())
        if crowd <= 1 or count == MOST_CELLS:
            break
        count *= 2
    before = torch.searchsorted(owner, torch.arange(count))
    steps = crowd.bit_length()
    if steps == 1:
        listed = torch.full((count,), torch.inf)
        listed[owner] = thresholds
    else:
        listed = torch.full((2 * table.shape[1],), torch.inf)
        listed[: len(thresholds)] = thresholds
    entries = torch.cat([before.int(), listed.view(torch.int32)]).to(table.device)
    finite = levels[levels.isfinite()]
    whole = bool((finite == finite.round()).all()) and float(finite.abs().max()) < 2**13
    return Cells(entries, count, len(listed), slope, middle, steps, whole, table)


def line(reach: float, count: int) -> tuple[float, float]:
    """The slope and middle that spread the numbers from -reach to reach over all cells."""
    return to_float32((count - 1) / (2 * reach)), (count - 1) / 2


def cell_of(y: Tensor, slope: float, middle: float, count: int) -> Tensor:
    """What `gpu_codes.count_below` computes, rounding for rounding."""
    return (y * slope + middle).clamp(0.0, count - 1.0).round().long()
