"""Learned rounding: for each weight the level below or the level above, so that the layer's output changes least.

The squared error of a layer's output, over the inputs it has seen, is the sum over outputs of d H d^T, where d is the
error of one output's weights and H, its `Second` moment, the sum of x x^T over the inputs (over windows, for a
convolution). So H is all that is needed of the data.

As in AdaRound (Nagel et al., Up or Down?, ICML 2020), a number between 0 and 1 stands for each choice, starting where
the weight lies between its two levels; it is trained on that error, and on a penalty that drives it to 0 or 1 and
grows sharper on the way. Unlike there, levels may be any grid's. At the end each output keeps what it learned, or the
nearest levels where those are better: no output gets worse.

The weight becomes its chosen levels times the scale, which the nearest level then is. A layer that normalizes its
weight stops to, since its levels would move with the deviation; its clips are chosen anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.nn.qat.clips import scale_of
from narrowcast.nn.qat.layers import QatLinear, Trained

STRETCH = 0.1
"""How far the sigmoid reaches beyond 0 and 1, so that choices can become final."""

PENALTY = 0.01
"""The weight of the penalty, in units of the error that nearest rounding makes per weight."""


class Rounded(NamedTuple):
    """The squared error of a layer's output, relative to the squared output."""

    name: str
    nearest: float
    learned: float


class Second:
    """A forward pre-hook that sums x x^T over a layer's inputs: fp64 [groups, k, k]."""

    def __init__(self, layer: Trained) -> None:
        self.layer = layer
        self.groups = int(getattr(layer, "groups", 1))
        self.moment: Tensor | None = None
        self.count = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        windows = self._windows(self.layer._input(x).detach().float())
        grouped = windows.view(len(windows), self.groups, -1).transpose(0, 1)
        moment = (grouped.transpose(1, 2) @ grouped).double()
        self.moment = moment if self.moment is None else self.moment + moment
        self.count += len(windows)

    def _windows(self, x: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, QatLinear):
            return x.reshape(-1, x.shape[-1])
        spatial = len(layer.kernel_size)  # type: ignore[arg-type]
        x = x if x.dim() == spatial + 2 else x.unsqueeze(0)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)  # type: ignore[arg-type]
        for place in range(spatial):
            size, step, apart = (int(option[place]) for option in (layer.kernel_size, layer.stride, layer.dilation))  # type: ignore[index]
            x = x.unfold(2 + place, apart * (size - 1) + 1, step)[..., ::apart]
        # [batch, channels, *positions, *kernel] -> [batch * positions, channels * kernel]
        x = x.movedim(1, 1 + spatial)
        return x.reshape(x.shape[: 1 + spatial].numel(), -1)


def learn_rounding(name: str, layer: Trained, second: Second, steps: int) -> Rounded:
    """Round the weight of a layer, in place."""
    quantizer, weight = layer.weight_quantizer, layer.weight.detach()
    if quantizer.normalize is not None:
        quantizer.normalize = None
        quantizer.start_from(weight)
    rows, moment = _grouped(weight, second)
    scale = scale_of(quantizer.clip, quantizer.top).expand(len(weight)).reshape(*rows.shape[:2], 1)
    lower, upper = _neighbours(rows / scale, quantizer.levels)
    nearest = torch.where(rows / scale - lower > upper - rows / scale, upper, lower) * scale
    with torch.enable_grad():
        learned = _learn(rows, scale, lower, upper, moment, _error(rows - nearest, moment), steps)
    before, after = _error(rows - nearest, moment), _error(rows - learned, moment)
    kept = torch.where((after < before).unsqueeze(-1), learned, nearest)
    energy = float(_error(rows, moment).sum()) or 1.0
    weight.copy_(kept.view_as(weight))  # and with it `rows`, which may be a view of it
    return Rounded(name, float(before.sum()) / energy, float(torch.minimum(before, after).sum()) / energy)


def _grouped(weight: Tensor, second: Second) -> tuple[Tensor, Tensor]:
    """The weight as [groups, outputs, k], and the mean moment of its inputs, in fp32."""
    assert second.moment is not None
    rows = weight.float().view(second.groups, -1, second.moment.shape[-1])
    mean = second.moment / second.count
    return rows, mean.float()


def _neighbours(v: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The level not above v and the one above it; the outermost two beyond the grid."""
    place = torch.searchsorted(levels, v.contiguous(), right=True).clamp(1, len(levels) - 1)
    return levels[place - 1], levels[place]


def _error(difference: Tensor, moment: Tensor) -> Tensor:
    """The mean squared error of each output: [groups, outputs]."""
    return ((difference @ moment) * difference).sum(-1).clamp(min=0.0)


def _learn(
    rows: Tensor, scale: Tensor, lower: Tensor, upper: Tensor, moment: Tensor, nearest: Tensor, steps: int
) -> Tensor:
    """The weights at the levels that were learned."""
    gap = upper - lower
    place = ((rows / scale - lower) / gap).clamp(0.01, 0.99)
    wanted = (place + STRETCH) / (1 + 2 * STRETCH)
    choice = torch.log(wanted / (1 - wanted)).requires_grad_()
    optimizer = torch.optim.Adam([choice], lr=0.02)
    size = nearest.sum().clamp(min=torch.finfo(torch.float32).tiny)
    for step in range(steps):
        soft = (choice.sigmoid() * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)
        loss = _error(rows - (lower + soft * gap) * scale, moment).sum() / size
        progress = step / steps
        if progress > 0.2:
            sharpness = 20 - 18 * (progress - 0.2) / 0.8
            loss = loss + PENALTY * (1 - (2 * soft - 1).abs() ** sharpness).sum() / rows.shape[1] ** 0.5
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.where(choice.detach() >= 0, upper, lower) * scale
