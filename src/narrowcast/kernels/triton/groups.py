"""Triton: what a kernel is compiled for, in groups that it takes as one argument each.

FORM    what a row's codes and scales are: element, bits, scale, scale_size, stochastic, signed, and fp8, which says
        that the GPU converts e4m3 itself
TILE    the shape of a tile: groups, block, width (a tile is [groups, width], of which `block` columns are real),
        chunked, masked, and align and edge, which divide the first element and the number of elements of every tile
SEARCH  how a table of levels is searched: cells, steps, searched (`tables.Cells`)
SUM     how rows are read and added up: words (codes are read as 32-bit words), code_size, ranks (0: known when the
        kernel runs), own_rank, divide, fused, bytewise
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton.language as tl

from narrowcast.kernels.triton.codes import INTERPRETED


class Group:
    """Named constants. Equal groups are one object, with its text made once: Triton hashes and prints constants at each
    launch. In a kernel the fields have to be `tl.constexpr`; Triton's interpreter wants plain values.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._text = "_".join(f"{name}{value}" for name, value in values.items())
        for name, value in values.items():
            setattr(self, name, value if INTERPRETED else tl.constexpr(value))

    def __repr__(self) -> str:
        return self._text


@cache
def group(**values: int | bool | str) -> Group:
    """The group of these constants."""
    return Group(values)
