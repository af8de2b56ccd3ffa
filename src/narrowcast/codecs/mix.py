"""The best mix of codecs under a size: one codec for each weight, so that the model loses least.

The loss is the sum over all weights of `||W - Q(W)||^2 / ||W||^2`: each weight's noise relative to its energy, every
weight counted once. The noise is relative because a weight's scale carries no meaning: a norm, or the next layer,
undoes it. A layer's output has, for inputs without a preferred direction, the relative noise of its weight. The sum is
not weighted by the number of elements, because the output of a large layer matters no more to the next layer than that
of a small one. Elements count in the bytes instead. bench/results/quality.md compares this sum with two others (times
elements, absolute noise) on a real model.

Choosing one codec per weight within a number of bytes is the multiple-choice knapsack problem. `pick_under_budget`
solves it greedily, over exact bytes:

- Each weight's choices are cut to their lower convex hull. A step leads from one choice on a hull to the next larger.
- Steps are taken in the order of noise saved per byte. A step that does not fit ends its weight's steps.
- The first step that does not fit is the only one that the optimum over split weights takes in part. So the steps are
  taken a second time, that weight's first. The better of the two results counts.

The same order gives a lower bound that no mix within the budget is below. The result is above the bound by at most the
noise that the first step that does not fit would save. Measured on the shapes of seven models, 10 codecs, 8 budgets and
6 draws of noises each, against an exact search: on 39 weights or more the mean loss is below 0.012 dB and the largest
0.25 dB (0.053 dB on 200 weights or more); on 3 weights the mean is 0.03 dB and the largest 1.4 dB. For comparison, one
bit more per weight gains about 6 dB. A model of 226 weights takes 6 ms, and took the exact search 40 ms.

Weights that hold a NaN or an infinity, or no element, take no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from narrowcast.codecs.sensitivity import Statistics, decibels
from narrowcast.errors import BudgetError


@dataclass
class SingleCodec:
    """The same codec for every weight."""

    codec: str
    bits: float
    """Bits per element, scales and padding included."""
    noise: float
    """The mean of the weights' relative noises."""

    @property
    def sqnr(self) -> float:
        return decibels(self.noise)


@dataclass
class Mix:
    """A codec for each weight, its size and its noise."""

    codecs: dict[str, str]
    """Specs, by the weight's name."""
    bits: float
    """Bits per element, scales and padding included."""
    noise: float
    """The mean of the weights' relative noises."""
    bound: float
    """No mix of this size has less noise."""
    single: SingleCodec | None
    """The best single codec within the budget; None where none fits."""

    @property
    def sqnr(self) -> float:
        return decibels(self.noise)

    @property
    def exact(self) -> bool:
        """Whether the noise reaches its lower bound: then no mix within the budget has less."""
        return self.noise <= self.bound * (1 + 1e-12)  # the rounding of the two sums


def mix_codecs(weights: Sequence[Statistics], specs: Sequence[str], bits: float) -> Mix:
    """A mix of `specs` in at most `bits` per element, on average over all weights, near the least noise there is.

    It has no more noise than any single codec of that size.
    """
    if not math.isfinite(bits) or bits <= 0:
        raise BudgetError(f"budget={bits}: a budget is a positive number of bits per weight, such as 4.5.")
    usable = [weight for weight in weights if weight.finite and weight.numel]
    if not usable:
        raise BudgetError(
            "budget: there is no weight to spend it on. Are all weights quantized already, or not finite?"
        )
    numel = sum(weight.numel for weight in usable)
    sizes = [[weight.nbytes[spec] for spec in specs] for weight in usable]
    noises = [[weight.relative_noise(spec) for spec in specs] for weight in usable]
    budget = math.floor(bits * numel / 8)
    smallest = sum(map(min, sizes))
    if smallest > budget:
        least = math.ceil(smallest * 8 / numel * 1000) / 1000
        raise BudgetError(
            f"budget={bits:g} bits per weight: the smallest of {', '.join(specs)} for every weight takes {least:.3f}, "
            f"scales and padding included. Ask for {least:.3f} or more, or offer a smaller codec with --codecs."
        )
    picks, nbytes, noise, bound = pick_under_budget(sizes, noises, budget)
    size, mean, least_mean = nbytes * 8 / numel, noise / len(usable), bound / len(usable)
    single = _best_single(usable, specs, budget)
    if single is not None and single.noise < mean:  # its codec may lie above the hulls
        return Mix({weight.name: single.codec for weight in usable}, single.bits, single.noise, least_mean, single)
    chosen = {weight.name: specs[pick] for weight, pick in zip(usable, picks, strict=True)}
    return Mix(chosen, size, mean, least_mean, single)


