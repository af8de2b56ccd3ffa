"""Mixes of codecs under a size: the bound that they promise, against trying every mix; budgets and single codecs."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs.mix import Picks, mix_codecs, pick_under_budget
from narrowcast.codecs.sensitivity import Statistics, measure
from narrowcast.errors import BudgetError

SPECS = ["int8", "int4", "nf4", "int2"]
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


def check(result: Picks, sizes: list[list[int]], noises: list[list[float]], limit: int) -> None:
    assert result.nbytes == sum(row[c] for row, c in zip(sizes, result.picks, strict=True)) <= limit
    assert result.noise == sum(row[c] for row, c in zip(noises, result.picks, strict=True))
    assert result.bound <= result.noise


@pytest.mark.parametrize("seed", range(300))
def test_no_mix_is_below_the_bound_and_the_result_is_above_it_by_one_step_at_most(seed: int) -> None:
    sizes, noises, limit = problem(seed)
    result = pick_under_budget(sizes, noises, limit)
    check(result, sizes, noises, limit)
    best = least_noise(sizes, noises, limit)
    # 1e-12 covers the rounding of a sum of five.
    assert result.bound <= best * (1 + 1e-12) <= result.noise * (1 + 2e-12)
    # A step saves no more than a weight's worst choice has above its best one.
    largest_step = max(max(row) - min(row) for row in noises)
    assert result.noise <= result.bound + largest_step


def test_most_of_these_mixes_are_the_best_there_is() -> None:
    reached = 0
    for seed in range(300):
        sizes, noises, limit = problem(seed)
        reached += pick_under_budget(sizes, noises, limit).noise <= least_noise(sizes, noises, limit) * (1 + 1e-12)
    assert reached >= 297  # the seeds are fixed, so the count is, too


def test_the_first_step_that_does_not_fit_is_tried_before_all_others() -> None:
    # By noise per byte the small weight's step comes first, and leaves too little for the large one's.
    result = pick_under_budget([[0, 2], [0, 10]], [[3.0, 0.0], [10.0, 0.0]], 10)
    assert (result.picks, result.noise) == ([0, 1], 3.0)
    # The bound splits the large weight: 8 of its 10 bytes fit.
    assert result.bound == pytest.approx(2.0)


def test_a_budget_for_everything_takes_the_least_noise_of_each() -> None:
    result = pick_under_budget([[1, 5, 9], [2, 3, 4]], [[9.0, 1.0, 2.0], [3.0, 2.0, 1.0]], 1000)
    assert (result.picks, result.nbytes, result.noise) == ([1, 2], 9, 2.0)


def test_a_choice_above_the_hull_is_not_taken_and_the_bound_says_what_that_may_cost() -> None:
    # From 0 bytes and noise 10 to 10 bytes and 0, the hull is a line. (9, 8) lies above it.
    result = pick_under_budget([[0, 9, 10]], [[10.0, 8.0, 0.0]], 9)
    assert (result.picks, result.noise) == ([0], 10.0)
    assert result.bound == pytest.approx(1.0)


def test_the_smallest_budget_is_the_smallest_choice_of_each() -> None:
    sizes, noises = [[4, 2], [7, 9]], [[1.0, 2.0], [1.0, 0.0]]
    assert pick_under_budget(sizes, noises, 9).picks == [1, 0]
    with pytest.raises(BudgetError, match=r"budget=8 bytes: .* takes 9 bytes .* Raise the budget to 9"):
        pick_under_budget(sizes, noises, 8)


def test_no_weights_make_an_empty_mix() -> None:
    assert pick_under_budget([], [], 0) == Picks([], 0, 0.0, 0.0)


def test_a_model_of_226_weights_is_within_a_hundredth_of_a_decibel_of_its_bound() -> None:
    # The shapes of a 7B Llama.
    draw = random.Random(0)
    numels = [4096 * 4096] * 128 + [11008 * 4096] * 96 + [32000 * 4096] * 2
    bits = (2.25, 3.25, 4.25, 5.25, 6.25, 8.25)
    sizes = [[round(numel * b / 8) for b in bits] for numel in numels]
    noises = [[numel * 4.0**-b * draw.lognormvariate(0, 0.5) for b in bits] for numel in numels]
    result = pick_under_budget(sizes, noises, round(4.5 / 8 * sum(numels)))
    # The largest step saves 1/226 of the noise or so.
    assert result.noise < result.bound * 1.0023


# -- of weights -------------------------------------------------------------------------------------------------------


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def measured(x: Tensor, name: str) -> Statistics:
    codecs = [nc.codec(spec) for spec in SPECS]
    return measure(name, x.shape[0], x.shape[1], lambda start, stop: x[start:stop], codecs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_takes_no_part(value: float) -> None:
    x = gaussian(4, 64)
    x[2, 3] = value
    assert mix_codecs([measured(x, "bad"), measured(gaussian(4, 64), "good")], SPECS, 8.5).codecs.keys() == {"good"}


def test_a_mix_keeps_the_budget_and_beats_every_single_codec() -> None:
    heavy = gaussian(64, 256, 1) ** 5  # long tails: what a codec leaves of it differs from what it leaves of the others
    weights = [measured(x, f"w{i}") for i, x in enumerate([gaussian(64, 256, 2), heavy, gaussian(128, 512, 3)])]
    mix = mix_codecs(weights, SPECS, 5.0)
    numel = sum(weight.numel for weight in weights)
    assert mix.bits == 8 * sum(weight.nbytes[mix.codecs[weight.name]] for weight in weights) / numel <= 5.0
    noise = sum(weight.relative_noise(mix.codecs[weight.name]) for weight in weights) / len(weights)
    assert mix.noise == pytest.approx(noise, rel=1e-12)
    assert mix.exact
    assert mix.single is not None
    assert mix.single.codec == "nf4"
    assert mix.noise < mix.single.noise
    assert mix.sqnr > mix.single.sqnr


def test_a_mix_does_not_depend_on_the_scale_of_a_weight() -> None:
    xs = [gaussian(64, 256, 2), gaussian(64, 256, 1) ** 3, gaussian(32, 512, 3)]
    plain = mix_codecs([measured(x, f"w{i}") for i, x in enumerate(xs)], SPECS, 5.0)
    scaled = mix_codecs([measured(x * 2.0 ** (9 * i), f"w{i}") for i, x in enumerate(xs)], SPECS, 5.0)
    assert scaled.codecs == plain.codecs


def test_a_budget_below_the_smallest_codec_names_the_smallest_budget() -> None:
    weights = [measured(gaussian(4, 64), "w")]
    # int2 of 64: 16 bytes of codes, a scale of 2, 14 of padding.
    with pytest.raises(
        BudgetError, match=r"budget=3 bits per weight: .*int8, int4, nf4, int2.* takes 4\.000, .*--codecs"
    ):
        mix_codecs(weights, SPECS, 3.0)
    assert mix_codecs(weights, SPECS, 4.0).codecs == {"w": "int2"}


@pytest.mark.parametrize("bits", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_is_a_positive_number(bits: float) -> None:
    with pytest.raises(BudgetError, match=r"budget=.*positive number of bits"):
        mix_codecs([measured(gaussian(4, 64), "w")], SPECS, bits)


def test_nothing_to_spend_a_budget_on_is_an_error() -> None:
    with pytest.raises(BudgetError, match="no weight to spend it on"):
        mix_codecs([], SPECS, 4.0)


def test_where_no_single_codec_fits_a_mix_may() -> None:
    first = Statistics("first", 1, 8, energy=1.0, noise={"a": 0.1, "b": 0.1}, nbytes={"a": 16, "b": 32})
    second = Statistics("second", 1, 8, energy=1.0, noise={"a": 0.1, "b": 0.1}, nbytes={"a": 32, "b": 16})
    mix = mix_codecs([first, second], ["a", "b"], 16.0)
    assert (mix.codecs, mix.single) == ({"first": "a", "second": "b"}, None)


def test_a_mix_is_never_worse_than_the_best_single_codec() -> None:
    # The hulls have no "b"; "a" and "c" together leave "first" at "a", which is worse than "b" for both.
    noise = {"a": 1.0, "b": 0.6, "c": 0.1}
    weights = [Statistics(n, 1, 8, energy=1.0, noise=noise, nbytes={"a": 0, "b": 15, "c": 32}) for n in ("one", "two")]
    mix = mix_codecs(weights, ["a", "b", "c"], 8 * 30 / 16)
    assert mix.single is not None
    assert mix.codecs == {"one": "b", "two": "b"}
    assert (mix.noise, mix.bits) == (mix.single.noise, mix.single.bits)
    assert not mix.exact
