"""Observers: the statistics that a calibration collects, and the clips that follow from them.

An observer takes batches as rows, [channels, n], and gives the clip of each channel. Its statistics are buffers, so
that a state dict has them and observing can go on where it stopped.

    minmax          the extremes of everything seen
    moving_average  the batches' extremes, averaged with an exponentially fading memory
    percentile      all but a small share of everything seen is within the clip
    mse             the clip with the least squared error over everything seen

The last two keep a histogram of 2048 bins per channel. Its range doubles when data exceeds it, and pairs of bins become
one. So no batch is needed twice, and every batch counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import CalibrationError, SpecError
from narrowcast.nn.modules.base import keep_dtype
from narrowcast.nn.qat.clips import SHARE, search_clip, smallest_clip
from narrowcast.nn.qat.grids import CodecGrid


class Observer(nn.Module):
    """The extremes of all data seen: `minmax`, and the base of the others."""

    low: Tensor
    high: Tensor
    batches: Tensor
    options: tuple[str, ...] = ()
    """The arguments of its constructor, which go into state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.empty(0, dtype=torch.float32, device="cpu"))
        self.register_buffer("high", torch.empty(0, dtype=torch.float32, device="cpu"))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device="cpu"))

    @torch.no_grad()
    def observe(self, rows: Tensor) -> None:
        """See one batch, [channels, n]."""
        if rows.numel() == 0:
            return
        rows = rows.detach().float()
        low, high = rows.amin(1), rows.amax(1)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise CalibrationError(
                f"batch {int(self.batches) + 1}: an input of this quantizer holds an infinity or a NaN, from which no "
                "clip can be chosen. Look for it in the data, or in the layers before. Nothing of it was remembered."
            )
        if self.low.numel() == 0:
            self.low, self.high = low, high
        else:
            self.low, self.high = self._merged(low, high)
        self.batches += 1
        self._count(rows)

    def clip(self, grid: CodecGrid) -> Tensor:
        """The clip of each channel, fp32 [channels]."""
        if not int(self.batches):
            raise CalibrationError("no data was observed: run at least one batch first.")
        return self._clip(grid)

    def _merged(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.minimum(self.low, low), torch.maximum(self.high, high)

    def _count(self, rows: Tensor) -> None:
        """Further statistics of a batch."""

    def _clip(self, grid: CodecGrid) -> Tensor:
        return smallest_clip(self.low, self.high, grid)

    def _apply(self, fn: Any, recurse: bool = True) -> Observer:
        return super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-any-return,no-untyped-call]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name, buffer in self._buffers.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and buffer is not None and value.shape != buffer.shape:
                self._buffers[name] = buffer.new_empty(value.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class MinMax(Observer):
    """The extremes of everything seen."""


class MovingAverage(Observer):
    """The batches' extremes; each batch moves them by `momentum` of the way to its own."""

    options = ("momentum",)

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum

    def _merged(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return torch.lerp(self.low, low, self.momentum), torch.lerp(self.high, high, self.momentum)


class Histogram(Observer):
    """How often each of 2048 even steps of a range, symmetric about zero, was met."""

    counts: Tensor
    reach: Tensor
    bins = 2048

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.empty(0, self.bins, dtype=torch.float64, device="cpu"))
        self.register_buffer("reach", torch.empty(0, dtype=torch.float32, device="cpu"))

    def _count(self, rows: Tensor) -> None:
        largest = rows.abs().amax(1).clamp(min=2.0**-100)
        if self.reach.numel() == 0:
            self.reach, self.counts = largest, self.counts.new_zeros((len(rows), self.bins), device=rows.device)
        while bool((largest > self.reach).any()):
            self._double(largest > self.reach)
        place = ((rows / self.reach.view(-1, 1) + 1) * (self.bins / 2)).long().clamp_(0, self.bins - 1)
        place += torch.arange(len(rows), dtype=torch.int64, device=rows.device).view(-1, 1) * self.bins
        self.counts += torch.bincount(place.flatten(), minlength=self.counts.numel()).view_as(self.counts)

    def _double(self, which: Tensor) -> None:
        quarter = self.bins // 4
        folded = torch.zeros_like(self.counts)
        folded[:, quarter:-quarter] = self.counts.view(len(which), -1, 2).sum(-1)
        self.counts = torch.where(which.view(-1, 1), folded, self.counts)
        self.reach = torch.where(which, self.reach * 2, self.reach)

    def _middles(self) -> Tensor:
        steps = (torch.arange(self.bins, dtype=torch.float32, device=self.reach.device) + 0.5) * (2 / self.bins) - 1
        # What lies in the outermost bins is no further out than the data.
        middles = steps * self.reach.view(-1, 1)
        return torch.minimum(torch.maximum(middles, self.low.view(-1, 1)), self.high.view(-1, 1))


class Percentile(Histogram):
    """A clip that keeps the share `share` of everything seen within."""

    options = ("share",)

    def __init__(self, share: float = SHARE) -> None:
        super().__init__()
        self.share = share

    def _clip(self, grid: CodecGrid) -> Tensor:
        half = self.bins // 2
        outward = self.counts[:, half:] + self.counts[:, :half].flip(1)
        within = outward.cumsum(1) / outward.sum(1, keepdim=True)
        place = (within < self.share).sum(1) + 1
        bound = self.reach * place / half
        return smallest_clip(torch.maximum(self.low, -bound), torch.minimum(self.high, bound), grid)


class LeastSquares(Histogram):
    """The clip with the least squared error over everything seen."""

    def _clip(self, grid: CodecGrid) -> Tensor:
        return search_clip(self._middles(), smallest_clip(self.low, self.high, grid), grid, self.counts.float())


OBSERVERS: dict[str, type[Observer]] = {
    "minmax": MinMax,
    "moving_average": MovingAverage,
    "percentile": Percentile,
    "mse": LeastSquares,
}


def make_observer(kind: str | Observer) -> Observer:
    if isinstance(kind, Observer):
        return kind
    if kind not in OBSERVERS:
        raise SpecError(f"observer={kind!r}: observers are {', '.join(map(repr, OBSERVERS))}, or one of their classes.")
    return OBSERVERS[kind]()


def describe(observer: Observer) -> list[Any]:
    """The name of an observer (that of its class, where it is not one of these) and its options."""
    kind = type(observer)
    name = next((name for name, known in OBSERVERS.items() if known is kind), f"{kind.__module__}.{kind.__qualname__}")
    return [name, {option: getattr(observer, option) for option in observer.options}]


def make_described(description: list[Any]) -> Observer:
    """A new observer from what `describe` says."""
    name, options = description
    return OBSERVERS[name](**options)
