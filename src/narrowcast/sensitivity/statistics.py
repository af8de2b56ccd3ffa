"""One weight against several codecs, tile by tile.

A weight is a matrix of rows, as `encode_rows` makes them. Rows are encoded one by one, so that a tile of rows encodes
to the bytes that it has inside the whole weight, and sums over tiles are those of the weight. Sums are kept in fp64;
memory is that of one tile of `TILE` elements, whatever the weight's size (a single row is never cut).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.codecs import Codec

TILE = 1 << 20
"""Elements read at once: 4 MB in fp32, so that a tile, its codes and its decoding stay in a core's cache."""


@dataclass
class Statistics:
    """A weight's size, range and energy, and what each codec makes of it."""

    name: str
    rows: int
    columns: int
    lowest: float = math.inf
    highest: float = -math.inf
    total: float = 0.0
    energy: float = 0.0
    """The sum of squares."""
    noise: dict[str, float] = field(default_factory=dict)
    """The sum of squared errors of each codec, by its spec."""
    nbytes: dict[str, int] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def finite(self) -> bool:
        return math.isfinite(self.energy)

    @property
    def std(self) -> float:
        """The standard deviation over all elements."""
        mean = self.total / max(self.numel, 1)
        return math.sqrt(max(self.energy / max(self.numel, 1) - mean * mean, 0.0)) if self.finite else math.nan

    def relative_noise(self, spec: str) -> float:
        """The share of the weight's energy that the errors have; for a weight of zeros, 1 if it changes and else 0."""
        return self.noise[spec] / self.energy if self.energy else float(self.noise[spec] > 0)

    def sqnr(self, spec: str) -> float:
        """Signal over noise, in dB."""
        return decibels(self.relative_noise(spec))


def decibels(relative_noise: float) -> float:
    """A share of noise as a signal-to-noise ratio."""
    return -10 * math.log10(relative_noise) if relative_noise else math.inf


def measure(
    name: str,
    rows: int,
    columns: int,
    read: Callable[[int, int], Tensor],
    codecs: Sequence[Codec],
    *,
    advance: Callable[[int], object] = lambda elements: None,
) -> Statistics:
    """The statistics of a weight of `rows` x `columns`.

    `read(start, stop)` gives its rows from `start` to `stop`, float [stop - start, columns]; `advance` hears how many
    elements each tile had.
    """
    found = Statistics(name, rows, columns)
    for codec in codecs:
        found.noise[codec.spec] = 0.0
        found.nbytes[codec.spec] = rows * codec.row_bytes(columns)
    for start, stop in tiles(rows, columns):
        tile = read(start, stop)
        _add(found, tile, codecs)
        advance(tile.numel())
    return found


def tiles(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Where tiles of about `TILE` elements start and stop."""
    height = max(1, TILE // max(columns, 1))
    for start in range(0, rows if columns else 0, height):
        yield start, min(start + height, rows)


def _add(found: Statistics, tile: Tensor, codecs: Sequence[Codec]) -> None:
    values = tile.detach().float()
    low, high = torch.aminmax(values)
    found.lowest, found.highest = min(found.lowest, float(low)), max(found.highest, float(high))
    found.total += float(values.sum(dtype=torch.float64))
    found.energy += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    for codec in codecs:
        decoded = codec.decode(codec.encode(values, 0), values.shape[1])
        found.noise[codec.spec] += float(torch.linalg.vector_norm(decoded.sub_(values), dtype=torch.float64)) ** 2
