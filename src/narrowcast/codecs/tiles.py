"""Weights a few rows at a time, so that memory holds one tile of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

Read = Callable[[int, int], Tensor]
"""Of (start, stop): these rows as floats [stop - start, columns]."""
TILE = 1 << 20
"""Elements read at once: 4 MB in fp32, so that a tile, its codes and its decoding stay in a core's cache."""


def tiles(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """The first row of each tile of about `TILE` elements, and the row behind its last."""
    height = max(1, TILE // max(columns, 1))
    for start in range(0, rows if columns else 0, height):
        yield start, min(start + height, rows)
