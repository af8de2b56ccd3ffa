"""Rounding to nearest gives the rows that the codec itself encodes, and is a `Rounding`."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from narrowcast.nn.rounding import Rounding
from narrowcast.nn.rounding.nearest import round_to_nearest


@pytest.mark.parametrize(("shape", "lead"), [((6, 40), 1), ((3, 6, 40), 2), ((6, 4, 3, 3), 1)])
def test_nearest_rounding_gives_the_rows_of_the_codec(shape: tuple[int, ...], lead: int) -> None:
    rounding: Rounding = round_to_nearest
    weight, codec = torch.randn(shape, dtype=torch.bfloat16), nc.codec("int4")
    before = weight.clone()
    rows = rounding(weight, codec, lead)
    assert torch.equal(rows.data, codec.encode(weight.flatten(lead)))
    assert (rows.shape, rows.dtype, rows.codec) == (weight.shape, weight.dtype, codec)
    assert torch.equal(weight, before)
    model = torch.nn.Sequential(torch.nn.Linear(40, 6, dtype=torch.bfloat16))
    expected = rounding(model[0].weight, codec, 1).data
    nc.quantize_(model, codec)
    assert torch.equal(model[0].weight, expected)
