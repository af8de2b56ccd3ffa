"""The report of quantize_: bytes, noise, and how they are shown."""

from __future__ import annotations

import copy
import json
import math
import re

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.nn import noise


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_bytes_and_noise_are_what_they_are() -> None:
    model = nn.Sequential(nn.Linear(300, 70))
    weight = model[0].weight.detach().clone()
    entry = nc.quantize_(model, "int4").entries[0]
    assert (entry.name, entry.kind, entry.shape, entry.codec) == ("0.weight", "Linear", (70, 300), "int4")
    assert (entry.bytes_before, entry.bytes_after) == (weight.numel() * 4, model[0].weight.numel())
    noise = (model[0].decoded() - weight).double().square().sum()
    expected = 10 * math.log10(float(weight.double().square().sum() / noise))
    # A row's sum of 300 squares in fp32 is off by at most 300 * 2**-24 of it: 8e-5 dB.
    assert entry.sqnr == pytest.approx(expected, abs=1e-4)
    assert 15 < expected < 30


def test_noise_is_summed_over_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(30, 70))
    other = copy.deepcopy(model)
    whole = nc.quantize_(model, "int4").entries[0].sqnr
    monkeypatch.setattr(noise, "TILE", 100)
    assert nc.quantize_(other, "int4").entries[0].sqnr == pytest.approx(whole, abs=1e-9)  # the same rows


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_noise_of_weights_whose_squares_fp32_does_not_hold(size: float) -> None:
    models = [nn.Sequential(nn.Linear(300, 8)) for _ in range(2)]
    with torch.no_grad():
        models[1][0].weight.copy_(models[0][0].weight * 2.0 ** round(math.log2(size)))  # a power of two: the same codes
    first, second = (nc.quantize_(model, "int4:scale=fp32").entries[0].sqnr for model in models)
    assert first == pytest.approx(second, abs=1e-6)


def test_nothing_lost_is_exact_and_zeros_are_too() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    report = nc.quantize_(model, "raw", rules={"1": "int8"})
    assert [entry.sqnr for entry in report.entries] == [math.inf, math.inf]
    assert str(report).count("exact") == 2


def test_the_table_is_aligned_and_the_dictionary_plain() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "long_name": nn.Embedding(100, 64), "rnn": nn.RNNCell(4, 4)})
    report = nc.quantize_(model, "int8")
    lines = str(report).splitlines()
    assert re.split(r"\s{2,}", lines[0]) == ["weight", "kind", "shape", "codec", "before", "after", "SQNR"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3] == "2 weights encoded: 42 kB -> 13.1 kB, 3.20x smaller"
    assert lines[4] == "2 weights left as they were:"
    again = json.loads(json.dumps(report.to_dict()))
    assert again["bytes_before"] == report.bytes_before == (64 + 100) * 64 * 4
    assert again["bytes_after"] == report.bytes_after == (64 + 100) * nc.codec("int8").row_bytes(64)
    assert again["entries"][1]["name"] == "long_name.weight"
    assert again["skips"][0] == {"name": "rnn.weight_ih", "reason": "torch.nn.RNNCell has no encoded form"}
