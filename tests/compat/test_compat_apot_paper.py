"""Checkpoints of the paper's own code: the formulas of that code, layer by layer, on a small network of its form."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.compat.apot.paper import import_checkpoint_
from narrowcast.errors import SpecError, StateDictError


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.block(x).relu().mean((2, 3)))


def checkpoint_of(lowest: float = 1.0) -> dict[str, Any]:
    """What torch.load gives: names of nn.DataParallel, one clip for weights and one for inputs of the layer within."""
    torch.manual_seed(0)
    state = {f"module.{key}": torch.randn_like(value.float()) for key, value in Network().state_dict().items()}
    for key in [key for key in state if key.endswith("running_var")]:
        state[key] = state[key].abs() + 0.5
    state = {key: value.long() if key.endswith("tracked") else value for key, value in state.items()}
    state["module.fc.weight"] = state["module.fc.weight"].clamp(-1, 1)
    state["module.fc.weight"][0, 0] = -lowest
    state["module.block.0.weight_quant.wgt_alpha"] = torch.tensor(1.7)
    state["module.block.0.act_alpha"] = torch.tensor(1.3)
    return {"epoch": 1, "state_dict": state, "best_prec": 50.0, "optimizer": {}}


def grid_of(bits: int) -> Tensor:
    """The paper's levels up to 1."""
    if bits == 1:
        return torch.tensor([0.0, 1.0])
    terms = {2: [[0, 0.5, 0.25, 0.125]], 3: [[0, 0.5, 0.25, 0.0625], [0, 0.125]]}
    terms[4] = [[0, 0.5, 0.125, 0.03125], [0, 0.25, 0.0625, 0.015625]]
    levels = torch.tensor([0.0])
    for term in terms[bits]:
        levels = (levels.view(-1, 1) + torch.tensor(term)).flatten()
    return levels.unique() / levels.max()


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    return levels[(x.unsqueeze(-1) - levels).abs().argmin(-1)]


def papers_forward(state: dict[str, Tensor], x: Tensor, bits: int) -> Tensor:
    """The paper's formulas, written out: normalized weights, n - 1, no deviation multiplied back."""
    state = {key.removeprefix("module."): value for key, value in state.items()}

    def eight(weight: Tensor) -> Tensor:
        return (weight / weight.max() * 127).round() / 127 * weight.max()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.batch_norm(x, *(state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")))

    x = norm(F.conv2d(x, eight(state["conv1.weight"]), padding=1), "bn1").relu()
    weight, clip, reach = state["block.0.weight"], state["block.0.weight_quant.wgt_alpha"], state["block.0.act_alpha"]
    weight = ((weight - weight.mean()) / weight.std() / clip).clamp(-1, 1)
    weight = nearest(weight.abs(), grid_of(bits - 1)) * weight.sign() * clip
    x = norm(F.conv2d(nearest((x / reach).clamp(max=1), grid_of(bits)) * reach, weight, None, 2, 1), "block.1").relu()
    return F.linear(x.mean((2, 3)), eight(state["fc.weight"]), state["fc.bias"])


@pytest.mark.parametrize("lowest", [1.0, 1.5])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_an_imported_checkpoint_computes_what_the_papers_code_does_trained_and_packed(
    bits: int, lowest: float, tmp_path: Path
) -> None:
    checkpoint, model = checkpoint_of(lowest), Network().eval()
    report = import_checkpoint_(model, checkpoint, bits)
    assert [entry.name for entry in report.entries] == ["conv1.weight", "block.0.weight", "fc.weight"]
    x = torch.randn(64, 3, 8, 8)
    expected = papers_forward(checkpoint["state_dict"], x, bits)
    assert model.conv1.input_quantizer is None
    assert model.fc.input_quantizer is None
    # A number within rounding of a threshold may go the other way: that moves outputs of its image alone.
    same = (model(x) - expected).abs().amax(1) <= 1e-4 * expected.abs().max()
    assert int(same.sum()) >= 62
    assert nc.calibrate_(model, [x]).quantizers == []  # every clip is there, and stays
    assert float(model.block[0].input_quantizer.clip) == pytest.approx(1.3)
    trained = model(x)
    nc.convert_(model)
    assert type(model.block[0]).__name__ == "IntegerConv2d"
    assert int(((model(x) - trained).abs().amax(1) <= 1e-4 * trained.abs().max()).sum()) >= 62
    nc.save(model, tmp_path / "packed.safetensors")
    loaded = Network().eval()
    nc.load(tmp_path / "packed.safetensors", loaded)
    assert torch.equal(loaded(x), model(x))


def test_an_imported_model_trains_on() -> None:
    model = Network()
    import_checkpoint_(model, checkpoint_of()["state_dict"], 4)
    optimizer = torch.optim.SGD(nc.parameter_groups(model, alpha_lr=1e-3), lr=1e-3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(16, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_float_checkpoint_has_eight_bits_at_its_ends_alone() -> None:
    checkpoint, model = checkpoint_of(), Network().eval()
    state = {key: value for key, value in checkpoint["state_dict"].items() if "alpha" not in key}
    report = import_checkpoint_(model, state, 32)
    assert [entry.name for entry in report.entries] == ["conv1.weight", "fc.weight"]
    assert type(model.block[0]) is nn.Conv2d


def clips_of(state: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
    """A state with clips of one layer more."""
    names = (f"module.{layer}.weight_quant.wgt_alpha", f"module.{layer}.act_alpha")
    return {**state, **{name: torch.tensor(1.5) for name in names}}


def test_what_does_not_fit_is_refused_and_the_model_stays_as_it_was() -> None:
    checkpoint, model = checkpoint_of(), Network()
    before = copy.deepcopy(model.state_dict())
    state = checkpoint["state_dict"]
    without_clip = {key: value for key, value in state.items() if not key.endswith("act_alpha")}
    shorter = {**state, "module.fc.bias": torch.zeros(3)}
    for given, bits, error, message in [
        (checkpoint, 6, SpecError, "bits=6"),
        (checkpoint, 32, SpecError, "bits=32: the checkpoint has 1 layers with clips"),
        ({key: value for key, value in state.items() if "alpha" not in key}, 4, SpecError, "bits=4"),
        (without_clip, 4, StateDictError, "block.0.act_alpha"),
        (shorter, 4, StateDictError, "differ in fc.bias"),
        ({**state, "module.more": torch.zeros(1)}, 4, StateDictError, "differ in more"),
        ({"state_dict": 3}, 4, StateDictError, "checkpoint: expected what torch.load gives"),
        (None, 4, StateDictError, "checkpoint: expected what torch.load gives"),
        ({**state, "module.block.0.act_alpha": torch.ones(2)}, 4, StateDictError, "block.0.act_alpha is"),
        ({**state, "module.block.0.weight_quant.wgt_alpha": -torch.ones(1)}, 4, StateDictError, "wgt_alpha is"),
        (clips_of(state, "fc"), 4, StateDictError, "it has clips of fc, .*first and the last one, conv1 and fc"),
        (clips_of(state, "block.7"), 4, StateDictError, "it has clips of block.7"),
        ({**state, "module.fc.weight": -torch.ones(4, 8)}, 4, StateDictError, "fc.weight has 127 steps"),
        (
            {**state, "module.conv1.weight": state["module.conv1.weight"] * math.nan},
            4,
            StateDictError,
            "all weights fini",
        ),
    ]:
        with pytest.raises(error, match=message):
            import_checkpoint_(model, given, bits)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert type(model.fc) is nn.Linear
