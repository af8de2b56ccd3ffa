"""What each codec loses on a weight, measured tile by tile.

A weight is a matrix of rows, as `encode_rows` takes it. Each row is encoded by itself. So a tile of rows encodes to the
bytes that it has inside the whole weight, and sums over tiles are those of the weight. Sums are kept in fp64. Memory
holds one tile of `TILE` elements, whatever the weight's size; a row is never cut.

Nothing here knows files, layers or modules: the caller passes a function that reads rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.tiles import Read, tiles
from narrowcast.kernels.reference.search import GAIN


@dataclass
class Statistics:
    """A weight's size, range and energy, and the noise and bytes of each codec."""

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
    """The bytes of the encoded weight, by the codec's spec."""
    cost: float | None = None
    """What a squared error of 1 costs a model's output, relative to it; None where no data has told."""

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
        """The noise over the weight's energy; for a weight of zeros, 0 if it decodes to zeros and 1 if not.

        With a `cost`: what the model's output loses, relative to it.
        """
        if self.cost is not None:
            return self.noise[spec] * self.cost
        return self.noise[spec] / self.energy if self.energy else float(self.noise[spec] > 0)

    def sqnr(self, spec: str) -> float:
        """The signal-to-noise ratio, in dB."""
        return decibels(self.relative_noise(spec))


def is_finite(x: Tensor) -> bool:
    """Whether no element is an infinity or a NaN. A tensor is finite if its extremes are; asking them makes no copy."""
    return not x.numel() or all(extreme.isfinite() for extreme in torch.aminmax(x))


def decibels(relative_noise: float) -> float:
    """A relative noise as a signal-to-noise ratio in dB."""
    return -10 * math.log10(relative_noise) if relative_noise else math.inf


def measure(
    name: str,
    rows: int,
    columns: int,
    read: Read,
    codecs: Sequence[Codec],
    *,
    searched: bool = False,
    advance: Callable[[int], object] = lambda elements: None,
) -> Statistics:
    """The statistics of a weight of `rows` x `columns`.

    `read(start, stop)` returns the rows from `start` to `stop` as floats [stop - start, columns]. `advance` is called
    with the number of elements of each tile. `searched`: the noise with searched scales, not with those of `encode`.
    """
    statistics = Statistics(name, rows, columns)
    for codec in codecs:
        statistics.noise[codec.spec] = 0.0
        statistics.nbytes[codec.spec] = rows * codec.row_bytes(columns)
    for start, stop in tiles(rows, columns):
        tile = read(start, stop)
        _add(statistics, tile, codecs, searched)
        advance(tile.numel())
    return statistics


def _add(statistics: Statistics, tile: Tensor, codecs: Sequence[Codec], searched: bool) -> None:
    values = tile.detach().float()
    low, high = torch.aminmax(values)
    statistics.lowest, statistics.highest = min(statistics.lowest, float(low)), max(statistics.highest, float(high))
    statistics.total += float(values.sum(dtype=torch.float64))
    statistics.energy += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
    for codec in codecs:
        rows = codec.encode_searched(values, gain=GAIN) if searched else codec.encode(values, 0)
        decoded = codec.decode(rows, values.shape[1])
        statistics.noise[codec.spec] += float(torch.linalg.vector_norm(decoded.sub_(values), dtype=torch.float64)) ** 2
