"""Learned rounding: for each weight the level below or the level above, so that the layer's output changes least.

As in AdaRound (Nagel et al., Up or Down?, ICML 2020), a number between 0 and 1 stands for each choice, starting where
the weight lies between its two levels. It is trained on the error of the layer's output (see moments.py), and on a
penalty that drives it to 0 or 1 and grows sharper on the way. Unlike there, levels may be any grid's. At the end each
output takes what it learned, or the nearest levels where those are better. Then every choice is made once more, given
all others, until none changes or `SWEEPS` are done: no output gets worse.

It works on tensors alone. `calibrate_` writes the result into a layer, whose nearest levels it then is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STRETCH = 0.1
"""How far the sigmoid reaches beyond 0 and 1, so that choices can become final."""

SWEEPS = 4
COLUMNS = 128
"""Columns whose changes are applied at once to those outside of them."""

PENALTY = 0.01
"""The weight of the penalty, in units of the error that nearest rounding makes per weight."""


class LearnedWeight(NamedTuple):
    """A weight at levels times scales, and the squared output errors relative to the squared output."""

    weight: Tensor
    nearest: float
    learned: float


class _Choices(NamedTuple):
    """The weights [groups, outputs, k] of a layer, and the two levels that each lies between."""

    weight: Tensor
    scale: Tensor
    lower: Tensor
    upper: Tensor
    moments: Tensor

    def error(self, rounded: Tensor) -> Tensor:
        """The mean squared error of each output: [groups, outputs]."""
        difference = self.weight - rounded
        return ((difference @ self.moments) * difference).sum(-1).clamp(min=0.0)


def learn_levels(weight: Tensor, scale: Tensor, levels: Tensor, moments: Tensor, steps: int) -> LearnedWeight:
    """Round `weight` [outputs, ...] to `levels` times `scale` [outputs], given the mean moments [groups, k, k]."""
    rows = weight.float().view(len(moments), -1, moments.shape[-1])
    scale = scale.reshape(*rows.shape[:2], 1)
    lower, upper = _neighbours(rows / scale, levels)
    choices = _Choices(rows, scale, lower, upper, moments)
    nearest = torch.where(rows / scale - lower > upper - rows / scale, upper, lower) * scale
    before = choices.error(nearest)
    with torch.enable_grad():
        learned = _learn(choices, before, steps)
    best = _better(choices, nearest, learned)
    best = _better(choices, best, _choose_again(choices, best))
    energy = float(choices.error(torch.zeros_like(rows)).sum()) or 1.0
    errors = float(before.sum()) / energy, float(choices.error(best).sum()) / energy
    return LearnedWeight(best.view_as(weight), *errors)


def _better(choices: _Choices, rows: Tensor, others: Tensor) -> Tensor:
    """For each output the weights with the smaller error."""
    return torch.where((choices.error(others) < choices.error(rows)).unsqueeze(-1), others, rows)


def _choose_again(choices: _Choices, rounded: Tensor) -> Tensor:
    """Weights in which every choice is the better one given all others: one column after another."""
    lower, upper = choices.lower * choices.scale, choices.upper * choices.scale
    values, moments = rounded.clone(), choices.moments
    slope, k = (values - choices.weight) @ moments, values.shape[-1]
    curvature = moments.diagonal(dim1=-2, dim2=-1)
    for _ in range(SWEEPS):
        before = values.clone()
        for first in range(0, k, COLUMNS):
            last = min(first + COLUMNS, k)
            for column in range(first, last):
                target = values[..., column] - slope[..., column] / curvature[:, None, column]
                low, high = lower[..., column], upper[..., column]
                chosen = torch.where(target - low > high - target, high, low)
                chosen = torch.where(target.isfinite(), chosen, values[..., column])  # an input that is always zero
                change = (chosen - values[..., column]).unsqueeze(-1)
                slope[..., first:last] += change * moments[:, None, column, first:last]
                values[..., column] = chosen
            changes = values[..., first:last] - before[..., first:last]
            slope[..., :first] += changes @ moments[:, first:last, :first]
            slope[..., last:] += changes @ moments[:, first:last, last:]
        if torch.equal(values, before):
            break
    return values


def _neighbours(v: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The level not above v and the one above it; the outermost two beyond the grid."""
    place = torch.searchsorted(levels, v.contiguous(), right=True).clamp(1, len(levels) - 1)
    return levels[place - 1], levels[place]


def _learn(choices: _Choices, nearest: Tensor, steps: int) -> Tensor:
    """The weights at the levels that were learned; `nearest` is the error of nearest rounding."""
    rows, scale, lower, upper, _ = choices
    gap = upper - lower
    place = ((rows / scale - lower) / gap).clamp(0.01, 0.99)
    wanted = (place + STRETCH) / (1 + 2 * STRETCH)
    choice = torch.log(wanted / (1 - wanted)).requires_grad_()
    optimizer = torch.optim.Adam([choice], lr=0.02)
    size = nearest.sum().clamp(min=torch.finfo(torch.float32).tiny)
    for step in range(steps):
        soft = (choice.sigmoid() * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)
        loss = choices.error((lower + soft * gap) * scale).sum() / size
        progress = step / steps
        if progress > 0.2:
            sharpness = 20 - 18 * (progress - 0.2) / 0.8
            loss = loss + PENALTY * (1 - (2 * soft - 1).abs() ** sharpness).sum() / rows.shape[1] ** 0.5
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.where(choice.detach() >= 0, upper, lower) * scale
