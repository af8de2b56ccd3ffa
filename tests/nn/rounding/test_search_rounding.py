"""quantize_(rounding="search"): ordinary rows of the same bytes, less error, no data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from cases import block_size
from narrowcast.kernels.reference.search import GAIN


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_every_codec_gives_ordinary_rows(codec: nc.Codec) -> None:
    model = nn.Sequential(nn.Embedding(9, 40), nn.Linear(40, 7))
    other = copy.deepcopy(model)
    nearest, searched = nc.quantize_(other, codec), nc.quantize_(model, codec, rounding="search")
    assert [entry.bytes_after for entry in nearest.entries] == [entry.bytes_after for entry in searched.entries]
    for entry in searched.entries:
        assert entry.rounding == "search"
        # The error is the loss of the search; see tests/kernels/test_encode_searched.py for the tolerance.
        if not codec.stochastic:
            assert entry.error <= entry.nearest_error * (1 + 2.0**-17)
    tokens = torch.arange(9)
    decoded = nc.dequantize_(copy.deepcopy(model))
    torch.testing.assert_close(model(tokens), decoded(tokens), rtol=1e-4, atol=1e-5)


def test_the_report_compares_with_nearest() -> None:
    model = nn.Sequential(nn.Linear(128, 64))
    floats = model[0].weight.detach().double()
    report = nc.quantize_(model, "int4", rounding="search")
    (entry,) = report.entries
    assert entry.error < entry.nearest_error
    size = block_size(nc.codec("int4"), 128)
    exact, error = floats.view(-1, size), (floats - model[0].decoded().double()).view(-1, size)
    lacking = (error * exact).sum(1).square() / exact.square().sum(1)
    assert entry.error == pytest.approx(float((error.square().sum() + GAIN * lacking.sum()) / floats.square().sum()))
    assert "output error" in str(report)
    assert report.to_dict()["entries"][0]["rounding"] == "search"


def test_nearest_stays_as_it_was() -> None:
    model = nn.Linear(64, 8)
    other = copy.deepcopy(model)
    first, second = nc.quantize_(model, "int4"), nc.quantize_(other, "int4", rounding="nearest")
    assert torch.equal(model.weight, other.weight)
    assert first.entries == second.entries
    assert "output error" not in str(first)


@pytest.mark.parametrize("rounding", ["gtpq", None, 3])
def test_an_unknown_rounding_is_refused(rounding: object) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(nc.errors.SpecError, match="expected 'nearest', 'search', 'gptq'"):
        nc.quantize_(model, "int4", rounding=rounding)
    assert type(model) is nn.Linear


def test_a_rounding_of_ones_own() -> None:
    def coarse(weight, codec, lead, moments=None):  # type: ignore[no-untyped-def]
        return nc.codecs.payload.encode_rows(weight.round(), codec, lead=lead)

    model = nn.Linear(16, 4)
    assert nc.quantize_(model, "int8", rounding=coarse).entries[0].rounding == "coarse"
    assert float(model.decoded().abs().max()) == 0.0


def test_blocks_keep_their_size() -> None:
    """The scale of least squared error makes blocks smaller; that adds up where single errors cancel out."""
    model = nn.Linear(256, 128, bias=False)
    floats, codec = model.weight.detach().clone(), nc.codec("int3:block=64")
    plain = codec.decode(codec.encode_searched(floats), 256)
    nc.quantize_(model, codec, rounding="search")
    lacking = [1 - float((some * floats).sum() / floats.square().sum()) for some in (model.decoded(), plain)]
    assert 0 < lacking[0] < 0.75 * lacking[1]  # uniform weights here: 1.4 and 2.2%
