"""AdamW, SGD with momentum, and momentum that is made orthogonal (as Muon does), on flat vectors.

Whatever changes from step to step (learning rate, bias corrections) comes as tensors, so that a step can be captured in
a CUDA graph. `corrections` makes the table of them for all steps of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from simulated_gradients import Flat

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


class Now(NamedTuple):
    """What a step is told, each a tensor of one element."""

    rate: Tensor
    first: Tensor
    """1 - beta1 ** steps."""
    second: Tensor
    """1 - beta2 ** updates of the second moment of matrices."""
    second_of_vectors: Tensor


def corrections(rates: Sequence[float], updates_second: Sequence[bool]) -> Tensor:
    """[steps, 4]: the `Now` of each step."""
    rows, updates = [], 0
    for step, (rate, updates_it) in enumerate(zip(rates, updates_second, strict=True), 1):
        updates += updates_it
        rows.append((rate, 1 - BETAS[0] ** step, 1 - BETAS[1] ** updates, 1 - BETAS[1] ** step))
    return torch.tensor(rows)


class Optimizer:
    """The moments of a model, and steps with them. `kind` is adamw, sgd or muon."""

    def __init__(self, kind: str, flat: Flat) -> None:
        self.kind, self.flat = kind, flat
        self.first, self.second = torch.zeros_like(flat.values), torch.zeros_like(flat.values)

    def step(self, average: Tensor, now: Now, takes_momentum: bool) -> None:
        """One step with an average gradient. With `takes_momentum`, that of matrices is their new first moment, and
        their second moment stays as it is."""
        matrices, rest = slice(0, self.flat.compressed), slice(self.flat.compressed, None)
        values = self.flat.values
        if self.kind == "sgd":
            self.first.mul_(BETAS[0]).add_(average)
            values.sub_(now.rate * self.first)
            return
        values[matrices].mul_(1 - now.rate * DECAY)
        gradients = rest if takes_momentum else slice(None)
        self.first[gradients].lerp_(average[gradients], 1 - BETAS[0])
        self.second[gradients].mul_(BETAS[1]).addcmul_(average[gradients], average[gradients], value=1 - BETAS[1])
        if takes_momentum:
            self.first[matrices] = average[matrices]
        if self.kind == "muon":
            self._orthogonal_step(now.rate)
        else:
            self._divided_step(matrices, now.second, now)
        self._divided_step(rest, now.second_of_vectors, now)

    def divisor(self, here: slice, correction: Tensor) -> Tensor:
        """What AdamW divides the momentum by."""
        return self.second[here].sqrt().div_(correction.sqrt()).add_(EPS)

    def _divided_step(self, here: slice, correction: Tensor, now: Now) -> None:
        divisor = self.divisor(here, correction).mul_(-now.first / now.rate)
        self.flat.values[here].addcdiv_(self.first[here], divisor)

    def _orthogonal_step(self, rate: Tensor) -> None:
        """All matrices of one shape at a time."""
        by_shape: dict[torch.Size, list[int]] = {}
        for place, p in enumerate(self.flat.matrices):
            by_shape.setdefault(p.flatten(1).shape, []).append(place)
        moments, values = self.flat.by_matrix(self.first), self.flat.by_matrix(self.flat.values)
        for shape, places in by_shape.items():
            stacked = torch.stack([moments[place].flatten(1) for place in places])
            updates = (rate * 0.2 * math.sqrt(max(shape))) * newton_schulz(stacked)
            for place, update in zip(places, updates, strict=True):
                values[place].sub_(update.view_as(values[place]))


def newton_schulz(matrices: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with the same singular vectors and singular values near 1."""
    x = matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    x = x.mT if x.shape[1] > x.shape[2] else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x
