"""Learned rounding: the levels below or above that change a layer's output least."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.rounding.learned import learn_levels


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def correlated(count: int, features: int) -> Tensor:
    """Inputs whose features move together, as a layer's do."""
    return torch.randn(count, features // 4) @ torch.randn(features // 4, features) + 0.1 * torch.randn(count, features)


@pytest.mark.parametrize("spec", ["int4", "int3", "apot4", "nf4"])
def test_learned_rounding_beats_nearest_on_the_layers_own_output(spec: str) -> None:
    x = correlated(512, 48)
    linear = nn.Linear(48, 24)
    exact = linear(x).detach()
    nearest = copy.deepcopy(linear)
    for layer in (linear, nearest):
        nc.prepare_qat_(layer, spec, normalize=None)
    (found,) = nc.calibrate_(linear, [x[:256], x[256:]], rounding="learned").rounded
    errors = [float((layer(x) - exact).detach().square().sum()) for layer in (linear, nearest)]
    assert errors[0] < 0.7 * errors[1]
    energy = float((exact - nearest.bias.detach()).square().sum())
    assert found.learned == pytest.approx(errors[0] / energy, rel=1e-3)
    assert found.nearest == pytest.approx(errors[1] / energy, rel=1e-3)
    # Every weight is at the level below or above, and convert_ stores that.
    scale = (nearest.weight_quantizer.clip / nearest.weight_quantizer.top).view(-1, 1)
    weight = linear.quantized_weight().detach()
    gap = float(linear.weight_quantizer.levels.diff().max())
    inside = nearest.weight.abs() < nearest.weight_quantizer.clip.view(-1, 1)
    moved = (weight - nearest.weight.detach()).abs() / scale
    assert float(moved[inside].max()) <= gap * (1 + 1e-5)
    nc.convert_(linear)
    assert torch.equal(linear.decoded(), weight)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(8, 6, 3, 2, padding=2, dilation=2, groups=2), (16, 8, 9, 10)),
        (lambda: nn.Conv1d(8, 6, 3, padding="same", padding_mode="circular"), (32, 8, 20)),
    ],
)
def test_learned_rounding_knows_the_windows_of_convolutions(layer, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).cumsum(-1)  # neighbours are alike
    conv = layer()
    exact = conv(x).detach()
    nearest = copy.deepcopy(conv)
    for some in (conv, nearest):
        nc.prepare_qat_(some, "int3", normalize=None)
    (found,) = nc.calibrate_(conv, [x], rounding="learned").rounded
    errors = [float((some(x) - exact).detach().square().sum()) for some in (conv, nearest)]
    assert errors[0] < errors[1]
    assert found.learned / found.nearest == pytest.approx(errors[0] / errors[1], rel=1e-2)


def test_no_layer_of_a_model_gets_worse_and_some_get_better() -> None:
    model = network()
    nc.prepare_qat_(model, "int3", "int8", first_last=None)
    rounded = nc.calibrate_(model, [correlated(128, 16) for _ in range(2)], rounding="learned").rounded
    assert [layer.name for layer in rounded] == ["0", "2", "4"]
    assert all(layer.learned <= layer.nearest for layer in rounded)
    assert rounded[0].learned < 0.7 * rounded[0].nearest
    nc.convert_(model)


def test_a_normalized_layer_stops_normalizing_once_its_rounding_is_learned() -> None:
    linear = nn.Linear(48, 24)
    nc.prepare_qat_(linear, "int4")
    nc.calibrate_(linear, [correlated(64, 48)], rounding="learned", steps=20)
    assert linear.weight_quantizer.normalize is None
    # Weights are levels times the scale by now: the nearest levels are themselves, but for roundings.
    torch.testing.assert_close(linear.quantized_weight(), linear.weight, rtol=1e-6, atol=0)


def test_learned_rounding_sees_inputs_that_come_by_keyword() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(input=x)  # type: ignore[no-any-return]

    model = Named()
    nc.prepare_qat_(model, "int4")
    assert len(nc.calibrate_(model, [torch.randn(9, 8)], rounding="learned", steps=5).rounded) == 1


@pytest.mark.parametrize("groups", [1, 2])
def test_no_other_choice_of_one_weight_is_better_given_all_others(groups: int) -> None:
    x = torch.stack([correlated(64, 24).double() for _ in range(groups)])
    x[..., 5] = 0.0  # an input that is always zero
    moments = (x.transpose(1, 2) @ x / 64).float()
    weight, levels = torch.randn(6 * groups, 24), torch.arange(-4.0, 4.0)
    scale = weight.abs().amax(1) / 4
    result = learn_levels(weight, scale, levels, moments, steps=20)
    assert result.learned < result.nearest
    rows, scale = weight.view(groups, 6, 24).double(), scale.view(groups, 6, 1)
    chosen = (result.weight.view(groups, 6, 24) / scale).round()

    def errors(codes: Tensor) -> Tensor:
        difference = rows - (codes * scale).double()
        return ((difference @ moments.double()) * difference).sum(-1)

    best = errors(chosen)
    for column in range(24):
        for step in (-1.0, 1.0):
            other = chosen.clone()
            other[..., column] += step
            allowed = (
                ((other - rows / scale).abs() < 1)[..., column] & (other[..., column] >= -4) & (other[..., column] <= 3)
            )
            # Errors are sums of fp32 products: what differs by less than their rounding may go either way.
            assert not bool((allowed & (errors(other) < best * (1 - 1e-4))).any())
