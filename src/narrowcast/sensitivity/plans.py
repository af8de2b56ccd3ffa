"""One codec per weight, so that a model of a given size loses least.

What is minimised is the sum over all weights of `||W - Q(W)||^2 / ||W||^2`: each weight's noise relative to its energy,
every weight counting once. It is relative because a weight's scale carries no meaning (a norm, or the layer behind,
undoes it), and a layer's output has, for inputs without a direction, the relative noise of its weight. It is not
multiplied by the number of elements because a large layer's output is no more to the layers behind it than a small
one's; elements count on the other side, in the bytes. On the one real model that was tried, and by which it was chosen,
this sum gave better mixes than the same sum times elements, or than absolute noise: bench/results/quality.md has all.

Weights that hold a NaN or an infinity, or no element, take no part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast.errors import BudgetError
from narrowcast.sensitivity.knapsack import best_mix
from narrowcast.sensitivity.statistics import Statistics, decibels


@dataclass
class Plan:
    """A codec for each weight, and what that takes and loses."""

    codecs: dict[str, str]
    """Specs, by the weight's name."""
    bits: float
    """Bits per element, scales and padding included."""
    noise: float
    """The mean of the weights' relative noises."""
    bound: float
    """No mix of this size has less noise."""
    exact: bool
    """Whether `noise` is the least that there is."""
    uniform: Uniform | None
    """The best single codec within the budget; None where none fits."""

    @property
    def sqnr(self) -> float:
        return decibels(self.noise)


@dataclass
class Uniform:
    """The same codec for every weight."""

    codec: str
    bits: float
    noise: float

    @property
    def sqnr(self) -> float:
        return decibels(self.noise)


def plan(weights: Sequence[Statistics], specs: Sequence[str], bits: float) -> Plan:
    """The mix of `specs` with the least noise in at most `bits` per element, on average over all weights."""
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
    smallest = sum(min(row) for row in sizes)
    if smallest > budget:
        least = math.ceil(smallest * 8 / numel * 1000) / 1000
        raise BudgetError(
            f"budget={bits:g} bits per weight: the smallest of {', '.join(specs)} for every weight takes {least:.3f}, "
            f"scales and padding included. Ask for {least:.3f} or more, or offer a smaller codec with --codecs."
        )
    mix = best_mix(sizes, noises, budget)
    chosen = {weight.name: specs[pick] for weight, pick in zip(usable, mix.picks, strict=True)}
    count = len(usable)
    uniform = _uniform(usable, specs, budget)
    return Plan(chosen, mix.nbytes * 8 / numel, mix.noise / count, mix.bound / count, mix.exact, uniform)


def _uniform(weights: Sequence[Statistics], specs: Sequence[str], budget: int) -> Uniform | None:
    numel = sum(weight.numel for weight in weights)
    best = None
    for spec in specs:
        nbytes = sum(weight.nbytes[spec] for weight in weights)
        noise = sum(weight.relative_noise(spec) for weight in weights) / len(weights)
        if nbytes <= budget and (best is None or noise < best.noise):
            best = Uniform(spec, nbytes * 8 / numel, noise)
    return best
