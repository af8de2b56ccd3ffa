"""Recurrent layers on encoded rows: torch's own arithmetic on the decoded weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured

import narrowcast as nc

KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bias": False, "proj_size": 16}),
    (nn.GRU, {"bidirectional": True}),
    (nn.RNN, {"num_layers": 2, "batch_first": True}),
]
X = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0))


def layer(kind: type[nn.RNNBase], options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"rnn": kind(32, 64, **options)})


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_a_recurrent_layer_computes_what_its_decoded_weights_compute(
    kind: type[nn.RNNBase], options: dict[str, Any], tmp_path: Path
) -> None:
    model = layer(kind, options)
    plain = copy.deepcopy(model)
    report = nc.quantize_(model, "int4")
    assert {entry.name for entry in report.entries} == {n for n, p in plain.named_parameters() if p.dim() == 2}
    assert report.skips == []
    found = model["rnn"](X)[0]
    assert "_flat_weights" not in vars(model["rnn"])  # which would hold the floats
    assert torch.equal(nc.dequantize_(copy.deepcopy(model))["rnn"](X)[0], found)
    assert torch.equal(pickle.loads(pickle.dumps(model))["rnn"](X)[0], found)
    nc.save(model, tmp_path / "x.safetensors")
    assert torch.equal(nc.load(tmp_path / "x.safetensors", copy.deepcopy(plain))["rnn"](X)[0], found)
    assert model.to(torch.bfloat16)["rnn"](X.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("change", [nn.utils.weight_norm, nn.utils.spectral_norm, partial(l1_unstructured, amount=0.5)])
def test_a_layer_one_of_whose_weights_is_computed_is_left_as_it_is(change: Callable[..., Any]) -> None:
    model = layer(nn.LSTM, {}).eval()
    change(model["rnn"], name="weight_hh_l0")
    before = model["rnn"](X)[0]
    report = nc.quantize_(model, "int8")
    assert report.entries == []
    assert {skip.reason for skip in report.skips} == {
        "its weight is computed from other parameters (weight_norm, pruning)"
    }
    assert torch.equal(model["rnn"](X)[0], before)


def test_a_gradient_passes_to_the_input_and_to_biases() -> None:
    model = layer(nn.GRU, {})
    nc.quantize_(model, "int8")
    x = X.clone().requires_grad_()
    model["rnn"](x)[0].sum().backward()
    assert x.grad is not None
    assert model["rnn"].bias_ih_l0.grad is not None


def test_a_dequantized_layer_trains_again() -> None:
    model = layer(nn.LSTM, {})
    nc.quantize_(model, "int8")
    rnn = nc.dequantize_(model)["rnn"]
    assert type(rnn) is nn.LSTM
    assert all(w is rnn._parameters[n] for w, n in zip(rnn._flat_weights, rnn._flat_weights_names, strict=True))
    before = rnn(X)[0]
    rnn(X)[0].sum().backward()
    torch.optim.SGD(rnn.parameters(), 0.1).step()
    assert not torch.equal(rnn(X)[0], before)


def test_rules_name_a_layer_or_one_of_its_matrices() -> None:
    model = layer(nn.LSTM, {})
    report = nc.quantize_(model, "int8", rules={"weight_hh": None})
    assert [entry.name for entry in report.entries] == ["rnn.weight_ih_l0"]


def test_quantize_of_a_file_encodes_the_same_matrices(tmp_path: Path) -> None:
    from narrowcast.checkpoint.conversion import open_conversion

    model = layer(nn.GRU, {"bidirectional": True})
    nc.save(model, tmp_path / "x.safetensors")
    conversion = open_conversion(tmp_path / "x.safetensors", tmp_path / "y.safetensors", "int4")
    conversion.convert(conversion.parts[0])
    loaded = nc.load(tmp_path / "y.safetensors", layer(nn.GRU, {"bidirectional": True}))
    nc.quantize_(model, "int4")
    assert torch.equal(loaded["rnn"](X)[0], model["rnn"](X)[0])
