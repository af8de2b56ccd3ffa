"""How a GPU finds the level nearest to a number.

Where levels follow a simple curve, the curve says the code within one, and a lookup and a comparison settle it: see
`curves.fit`. Other tables are cut into cells. A cell is `round(clamp(y * slope + middle, 0, cells - 1))` in fp32: a
function that never falls as y grows. So thresholds in earlier cells lie below y, those in later cells do not, and only
those in y's own need a comparison. Laid out so that no cell holds more than one threshold, a lookup and a comparison
find any code, exactly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from narrowcast.kernels.curves import REACH, fit
from narrowcast.kernels.layout import to_float32

MOST_CELLS = 1024
HELD = 32
"""Tables up to this size are held by the lanes of a warp."""
REMEMBERED = 256


Key = TypeVar("Key")
Value = TypeVar("Value")


class Cells(NamedTuple):
    """A table of levels as kernels search it."""

    entries: Tensor
    """int32: where a curve guesses (`steps` is 0), the bits of all thresholds. Else for each cell how many thresholds
    lie in the cells before; then, as bits of fp32, the threshold in each cell where there is at most one (`steps` is
    1), or else all thresholds, with infinities behind the last.
    """
    size: int
    searched: int
    """Thresholds listed, a power of two, where cells hold several."""
    slope: float
    middle: float
    bend: float
    reach: float
    steps: int
    """Halvings that settle a cell: it holds at most 2**steps - 1 thresholds."""
    levels: Tensor
    """int32: the levels as bits of fp32."""
    whole: bool
    """Whether the levels are whole numbers of at most 13 bits, whose product with a 16-bit scale is exact."""
    table: Tensor
    """Keeps the memory alive whose address `cells` remembers this by."""


_remembered: OrderedDict[tuple[str, int, int], Cells] = OrderedDict()


def cells(table: Tensor) -> Cells:
    """The cells of a codec's table (`Recipe.table`), laid out once: that reads the table, and waits for the device."""
    return remember(_remembered, (str(table.device), table.data_ptr(), table.shape[1]), lambda: lay_out(table))


def remember(memory: OrderedDict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value that was made for this key; of many keys, the oldest are forgotten."""
    value = memory.get(key)
    if value is None:
        value = memory[key] = make()
        if len(memory) > REMEMBERED:
            memory.popitem(last=False)
    return value


def lay_out(table: Tensor) -> Cells:
    every = table.cpu()
    levels, thresholds = every[0], every[1]
    finite, thresholds = levels[levels.isfinite()], thresholds[thresholds.isfinite()]
    whole = bool((finite == finite.round()).all()) and float(finite.abs().max()) < 2**13
    bits = levels.contiguous().view(torch.int32)
    reach = to_float32(REACH * float(finite.abs().max()))
    curve = fit(thresholds.double(), reach, table.shape[1]) if table.shape[1] <= HELD else None
    if curve is not None:
        entries, count, steps, searched = every[1].contiguous(), table.shape[1], 0, 0
        bend, slope, middle = curve
    else:
        bend = 0.0
        entries, count, steps, searched, slope, middle = cut(thresholds, reach, table.shape[1])
    entries = entries.view(torch.int32).to(table.device)
    bits = bits.to(table.device)
    return Cells(entries, count, searched, slope, middle, bend, reach, steps, bits, whole, table)


# -- cells ------------------------------------------------------------------------------------------------------------


def cut(thresholds: Tensor, reach: float, size: int) -> tuple[Tensor, int, int, int, float, float]:
    """Entries, cells, steps, thresholds listed, slope and middle."""
    count = 32
    while True:
        slope, middle = line(reach, count)
        owner = cell_of(thresholds, slope, middle, count)
        crowd = int(torch.bincount(owner, minlength=count).max())
        if crowd <= 1 or count == MOST_CELLS:
            break
        count *= 2
    before = torch.searchsorted(owner, torch.arange(count, dtype=torch.int64, device="cpu"))
    steps = crowd.bit_length()
    if steps == 1:
        listed = torch.full((count,), torch.inf, dtype=torch.float32, device="cpu")
        listed[owner] = thresholds
    else:
        listed = torch.full((2 * size,), torch.inf, dtype=torch.float32, device="cpu")
        listed[: len(thresholds)] = thresholds
    entries = torch.cat([before.int(), listed.view(torch.int32)])
    return entries, count, steps, len(listed), slope, middle


def line(reach: float, count: int) -> tuple[float, float]:
    """The slope and middle that spread the numbers from -reach to reach over all cells."""
    return to_float32((count - 1) / (2 * reach)), (count - 1) / 2


def cell_of(y: Tensor, slope: float, middle: float, count: int) -> Tensor:
    """What `levels.count_below` computes, rounding for rounding."""
    return (y * slope + middle).clamp(0.0, count - 1.0).round().long()
