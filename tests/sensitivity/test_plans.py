"""Weights measured in tiles, and turned into a plan."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs.payload import encode_rows
from narrowcast.errors import BudgetError
from narrowcast.sensitivity import Statistics, measure, plan, statistics

SPECS = ["int8", "int4", "nf4", "int2"]


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def measured(x: Tensor, name: str = "w", specs: list[str] = SPECS) -> Statistics:
    codecs = [nc.codec(spec) for spec in specs]
    return measure(name, x.shape[0], x.shape[1], lambda start, stop: x[start:stop], codecs)


def test_tiles_add_up_to_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "TILE", 1000)
    x = random(50, 192)
    assert len(list(statistics.tiles(50, 192))) == 10
    found = measured(x)
    assert (found.lowest, found.highest) == (float(x.min()), float(x.max()))
    # Sums in fp64, in another order: 9600 roundings of 2**-53 each.
    assert found.energy == pytest.approx(float(x.double().square().sum()), rel=2e-12)
    assert found.std == pytest.approx(float(x.double().std(correction=0)), rel=2e-12)
    for spec in SPECS:
        rows = encode_rows(x, spec)
        assert found.nbytes[spec] == rows.nbytes
        assert found.noise[spec] == pytest.approx(float((x - rows.decode()).double().square().sum()), rel=2e-12)
        assert found.sqnr(spec) == pytest.approx(-10 * math.log10(found.noise[spec] / found.energy))


def test_a_row_longer_than_a_tile_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "TILE", 10)
    assert list(statistics.tiles(3, 100)) == [(0, 1), (1, 2), (2, 3)]


def test_a_weight_in_bf16_is_measured_as_the_numbers_it_holds() -> None:
    x = random(8, 64).bfloat16()
    assert measured(x).noise == measured(x.float()).noise


def test_a_weight_of_zeros_loses_nothing() -> None:
    found = measured(torch.zeros(4, 64))
    assert found.sqnr("int2") == math.inf
    assert (found.std, found.finite) == (0.0, True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_says_so_and_takes_no_part(value: float) -> None:
    x = random(4, 64)
    x[2, 3] = value
    bad = measured(x, "bad")
    assert not bad.finite
    assert plan([bad, measured(random(4, 64), "good")], SPECS, 8.5).codecs.keys() == {"good"}


def test_a_plan_keeps_the_budget_and_beats_every_single_codec() -> None:
    heavy = random(64, 256, 1) ** 5  # long tails: what a codec leaves of it differs from what it leaves of the others
    weights = [measured(x, f"w{i}") for i, x in enumerate([random(64, 256, 2), heavy, random(128, 512, 3)])]
    found = plan(weights, SPECS, 5.0)
    numel = sum(weight.numel for weight in weights)
    assert found.bits == 8 * sum(weight.nbytes[found.codecs[weight.name]] for weight in weights) / numel <= 5.0
    noise = sum(weight.relative_noise(found.codecs[weight.name]) for weight in weights) / len(weights)
    assert found.noise == pytest.approx(noise, rel=1e-12)
    assert found.exact
    assert found.uniform is not None
    assert found.uniform.codec == "nf4"
    assert found.noise < found.uniform.noise
    assert found.sqnr > found.uniform.sqnr


def test_a_plan_does_not_depend_on_the_scale_of_a_weight() -> None:
    xs = [random(64, 256, 2), random(64, 256, 1) ** 3, random(32, 512, 3)]
    plain = plan([measured(x, f"w{i}") for i, x in enumerate(xs)], SPECS, 5.0)
    scaled = plan([measured(x * 2.0 ** (9 * i), f"w{i}") for i, x in enumerate(xs)], SPECS, 5.0)
    assert scaled.codecs == plain.codecs


def test_a_budget_below_the_smallest_codec_names_the_smallest_budget() -> None:
    weights = [measured(random(4, 64))]
    # int2 of 64: 16 bytes of codes, a scale of 2, 14 of padding.
    with pytest.raises(
        BudgetError, match=r"budget=3 bits per weight: .*int8, int4, nf4, int2.* takes 4\.000, .*--codecs"
    ):
        plan(weights, SPECS, 3.0)
    assert plan(weights, SPECS, 4.0).codecs == {"w": "int2"}


@pytest.mark.parametrize("bits", [0.0, -1.0, math.nan, math.inf])
def test_a_budget_is_a_positive_number(bits: float) -> None:
    with pytest.raises(BudgetError, match=r"budget=.*positive number of bits"):
        plan([measured(random(4, 64))], SPECS, bits)


def test_nothing_to_spend_a_budget_on_is_an_error() -> None:
    with pytest.raises(BudgetError, match="no weight to spend it on"):
        plan([], SPECS, 4.0)


def test_where_no_single_codec_fits_a_mix_may() -> None:
    first = Statistics("first", 1, 8, energy=1.0, noise={"a": 0.1, "b": 0.1}, nbytes={"a": 16, "b": 32})
    second = Statistics("second", 1, 8, energy=1.0, noise={"a": 0.1, "b": 0.1}, nbytes={"a": 32, "b": 16})
    found = plan([first, second], ["a", "b"], 16.0)
    assert (found.codecs, found.uniform) == ({"first": "a", "second": "b"}, None)
