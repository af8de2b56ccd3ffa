"""`inspect --budget --data`: a mix by what the model's output loses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_quantize_rounding import WORDS, run, save_bert
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.rounding.output_losses import output_sensitivity


class Two(nn.Module):
    """Two layers of one size, of which the output feels one a hundred times more."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.loud(x) + 0.01 * self.quiet(x)  # type: ignore[no-any-return]


def test_the_cost_of_an_error_is_what_the_output_loses() -> None:
    torch.manual_seed(0)
    model, data = Two(), [torch.randn(64, 32) for _ in range(8)]
    grad = [parameter.requires_grad for parameter in model.parameters()]
    costs = output_sensitivity(model, data)
    assert costs["loud.weight"] == pytest.approx(
        1e4 * costs["quiet.weight"], rel=0.1
    )  # the deviation of both is 0.8%, see below
    exact = torch.cat([model(x) for x in data]).detach()
    error = torch.randn(32, 32) * 1e-3
    model.loud.weight.data += error
    lost = float((torch.cat([model(x) for x in data]).detach() - exact).square().sum() / exact.square().sum())
    # The gradient of a layer is a sum over 64 inputs of signs times inputs; its squared length has 32 x 32 terms in
    # each of 32 probes, and deviates by sqrt(2 / 1024 / 32), 0.8%. The error's own 1024 terms deviate by
    # sqrt(2 / 1024), 4.4%, from one without direction.
    assert costs["loud.weight"] * float(error.square().sum()) == pytest.approx(lost, rel=0.2)
    assert [parameter.requires_grad for parameter in model.parameters()] == grad


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "it gave no batch"),
        ([torch.zeros(2, 32)], "zero or not finite"),
        ([torch.zeros(2, 5)], "cannot run batch 0"),
    ],
)
def test_data_that_tells_nothing_is_refused(data: list[Tensor], message: str) -> None:
    with pytest.raises(nc.errors.CalibrationError, match=message):
        output_sensitivity(Two(), data)


@pytest.mark.parametrize("bits", [3, 3.5, 4, 4.5])
def test_a_budget_on_text(tmp_path: Path, bits: float) -> None:
    bert = save_bert(tmp_path / "bert", 256)
    (tmp_path / "text.txt").write_text("\n".join(" ".join(WORDS[i : i + 9]) for i in range(12)))
    options = ["--budget", bits, "--codecs", "int8,int4,int2", "--skip", "pooler", "--json"]
    plans = {}
    for data in ([], ["--data", tmp_path / "text.txt"]):
        result = run("inspect", bert, *options, *data)
        assert result.exit_code == 0, result.output
        plans[bool(data)] = json.loads(result.stdout.splitlines()[-1])["plan"]
        assert plans[bool(data)]["bits"] <= bits
    assert plans[True]["codecs"].keys() == plans[False]["codecs"].keys()
    assert plans[True]["codecs"] != plans[False]["codecs"]


def test_text_needs_a_models_folder(tmp_path: Path) -> None:
    nc.save(nn.Linear(8, 8), tmp_path / "model.safetensors")
    result = run("inspect", tmp_path / "model.safetensors", "--budget", 4, "--data", tmp_path / "text.txt")
    assert result.exit_code == 2
    assert "needs its folder, with config.json" in " ".join(result.output.split())