def _best_single(weights: Sequence[Statistics], specs: Sequence[str], budget: int) -> SingleCodec | None:
    numel = sum(weight.numel for weight in weights)
    best = None
    for spec in specs:
        nbytes = sum(weight.nbytes[spec] for weight in weights)
        noise = sum(weight.relative_noise(spec) for weight in weights) / len(weights)
        if nbytes <= budget and (best is None or noise < best.noise):
            best = SingleCodec(spec, nbytes * 8 / numel, noise)
    return best


# -- the knapsack -----------------------------------------------------------------------------------------------------


class Picks(NamedTuple):
    """One choice for each weight."""

    picks: list[int]
    nbytes: int
    noise: float
    bound: float
    """No picks within the budget have less noise than this."""


class _Step(NamedTuple):
    """From a weight's choice to the next larger one on its hull."""

    weight: int
    choice: int
    cost: int
    saved: float


def pick_under_budget(sizes: Sequence[Sequence[int]], noises: Sequence[Sequence[float]], budget: int) -> Picks:
    """Pick a choice for each weight: `sizes[w][c]` bytes and `noises[w][c]` noise, at most `budget` bytes in all."""
    smallest = sum(map(min, sizes))
    if smallest > budget:
        raise BudgetError(
            f"budget={budget} bytes: the smallest choice of every weight takes {smallest} bytes together. "
            f"Raise the budget to {smallest}, or offer smaller codecs."
        )
    hulls = [_hull(size, noise) for size, noise in zip(sizes, noises, strict=True)]
    steps = [
        _Step(w, b, sizes[w][b] - sizes[w][a], noises[w][a] - noises[w][b])
        for w, hull in enumerate(hulls)
        for a, b in pairwise(hull)
    ]
    # Within a weight steps save less and less per byte, and the sort is stable, so that it keeps their order.
    steps.sort(key=lambda step: -step.saved / step.cost)
    start = [hull[0] for hull in hulls]
    picks, blocked = _climb(start, steps, budget - smallest)
    if blocked is not None:
        first = [step for step in steps if step.weight == blocked.weight]
        ahead = first[: first.index(blocked) + 1]
        other, _ = _climb(start, [*ahead, *(step for step in steps if step not in ahead)], budget - smallest)
        picks = min(picks, other, key=lambda some: _total(noises, some))
    noise = float(_total(noises, picks))
    return Picks(picks, int(_total(sizes, picks)), noise, min(noise, _bound(noises, start, steps, budget - smallest)))


def _total(table: Sequence[Sequence[float]], picks: Sequence[int]) -> float:
    return sum(row[choice] for row, choice in zip(table, picks, strict=True))


def _hull(sizes: Sequence[int], noises: Sequence[float]) -> list[int]:
    """The choices on the lower convex hull, from the smallest to the one with the least noise."""
    hull: list[int] = []
    for c in sorted(range(len(sizes)), key=lambda c: (sizes[c], noises[c])):
        if hull and noises[c] >= noises[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            # b lies on or above the line from a to c.
            if (noises[a] - noises[b]) * (sizes[c] - sizes[a]) > (noises[a] - noises[c]) * (sizes[b] - sizes[a]):
                break
            hull.pop()
        hull.append(c)
    return hull


def _climb(start: Sequence[int], steps: Sequence[_Step], left: int) -> tuple[list[int], _Step | None]:
    """Take steps in order while `left` bytes last; a step that does not fit ends its weight's steps, and no others.

    Returns the picks, and the first step that did not fit.
    """
    picks, ended, blocked = list(start), set(), None
    for step in steps:
        if step.weight in ended:
            continue
        if step.cost > left:
            ended.add(step.weight)
            blocked = blocked or step
            continue
        left -= step.cost
        picks[step.weight] = step.choice
    return picks, blocked


def _bound(noises: Sequence[Sequence[float]], start: Sequence[int], steps: Sequence[_Step], left: int) -> float:
    """The least noise if a weight could be split between two choices: steps in order, the last one in part."""
    noise = float(_total(noises, start))
    for step in steps:
        share = min(1.0, left / step.cost)
        noise -= share * step.saved
        left -= step.cost
        if left <= 0:
            break
    return noise
