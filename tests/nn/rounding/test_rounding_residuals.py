"""A layer whose output is added to something is rounded so that the sum is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.rounding import sequence
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.rounding.residuals import Watched, wanted_output, watching_calls


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_residual_branch_makes_up_for_the_states_that_it_is_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mix = Model().eval(), torch.randn(8, 32)
    data = [torch.randn(64, 8) @ mix for _ in range(8)]
    judged = torch.randn(512, 8) @ mix

    def error() -> float:
        rounded = copy.deepcopy(model)
        report = nc.quantize_(rounded, "int3:block=32", rounding="gptq", data=data)
        assert all(entry.error <= entry.nearest_error for entry in report.entries)
        with torch.no_grad():
            return float((rounded(judged) - model(judged)).square().sum())

    with_sums = error()
    monkeypatch.setattr(sequence, "wanted_output", lambda now, before: before.y)
    assert with_sums < 0.8 * error()


def test_what_is_wanted_is_the_sum() -> None:
    x, y, r, changed = torch.randn(4, 3, 2)
    before, now = Watched(x, y), Watched(x, y + 1)
    before.added, now.added = r, changed
    torch.testing.assert_close(wanted_output(now, before) + changed, y + r)
    now.added = None
    assert wanted_output(now, before) is y


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x += y
    return x


ADDED = {
    "x + y": lambda x, y: x + y,
    "y + x": lambda x, y: y + x,
    "torch.add": torch.add,
    "in place": in_place,
    "dropout": lambda x, y: x + nn.functional.dropout(y, 0.5, training=False),
}
OTHERWISE = {
    "scaled": lambda x, y: torch.add(x, y, alpha=2),
    "gated": lambda x, y: x * y,
    "a number": lambda x, y: y + 1,
    "broadcast": lambda x, y: x[:1] + y,
    "read twice": lambda x, y: (x + y) * y,
    "read before": lambda x, y: (y.relu(), x + y)[1],
    "in a list": lambda x, y: torch.cat([x, y]) + 0 * (x + y).sum(),
}


@pytest.mark.parametrize("name", [*ADDED, *OTHERWISE])
def test_only_a_plain_sum_counts(name: str) -> None:
    layer, x = nn.Linear(3, 3), torch.randn(5, 3)
    with watching_calls({"layer": layer}) as calls, torch.no_grad():
        (ADDED | OTHERWISE)[name](x, layer(x))
    (call,) = calls["layer"]
    assert call.x is x
    if name in ADDED:
        assert torch.equal(call.added, x)
    else:
        assert call.added is None
    assert not layer._forward_hooks


@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 4), nn.Conv1d(6, 4, 3, groups=2, padding=1), nn.Linear(6, 4, bias=False)]
)
def test_the_error_is_that_of_the_wanted_outputs(layer: nn.Module) -> None:
    """Z - 2 V Y^T + V H V^T is the squared distance of V x from what is wanted."""
    x = torch.randn(5, 6, 7) if isinstance(layer, nn.Conv1d) else torch.randn(5, 7, 6)
    moments, other = InputMoments(layer), copy.deepcopy(layer)
    with torch.no_grad():
        wanted = layer(x) + torch.randn(layer(x).shape)
        other.weight += 0.1 * torch.randn(other.weight.shape)
        moments.add(x)
        moments.add_wanted(x, wanted)
        axes = (0, 2) if isinstance(layer, nn.Conv1d) else (0, 1)
        squares = (other(x) - wanted).square().mean(axes)
        inputs = moments.inputs(x.device)
        rows = other.weight.reshape(len(inputs), -1, inputs[0].moments.shape[-1])
        weights = layer.weight.reshape(rows.shape)
        errors = torch.cat([own.errors(w, v) for own, w, v in zip(inputs, weights, rows, strict=True)])
    torch.testing.assert_close(errors, squares, rtol=1e-4, atol=1e-5)  # fp32 moments of numbers near 1
