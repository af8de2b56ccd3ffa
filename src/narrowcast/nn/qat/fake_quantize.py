"""Fake quantization with a clip that is learned: floats in, floats at the levels of a codec out.

`FakeQuantize` holds one parameter, `alpha`: the clip, which is the magnitude that the grid's top level stands for. The
scale is alpha / top, and what comes out is scale * level, bit for bit what the packed codec decodes. Gradients are
straight-through; alpha's is APoT's reparameterized clipping, which is LSQ's in units of the clip: Q(v) - v inside, the
sign outside. With `gradient_scale` it is multiplied by top**2 / sqrt(n * top), n the elements per clip (and per sample,
where `batch_axis` is given): then a step of plain SGD moves the scale as it does in LSQ, where the scale itself is the
parameter and its gradient is multiplied by 1 / sqrt(n * top). The default is that for integers of fewer than 8 bits. At
8 bits a step is so small beside the range that one clipped element could move it past zero.

- alpha is [1], or [channels] with `channel_axis`, and always fp32, as are levels and statistics: `.half()` and
  `.to(dtype)` move them but do not round them; autocast does not touch them.
- It starts from the first batch in training mode (`start`), or from `calibrate_`. Before the start there is no clip:
  eval mode and compilation are refused, and several ranks, which would each start from data of their own.
- `signed=None` decides at the start: inputs that are never negative get the unsigned grid where there is one.
- An alpha that training drives to zero, below, or to infinity or NaN counts as FLOOR. The gradient passes, so that it
  can recover. `floored` counts how often that happened, and a ClipWarning says it once. Compiled code only counts;
  transforms of torch.func do not even count, since they may not change a buffer.
- `normalize` divides by the tensor's standard deviation and takes its mean away first, as the paper does to weights,
  with gradients through both ("through") or not ("detached"). The scale is multiplied by the deviation, so that the
  layer needs no batch norm behind it, and the packed layer is an ordinary one. The mean is not added back.
  "paper" is what the paper's own code does: the deviation divides by n - 1, counts as a constant, and is not
  multiplied back. What comes out is the normalized tensor at its levels, for a batch norm to scale.
- `learn=False` keeps alpha out of the optimizer. With an `observer` it then follows the data of every training batch.

A state dict holds the levels, and what else the results depend on (state.py). One of another grid is refused, and
nothing of it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs.rules import CodecLike
from narrowcast.errors import SpecError
from narrowcast.kernels import operators
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.nn import state as extra_state
from narrowcast.nn.modules.base import keep_dtype
from narrowcast.nn.qat import checks
from narrowcast.nn.qat.clips import clip_of, scale_of
from narrowcast.nn.qat.grids import CodecGrid, codec_grid, has_unsigned, trainable
from narrowcast.nn.qat.normalize import normalized, standardized
from narrowcast.nn.qat.observers import Observer, make_observer
from narrowcast.nn.qat.state import check_state, facts_of, take_facts
from narrowcast.nn.qat.straight_through import FLOOR, Way, quantize_in_one_node, surely_good


class FakeQuantize(nn.Module):
    """Quantize to the grid of a codec, in floats, with a clip that is learned."""

    alpha: nn.Parameter
    levels: Tensor
    thresholds: Tensor
    started: Tensor
    floored: Tensor
    observer: Observer | None
    made_on_load = ("thresholds",)
    """Buffers that no file holds, and that loading a state dict makes."""

    def __init__(
        self,
        codec: CodecLike,
        channel_axis: int | None = None,
        learn: bool = True,
        *,
        channels: int | None = None,
        signed: bool | None = None,
        start: str = "mse",
        observer: str | Observer | None = None,
        normalize: str | None = None,
        gradient_scale: bool | None = None,
        batch_axis: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        checks.check_normalize(normalize)
        if isinstance(channel_axis, bool) or not (channel_axis is None or isinstance(channel_axis, int)):
            raise SpecError(f"channel_axis={channel_axis!r}: expected the number of a dimension, or None for one clip.")
        self.codec = trainable(codec)
        self.channel_axis = channel_axis
        self.signed = signed
        self.start = checks.check_start(start)
        self.normalize = normalize
        self.gradient_scale = gradient_scale
        self.batch_axis = batch_axis
        self.collecting = False
        """Set by `calibrate_`: pass inputs on as they are, and show them to the observer."""
        self.observer = None if observer is None else make_observer(observer)
        count = 1 if channel_axis is None else channels or 0
        self.alpha = nn.Parameter(torch.ones(count, dtype=torch.float32, device=device), requires_grad=learn)
        self.register_buffer("levels", torch.empty(0, dtype=torch.float32, device=device))
        self.register_buffer("thresholds", torch.empty(0, dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("started", torch.zeros((), dtype=torch.bool, device=device))
        self.register_buffer("floored", torch.zeros((), dtype=torch.int64, device=device))
        self.given = False
        """The clip was set or loaded, not chosen from data: `calibrate_` keeps it."""
        self._ready = False
        self._warned = False
        self._batches = 0
        self._take(codec_grid(self.codec, signed is not False))

    # -- the forward pass ---------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if self.collecting:
            self._observe(x)
            return x
        if not self._ready or (self.observer is not None and self.training and not self.alpha.requires_grad):
            checks.refuse_start(self)
            if not x.numel():
                return x  # which has nothing to choose a clip from, and nothing to quantize
            self._follow(x)
        checks.check_axis(x, self.channel_axis, self.alpha.numel())
        normalize = None if self.normalize == "paper" else self.normalize
        way = Way(self.grid, self.channel_axis, self.top, self._gradient_factor(self._numel(x)), normalize)
        quantized = quantize_in_one_node(self.target(x), self.alpha, way)
        if quantized is not None:
            return quantized.to(x.dtype)
        shifted, scale = self.prepared(x)
        return fake_quantize(shifted, scale, self.grid, self.channel_axis).to(x.dtype)

    def lookup(self, vectors: Tensor, index: Tensor, numel: int) -> Tensor:
        """Quantize some rows [n, dim] of a table of `numel` elements: those of channels `index`."""
        scale = scale_of(self._clip(numel), self.top)
        axis = None if self.channel_axis is None else 0
        return fake_quantize(vectors, scale if axis is None else scale[index], self.grid, axis)

    def prepared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is rounded, and the scale it is rounded with: x and alpha / top, unless x is normalized first."""
        checks.check_axis(x, self.channel_axis, self.alpha.numel())
        scale = scale_of(self._clip(self._numel(x)), self.top)
        if self.normalize in (None, "paper"):
            return self.target(x), scale
        shifted, deviation = self._normalized(x)
        return shifted, scale * deviation

    def target(self, x: Tensor) -> Tensor:
        """What the result approximates: x, or with normalize="paper" what the batch norm behind the layer scales."""
        return standardized(x) if self.normalize == "paper" else x

    def _numel(self, x: Tensor) -> int:
        """The elements of one sample, or of all where there are none."""
        return x.numel() // (1 if self.batch_axis is None else max(x.shape[self.batch_axis], 1))

    def _normalized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        centred, deviation = normalized(x.float(), self.normalize == "through")
        if not surely_good(deviation.detach()):
            # A constant tensor equals its mean: what remains is zero, whatever it is divided by.
            deviation = torch.where(deviation >= FLOOR, deviation, 1.0)
        return centred, deviation

    def _clip(self, numel: int) -> Tensor:
        """Alpha in fp32, at least FLOOR, with the gradient scaled."""
        alpha, factor = self.alpha.float(), self._gradient_factor(numel)
        fixed = alpha.detach()
        if surely_good(fixed):
            return alpha if factor == 1.0 else fixed + (alpha - fixed) * factor
        good = (fixed >= FLOOR) & (fixed < math.inf)
        if self.training and not operators.transformed():  # where nothing outside may change
            checks.report_floored(self, good)
        passing = torch.where(fixed.isfinite(), alpha, fixed.new_zeros(()))
        return torch.where(good, fixed, FLOOR) + (passing - passing.detach()) * factor

    def _gradient_factor(self, numel: int) -> float:
        wanted = self.uniform and self.codec.bits < 8 if self.gradient_scale is None else self.gradient_scale
        each = max(numel // max(self.alpha.numel(), 1), 1)
        return self.top**2 / math.sqrt(each * self.top) if wanted else 1.0

    # -- the start ----------------------------------------------------------------------------------------------------

    @property
    def grid(self) -> Grid:
        return Grid(self.levels, self.thresholds, self.uniform)

    @property
    def clip(self) -> Tensor:
        """The clip in use, fp32, detached."""
        alpha = self.alpha.detach().float()
        return torch.where((alpha >= FLOOR) & (alpha < math.inf), alpha, FLOOR)

    @property
    def codec_grid(self) -> CodecGrid:
        """The grid, and the codec that stores it."""
        return codec_grid(self.codec, self._signed)

    @property
    def is_started(self) -> bool:
        return self._ready

    @torch.no_grad()
    def start_from(self, x: Tensor) -> None:
        """Choose the grid and the clips from a tensor: from the weights, or from a batch."""
        if self.normalize in ("through", "detached"):
            centred, deviation = self._normalized(x)
            rows = self.rows_of(centred / deviation)
        else:
            rows = self.rows_of(self.target(x))
        self.choose_grid(float(rows.min()))
        self._set_clip(clip_of(rows, self.codec_grid, self.start))

    def choose_grid(self, lowest: float) -> None:
        """Take the unsigned grid where data may decide and is never negative, else the signed one."""
        unsigned = lowest >= 0 and has_unsigned(self.codec) if self.signed is None else not self.signed
        self._take(codec_grid(self.codec, not unsigned))  # again, since `to_empty` leaves memory without content

    def set_clip(self, clip: Tensor | float, signed: bool | None = None) -> None:
        """Give alpha a value without data: that of a checkpoint, for one.

        `signed` chooses the grid where data would, False for inputs that are never negative; None keeps the one in use.
        """
        checks.check_sign(self, signed)
        value = checks.check_clip(self, clip)
        if signed is not None:
            self._take(codec_grid(self.codec, signed))
        self._set_clip(value)
        self.given = True

    @torch.no_grad()
    def _set_clip(self, clip: Tensor) -> None:
        if self.alpha.shape == clip.shape:
            self.alpha.copy_(clip)
        else:  # channels were not known before; optimizers keep the same Parameter
            self.alpha.data = clip.detach().to(self.alpha.device, torch.float32).clone()
        if not self._ready:
            self.floored.zero_()
        self.started.fill_(True)
        self._ready, self.given = True, False

    def rows_of(self, x: Tensor) -> Tensor:
        """x as [channels, n]."""
        if self.channel_axis is None:
            return x.detach().reshape(1, -1)
        checks.check_axis(x, self.channel_axis, self.alpha.numel())
        return x.detach().movedim(self.channel_axis, 0).reshape(x.shape[self.channel_axis], -1)

    def _follow(self, x: Tensor) -> None:
        """Start from this batch, or follow it where an observer sets the clip."""
        if self.observer is None:
            self.start_from(x)
            return
        self._observe(x)
        self.follow_observer()

    def _observe(self, x: Tensor) -> None:
        assert self.observer is not None
        self.observer.observe(self.rows_of(x))

    def follow_observer(self) -> None:
        """Set the clip that the observer gives."""
        assert self.observer is not None
        self.choose_grid(float(self.observer.low.min()))
        self._set_clip(self.observer.clip(self.codec_grid))

    def _take(self, grid: CodecGrid) -> None:
        self.levels, self.thresholds, self.uniform = grid.on(self.levels.device)
        self.top, self._signed = grid.top, grid.signed

    # -- state --------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> FakeQuantize:
        return super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-any-return,no-untyped-call]

    def get_extra_state(self) -> Tensor:
        return extra_state.pack(facts_of(self))

    def set_extra_state(self, state: Any) -> None:
        take_facts(self, extra_state.unpack(state, extra_state.KEY))

    def check_state(self, state_dict: Mapping[str, Any], prefix: str) -> CodecGrid | None:
        """The grid that a state dict was made with, refused if it is not one of this codec's; None if it has none."""
        return check_state(self, state_dict, prefix)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        grid, facts = self.check_state(state_dict, prefix), extra_state.facts_in(state_dict, prefix)
        if facts is not None:  # first of all: with an observer, its keys are expected ones
            take_facts(self, facts)
        if grid is not None:
            self._take(grid)
            if not self.alpha.numel():
                self.alpha.data = torch.ones_like(state_dict[prefix + "alpha"], device=self.alpha.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        extra_state.not_missing(rest[2], prefix)
        if grid is not None and self.levels.device != self.thresholds.device:  # assigned to a model on meta
            self.thresholds = grid.kernel.thresholds.to(self.levels.device)
        if self.started.device.type != "meta":
            self._ready = bool(self.started)
        if grid is not None:
            self.given = self._ready

    def extra_repr(self) -> str:
        kind = f"{self.codec.spec!r}, channel_axis={self.channel_axis}, learn={self.alpha.requires_grad}"
        sign = "signed" if self._signed else "unsigned"
        return f"{kind}, {sign}" + ("" if self._ready else ", not started")
