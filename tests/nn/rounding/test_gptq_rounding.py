"""quantize_(rounding="gptq"): what the data's outputs lose, on every kind of layer and in every codec."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.rounding.gptq import GPTQ, factor_of_inverse
from narrowcast.nn.rounding.moments import Inputs


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def correlated(count: int, features: int) -> Tensor:
    """Inputs whose features move together, as a layer's do."""
    return torch.randn(count, features // 4) @ torch.randn(features // 4, features) + 0.1 * torch.randn(count, features)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0] * scale
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, scale=1.0)
        return self.head(x)  # type: ignore[no-any-return]


def batches(count: int = 4) -> list[Tensor]:
    return [torch.randint(0, 40, (4, 12)) for _ in range(count)]


def test_every_codec_gives_ordinary_rows_and_no_output_gets_worse(codec: nc.Codec) -> None:
    if codec.stochastic:
        pytest.skip("encode draws, and a draw may be lucky")
    linear, x = nn.Linear(40, 12), correlated(200, 40)
    weight = linear.weight.detach().clone()
    report = nc.quantize_(linear, codec, rounding="gptq", data=[x])
    assert report.entries[0].bytes_after == 12 * codec.row_bytes(40)
    assert report.entries[0].rounding == "gptq"
    inputs = Inputs((x.t() @ x) / len(x))
    decoded = codec.decode(codec.encode(weight), 40), linear.decoded(torch.float32)
    nearest, chosen = (inputs.errors(weight, rounded) for rounded in decoded)
    # What is compared inside is the same product with moments that were summed in fp64.
    assert bool((chosen <= nearest * (1 + 1e-3) + 1e-9).all())
    torch.testing.assert_close(linear(x), x @ linear.decoded().t() + linear.bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", ["int4", "int3", "nf4", "int4:zero_point=true", "int4:block=row"])
@pytest.mark.parametrize("act_order", [True, False])
def test_it_beats_nearest_by_far_where_inputs_are_correlated(spec: str, act_order: bool) -> None:
    linear, x = nn.Linear(128, 32), correlated(1024, 128)
    nearest, exact = copy.deepcopy(linear), linear(x).detach()
    nc.quantize_(nearest, spec)
    (entry,) = nc.quantize_(linear, spec, rounding=GPTQ(act_order=act_order), data=[x[:512], x[512:]]).entries
    errors = [float((layer(x) - exact).detach().square().sum()) for layer in (linear, nearest)]
    assert errors[0] < 0.5 * errors[1]
    energy = float((exact - linear.bias.detach()).square().sum())
    assert entry.error == pytest.approx(errors[0] / energy, rel=1e-2)
    assert entry.nearest_error == pytest.approx(errors[1] / energy, rel=1e-2)


def test_a_model_is_rounded_block_by_block() -> None:
    model, data = Model().eval(), batches()
    tokens = torch.randint(0, 40, (16, 12))
    exact = model(tokens).detach()
    errors = {}
    for rounding in ("nearest", "search", "gptq"):
        rounded = copy.deepcopy(model)
        report = nc.quantize_(rounded, "int4:block=16", rounding=rounding, data=iter(data))
        errors[rounding] = float((rounded(tokens) - exact).detach().square().sum())
    assert errors["gptq"] < errors["nearest"]
    names = {entry.name: entry.rounding for entry in report.entries}
    assert names.pop("embedding.weight") == "search"
    assert set(names.values()) == {"gptq"}
    assert len(names) == 3 * 4 + 1
    assert "an embedding: its rows are looked up" in str(report)
    assert list(names) == [name for name, _ in model.named_parameters() if name in names]  # in the order of the model


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(8, 6, 3, 2, padding=2, dilation=2, groups=2), (16, 8, 9, 10)),
        (lambda: nn.Conv1d(8, 6, 3, padding="same", padding_mode="circular"), (32, 8, 20)),
    ],
)
def test_convolutions(layer, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(shape).cumsum(-1)  # neighbours are alike
    conv = layer()
    exact, nearest = conv(x).detach(), copy.deepcopy(conv)
    nc.quantize_(nearest, "int3:block=8")
    nc.quantize_(conv, "int3:block=8", rounding="gptq", data=[x])
    errors = [float((some(x) - exact).detach().square().sum()) for some in (conv, nearest)]
    assert errors[0] < errors[1]


def test_queries_keys_and_values_have_inputs_of_their_own() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, 3 * x.flip(-1), x.abs())[0]  # type: ignore[no-any-return]

    model = Cross().eval()
    report = nc.quantize_(model, "int4:block=16", rounding="gptq", data=[torch.randn(4, 9, 16)])
    assert [entry.rounding for entry in report.entries] == ["gptq", "gptq"]
    assert all(entry.error <= entry.nearest_error for entry in report.entries)


def test_experts_with_few_inputs_are_rounded_by_search() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            parts = x[:40], x[40:80], x[80:83]
            return torch.cat([nn.functional.linear(part, self.up[e]) for e, part in enumerate(parts)])

    report = nc.quantize_(Experts(), "int4:block=16", rounding="gptq", data=[correlated(83, 16)])
    (entry,) = report.entries
    assert entry.rounding == "gptq"
    assert "by search for 1 of 3 experts (2), with fewer than 16 inputs" in entry.note
    assert entry.note in str(report)


def test_a_layer_that_no_batch_reaches_is_rounded_by_search_and_says_so() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.steps = nn.Linear(8, 8), nn.Linear(8, 8), nn.LSTM(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.steps(self.used(x))[0]  # type: ignore[no-any-return]

    notes = {
        e.name: (e.rounding, e.note) for e in nc.quantize_(Unused(), rounding="gptq", data=[torch.randn(9, 8)]).entries
    }
    assert notes["used.weight"] == ("gptq", "")
    assert notes["unused.weight"] == ("search", "no batch reached it")
    assert notes["steps.weight_ih_l0"] == ("search", "a recurrent layer: its steps are not followed")


def test_dead_inputs_and_inputs_of_one_direction() -> None:
    x = torch.zeros(64, 32)
    x[:, 3] = 1.0
    x[:, 7] = 2.0
    assert bool(factor_of_inverse(x.t() @ x, 0.01).isfinite().all())
    assert bool(factor_of_inverse(torch.zeros(4, 4), 0.01).isfinite().all())
    linear = nn.Linear(32, 8)
    weight = linear.weight.detach().clone()
    nc.quantize_(linear, "int8", rounding="gptq", data=[x])
    dead = [place for place in range(32) if place not in (3, 7)]
    nearest = nc.codec("int8").decode(nc.codec("int8").encode(weight), 32)
    errors = [float((decoded - weight)[:, dead].square().sum()) for decoded in (linear.decoded(), nearest)]
    assert errors[0] <= 2 * errors[1]  # their weights are not given up for those of the others
    zeros = nn.Linear(32, 8)
    assert nc.quantize_(zeros, "int4", rounding="gptq", data=[torch.zeros(5, 32)]).entries[0].error == 0.0


def test_modes_and_hooks_are_as_they_were() -> None:
    model = Model().train()
    calls: list[int] = []
    handle = model.head.register_forward_hook(lambda *_: calls.append(1))
    nc.quantize_(model, "int4:block=16", rounding="gptq", data=batches(1))
    assert all(module.training for module in model.modules())
    count = len(calls)
    handle.remove()
    model(batches(1)[0])
    assert len(calls) == count
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("options", [{"act_order": 1}, {"damping": 0.0}, {"damping": "much"}])
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(nc.errors.SpecError, match=next(iter(options))):
        GPTQ(**options)  # type: ignore[arg-type]
