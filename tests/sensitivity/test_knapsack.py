"""The best mix under a size, against trying every mix."""

from __future__ import annotations

import itertools
import random

import pytest

from narrowcast.errors import BudgetError
from narrowcast.sensitivity import knapsack
from narrowcast.sensitivity.knapsack import Mix, best_mix

Problem = tuple[list[list[int]], list[list[float]], int]


def problem(seed: int, tensors: int = 5, choices: int = 5) -> Problem:
    """Sizes and noises with no order in them: some choices are beaten by others, some lie above the hull."""
    draw = random.Random(seed)
    counts = [draw.randint(1, choices) for _ in range(draw.randint(1, tensors))]
    sizes = [[draw.randint(1, 60) for _ in range(count)] for count in counts]
    noises = [[draw.random() * 10.0 ** draw.randint(-3, 3) for _ in range(count)] for count in counts]
    return sizes, noises, draw.randint(sum(map(min, sizes)), sum(map(max, sizes)) + 3)


def least_noise(sizes: list[list[int]], noises: list[list[float]], limit: int) -> float:
    """By trying every mix."""
    mixes = itertools.product(*(range(len(row)) for row in sizes))
    fitting = (picks for picks in mixes if sum(row[c] for row, c in zip(sizes, picks, strict=True)) <= limit)
    return min(sum(row[c] for row, c in zip(noises, picks, strict=True)) for picks in fitting)


def check(mix: Mix, sizes: list[list[int]], noises: list[list[float]], limit: int) -> None:
    assert mix.nbytes == sum(row[c] for row, c in zip(sizes, mix.picks, strict=True)) <= limit
    assert mix.noise == sum(row[c] for row, c in zip(noises, mix.picks, strict=True))
    assert mix.bound <= mix.noise


@pytest.mark.parametrize("seed", range(300))
def test_no_mix_within_the_budget_has_less_noise(seed: int) -> None:
    sizes, noises, limit = problem(seed)
    mix = best_mix(sizes, noises, limit)
    check(mix, sizes, noises, limit)
    best = least_noise(sizes, noises, limit)
    assert mix.exact
    # 1e-12: below it two mixes count as equal, which covers the rounding of a sum of five.
    assert best <= mix.noise <= best * (1 + 1e-12)
    assert mix.bound <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(100))
def test_cut_short_the_noise_is_above_the_bound_by_no_more_than_one_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knapsack, "LIMIT", 2)
    sizes, noises, limit = problem(seed, tensors=6)
    mix = best_mix(sizes, noises, limit)
    check(mix, sizes, noises, limit)
    assert mix.bound <= least_noise(sizes, noises, limit) * (1 + 1e-12)
    largest_step = max(max(row) - min(row) for row in noises)
    assert mix.noise <= mix.bound + largest_step


def test_a_search_that_gives_up_pairs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [[i + 7 * j for j in range(1, 6)] for i in range(12)]
    noises = [[(i + 2) / j**2 for j in range(1, 6)] for i in range(12)]
    whole = best_mix(sizes, noises, 300)
    assert whole.exact
    monkeypatch.setattr(knapsack, "LIMIT", 1)
    cut = best_mix(sizes, noises, 300)
    assert not cut.exact
    assert whole.noise <= cut.noise


def test_a_budget_for_everything_takes_the_least_noise_of_each() -> None:
    mix = best_mix([[1, 5, 9], [2, 3, 4]], [[9.0, 1.0, 2.0], [3.0, 2.0, 1.0]], 1000)
    assert (mix.picks, mix.nbytes, mix.noise) == ([1, 2], 9, 2.0)


def test_a_choice_above_the_hull_is_taken_where_only_it_fits() -> None:
    # From 0 bytes and noise 10 to 10 and 0, the hull is a line; (9, 8) lies above it, and is all that 9 bytes buy.
    assert best_mix([[0, 9, 10]], [[10.0, 8.0, 0.0]], 9).picks == [1]


def test_the_smallest_budget_is_the_smallest_choice_of_each() -> None:
    sizes, noises = [[4, 2], [7, 9]], [[1.0, 2.0], [1.0, 0.0]]
    assert best_mix(sizes, noises, 9).picks == [1, 0]
    with pytest.raises(BudgetError, match=r"budget=8 bytes: .* takes 9 bytes .* Raise the budget to 9"):
        best_mix(sizes, noises, 8)


def test_no_tensors_make_an_empty_mix() -> None:
    assert best_mix([], [], 0) == Mix([], 0, 0.0, 0.0, True)


def test_a_model_of_226_weights_is_solved_exactly() -> None:
    # The shapes of a 7B Llama: three kinds of layer, so that few different sizes arise.
    draw = random.Random(0)
    numels = [4096 * 4096] * 128 + [11008 * 4096] * 96 + [32000 * 4096] * 2
    bits = (2.25, 3.25, 4.25, 5.25, 6.25, 8.25)
    sizes = [[round(numel * b / 8) for b in bits] for numel in numels]
    noises = [[numel * 4.0**-b * draw.lognormvariate(0, 0.5) for b in bits] for numel in numels]
    mix = best_mix(sizes, noises, round(4.5 / 8 * sum(numels)))
    assert mix.exact
    # The largest step saves 1/226 of the noise or so; ten times less is left between this mix and the bound.
    assert mix.noise < mix.bound * 1.002
