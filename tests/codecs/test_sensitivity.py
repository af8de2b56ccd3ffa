"""What codecs lose on a weight, measured in tiles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import sensitivity
from narrowcast.codecs import tiles as tiling
from narrowcast.codecs.payload import encode_rows
from narrowcast.codecs.sensitivity import Statistics, measure

SPECS = ["int8", "int4", "nf4", "int2"]


def random(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def measured(x: Tensor) -> Statistics:
    codecs = [nc.codec(spec) for spec in SPECS]
    return measure("w", x.shape[0], x.shape[1], lambda start, stop: x[start:stop], codecs)


def test_tiles_add_up_to_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE", 1000)
    x = random(50, 192)
    assert len(list(tiling.tiles(50, 192))) == 10
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
    monkeypatch.setattr(tiling, "TILE", 10)
    assert list(tiling.tiles(3, 100)) == [(0, 1), (1, 2), (2, 3)]


def test_a_weight_in_bf16_is_measured_as_the_numbers_it_holds() -> None:
    x = random(8, 64).bfloat16()
    assert measured(x).noise == measured(x.float()).noise


def test_floats_without_elements_or_with_the_largest_values_are_finite() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    assert sensitivity.is_finite(largest)
    assert sensitivity.is_finite(torch.empty(0, 3))


def test_a_weight_of_zeros_loses_nothing() -> None:
    found = measured(torch.zeros(4, 64))
    assert found.sqnr("int2") == math.inf
    assert (found.std, found.finite) == (0.0, True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_says_so(value: float) -> None:
    x = random(4, 64)
    x[2, 3] = value
    assert not measured(x).finite
    assert not sensitivity.is_finite(x)
