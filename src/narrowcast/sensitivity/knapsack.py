"""The best mix of codecs under a size: one choice per tensor, the least total noise, no more bytes than the budget.

This is the multiple-choice knapsack problem. It is solved in two steps, both over exact bytes:

- **Bound.** Each tensor's choices are cut to their lower convex hull; the hulls' steps, taken in the order of noise
  saved per byte, solve the problem in which a tensor may be split between two codecs. That gives a lower bound for
  every budget, and, without the step that must be split, a mix whose noise is above the bound by no more than it.
- **Search.** Tensor by tensor, every pair (bytes, noise) that some choice of codecs reaches, without those that another
  pair beats in both, and without those that the bound shows cannot end below the best mix known. Rows are multiples of
  16 bytes and models repeat their shapes, so that few different sizes arise, and the search ends with the optimum.

Where more than `LIMIT` pairs remain (hundreds of tensors of unrelated sizes), only the most promising are kept. Then
the optimum is not certain, `Mix.exact` is False, and `Mix.bound` still says what no mix can beat; in either case the
noise is above the bound by no more than one step of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from narrowcast.errors import BudgetError

LIMIT = 1 << 15
"""Pairs kept per tensor: 5 bytes each to find the way back, so 40 MB for 250 tensors."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Mix(NamedTuple):
    """One choice for each tensor."""

    picks: list[int]
    nbytes: int
    noise: float
    bound: float
    """No mix within the budget has less noise than this."""
    exact: bool
    """Whether no mix within the budget has less noise than this one."""


class _Steps(NamedTuple):
    """Every step along a hull, the best first: from a tensor's choice to its next larger one."""

    tensor: Ints
    choice: Ints
    cost: Ints
    saved: Floats

    def of(self, first: int) -> _Steps:
        """The steps of the tensors from `first` on."""
        some = self.tensor >= first
        return _Steps(self.tensor[some], self.choice[some], self.cost[some], self.saved[some])


def best_mix(sizes: Sequence[Sequence[int]], noises: Sequence[Sequence[float]], budget: int) -> Mix:
    """Pick a choice for each tensor: `sizes[t][c]` bytes and `noises[t][c]` noise, at most `budget` bytes in all."""
    smallest = sum(min(row) for row in sizes)
    if smallest > budget:
        raise BudgetError(
            f"budget={budget} bytes: the smallest choice of every tensor takes {smallest} bytes together. "
            f"Raise the budget to {smallest}, or offer smaller codecs."
        )
    hulls = [_hull(size, noise) for size, noise in zip(sizes, noises, strict=True)]
    steps = _steps(hulls, sizes, noises)
    floor = [(sizes[t][hull[0]], noises[t][hull[0]]) for t, hull in enumerate(hulls)]
    bound = float(_lowest(steps, floor, np.array([budget]))[0])
    greedy = _greedy(steps, hulls, budget - smallest)
    picks, exact = _search(sizes, noises, steps, floor, budget, _sum(noises, greedy))
    picks = greedy if picks is None else picks
    noise = _sum(noises, picks)
    return Mix(picks, sum(row[c] for row, c in zip(sizes, picks, strict=True)), noise, min(bound, noise), exact)


def _sum(rows: Sequence[Sequence[float]], picks: Sequence[int]) -> float:
    return float(sum(row[c] for row, c in zip(rows, picks, strict=True)))


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


def _steps(hulls: Sequence[list[int]], sizes: Sequence[Sequence[int]], noises: Sequence[Sequence[float]]) -> _Steps:
    found = [
        (t, b, sizes[t][b] - sizes[t][a], noises[t][a] - noises[t][b])
        for t, hull in enumerate(hulls)
        for a, b in pairwise(hull)
    ]
    # Within a tensor steps are worth less and less, so that the sort, which is stable, keeps their order.
    found.sort(key=lambda step: -step[3] / step[2])
    tensor, choice, cost = (np.array([step[i] for step in found], dtype=np.int64) for i in range(3))
    return _Steps(tensor, choice, cost, np.array([step[3] for step in found], dtype=np.float64))


def _lowest(steps: _Steps, floor: Sequence[tuple[int, float]], budgets: Ints) -> Floats:
    """A lower bound of the noise of these tensors within each budget; infinity where they do not fit."""
    nbytes, noise = sum(size for size, _ in floor), float(sum(loss for _, loss in floor))
    sizes = nbytes + np.concatenate([[0.0], np.cumsum(steps.cost)])
    noises = noise - np.concatenate([[0.0], np.cumsum(steps.saved)])
    return np.where(budgets < nbytes, np.inf, np.interp(budgets.astype(np.float64), sizes, noises))


def _greedy(steps: _Steps, hulls: Sequence[list[int]], left: int) -> list[int]:
    """Take steps in order; one that does not fit ends its tensor's steps, the others go on."""
    picks, stuck = [hull[0] for hull in hulls], set()
    for t, choice, cost in zip(steps.tensor.tolist(), steps.choice.tolist(), steps.cost.tolist(), strict=True):
        if t in stuck or cost > left:
            stuck.add(t)
            continue
        left -= cost
        picks[t] = choice
    return picks


def _search(
    sizes: Sequence[Sequence[int]],
    noises: Sequence[Sequence[float]],
    steps: _Steps,
    floor: Sequence[tuple[int, float]],
    budget: int,
    best: float,
) -> tuple[list[int] | None, bool]:
    """The picks of the least noise, None where nothing is below `best`; and whether no pair had to be given up."""
    spent, noise = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[NDArray[np.int32], NDArray[np.int8]]] = []
    exact = True
    for t, (size, loss) in enumerate(zip(sizes, noises, strict=True)):
        choices = len(size)
        spent = (spent[:, None] + np.array(size, dtype=np.int64)).ravel()
        noise = (noise[:, None] + np.array(loss)).ravel()
        lowest = noise + _lowest(steps.of(t + 1), floor[t + 1 :], budget - spent)
        # Above the rounding of the sums, so that equals of the best mix known are dropped.
        hope = np.flatnonzero(lowest < best * (1 - 1e-12))
        hope = hope[np.lexsort((noise[hope], spent[hope]))]
        # In the order of bytes, a pair stays where it has less noise than every pair before it.
        least = np.minimum.accumulate(noise[hope])
        hope = hope[np.concatenate([[True], least[1:] < least[:-1]])] if len(hope) else hope
        if len(hope) > LIMIT:
            exact = False
            hope = np.sort(hope[np.argpartition(lowest[hope], LIMIT)[:LIMIT]])
        if not len(hope):
            return None, exact
        trail.append(((hope // choices).astype(np.int32), (hope % choices).astype(np.int8)))
        spent, noise = spent[hope], noise[hope]
    at, picks = int(noise.argmin()), []
    for parents, chosen in reversed(trail):
        picks.append(int(chosen[at]))
        at = int(parents[at])
    return picks[::-1], exact
