"""One codec per weight, so that a model of a given size loses least.

What is minimised is the noise of each weight relative to its energy, `||W - Q(W)||^2 / ||W||^2`, summed over weights
with their numbers of elements as factors: the noise energy of the model once every weight is scaled to the same power
per element. The scale is taken out because it carries no meaning: a norm before a layer, or the layer after it, undoes
any factor, and what the layer's output loses is the relative noise. The number of elements stays in because
every element is paid for with the same bits; without it, all bits would go to the smallest weights.
docs/huggingface.md shows both against a real model's embeddings.

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
    """The mean relative noise, with the weights' elements as factors."""
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
    noises = [[weight.numel * weight.relative_noise(spec) for spec in specs] for weight in usable]
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
    return Plan(
        chosen, mix.nbytes * 8 / numel, mix.noise / numel, mix.bound / numel, mix.exact, _uniform(usable, specs, budget)
    )


def _uniform(weights: Sequence[Statistics], specs: Sequence[str], budget: int) -> Uniform | None:
    numel = sum(weight.numel for weight in weights)
    best = None
    for spec in specs:
        nbytes = sum(weight.nbytes[spec] for weight in weights)
        noise = sum(weight.numel * weight.relative_noise(spec) for weight in weights) / numel
        if nbytes <= budget and (best is None or noise < best.noise):
            best = Uniform(spec, nbytes * 8 / numel, noise)
    return best
