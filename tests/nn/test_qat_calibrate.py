"""calibrate_, its observers, and learned rounding."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import CalibrationError, QuantizeError, SpecError
from narrowcast.nn.qat.grids import codec_grid
from narrowcast.nn.qat.observers import LeastSquares, MinMax, MovingAverage, Observer, Percentile

INT8 = codec_grid("int8")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def batches(count: int = 4) -> list[Tensor]:
    return [torch.randn(32, 16) for _ in range(count)]


# -- observers --------------------------------------------------------------------------------------------------------


def seen(observer: Observer, *rows: Tensor) -> Observer:
    for some in rows:
        observer.observe(some)
    return observer


def test_min_max_remembers_the_extremes_of_every_batch() -> None:
    observer = seen(MinMax(), torch.tensor([[-1.0, 2.0], [0.0, 0.5]]), torch.tensor([[3.0, 0.0], [-9.0, 0.1]]))
    assert observer.low.tolist() == [-1.0, -9.0]
    assert observer.high.tolist() == [3.0, 0.5]
    # int8 holds -128 to 127: a clip is what 127 stands for
    assert observer.clip(INT8).tolist() == [3.0, 9.0 / 128 * 127]


def test_a_moving_average_goes_a_tenth_of_the_way() -> None:
    observer = seen(MovingAverage(), torch.tensor([[-1.0, 1.0]]), torch.tensor([[-2.0, 11.0]]))
    torch.testing.assert_close(observer.high, torch.tensor([2.0]))
    torch.testing.assert_close(observer.low, torch.tensor([-1.1]))


def test_a_percentile_is_that_of_everything_seen_within_one_bin() -> None:
    parts = [torch.randn(1, 5000) * scale for scale in (0.01, 1.0, 3.0)]
    observer = seen(Percentile(0.99), *parts)
    exact = torch.cat(parts, 1).abs().quantile(0.99)
    bin_width = float(observer.reach) * 2 / 2048  # type: ignore[arg-type]
    assert abs(float(observer.clip(INT8)) - float(exact)) <= 2 * bin_width


@pytest.mark.parametrize("spec", ["int4", "apot4", "nf4"])
def test_the_least_squares_clip_is_that_of_a_search_over_all_data(spec: str) -> None:
    made = codec_grid(spec)
    parts = [torch.randn(2, 3000) * torch.tensor([[1.0], [20.0]]) for _ in range(3)]
    clip = seen(LeastSquares(), *parts).clip(made)
    errors = []
    for factor in (1.0, 0.93, 1.07):
        quantizer = nc.nn.FakeQuantize(spec, 0, signed=True)
        quantizer.set_clip(clip * factor)
        whole = torch.cat(parts, 1)
        errors.append((quantizer(whole) - whole).detach().square().sum(1))
    assert bool((errors[0] <= errors[1]).all())
    assert bool((errors[0] <= errors[2]).all())


def test_a_histogram_counts_everything_however_its_range_grew() -> None:
    observer = seen(LeastSquares(), torch.zeros(1, 5), torch.full((1, 7), 1e-3), torch.full((1, 11), 1e5))
    assert float(observer.counts.sum()) == 23  # type: ignore[arg-type]
    assert int(observer.batches) == 3


def test_observers_keep_their_statistics_in_a_state_dict_and_go_on() -> None:
    for kind in (MinMax, MovingAverage, Percentile, LeastSquares):
        one, two = torch.randn(3, 50), torch.randn(3, 50) * 4
        whole = seen(kind(), one, two)
        resumed = kind()
        resumed.load_state_dict(seen(kind(), one).state_dict())
        seen(resumed, two)
        assert torch.equal(resumed.clip(INT8), whole.clip(INT8))
        assert torch.equal(resumed.half().low, whole.low)  # never rounded


def test_observers_refuse_what_is_not_finite_and_clips_of_nothing() -> None:
    observer = seen(MinMax(), torch.ones(1, 3))
    with pytest.raises(CalibrationError, match="batch 2"):
        observer.observe(torch.tensor([[math.inf]]))
    assert observer.high.item() == 1.0
    with pytest.raises(CalibrationError, match="no data was observed"):
        MinMax().clip(INT8)


# -- calibrate_ -------------------------------------------------------------------------------------------------------


def test_calibration_sets_every_clip_of_an_input_without_touching_weights_or_modes() -> None:
    model = network()
    nc.prepare_qat_(model, "apot4", "apot4")
    model[0].eval()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if "input" not in name}
    found = nc.calibrate_(model, batches())
    assert found.batches == 4
    assert found.quantizers == ["0.input_quantizer", "2.input_quantizer", "4.input_quantizer"]
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in weights.items())
    assert model.training
    assert not model[0].training
    assert model[2].input_quantizer.levels[0] == 0  # behind a ReLU
    assert model[0].input_quantizer.levels[0] < 0
    nc.convert_(model.eval())
    assert model(batches()[0]).isfinite().all()


def test_the_observer_decides_the_clip() -> None:
    data = batches()
    model = network()
    nc.prepare_qat_(model, "int8", "int8")
    nc.calibrate_(model, data, observer="minmax")
    whole = torch.cat(data)
    expected = max(float(whole.max()) / 127, -float(whole.min()) / 128) * 127
    assert model[0].input_quantizer.clip.item() == pytest.approx(expected, rel=1e-6)
    nc.calibrate_(model, data, observer=lambda: Percentile(0.5))
    assert model[0].input_quantizer.clip.item() < expected / 2


def test_clips_are_better_than_those_of_the_first_batch_when_batches_differ() -> None:
    data = [torch.randn(64, 16) * scale for scale in (0.2, 1.0, 2.0)]
    errors = []
    for calibrated in (True, False):
        torch.manual_seed(1)
        model = nn.Linear(16, 4)
        exact = [model(x).detach() for x in data]
        nc.prepare_qat_(model, "int8", "int4", normalize=None)
        nc.calibrate_(model, data) if calibrated else model(data[0])
        errors.append(sum(float((model(x) - y).detach().square().sum()) for x, y in zip(data, exact, strict=True)))
    assert errors[0] < errors[1] / 2


def test_batches_may_be_tuples_mappings_or_what_a_function_takes() -> None:
    x = torch.randn(8, 16)
    clips = []
    for loader, options in (
        ([x], {}),
        ([(x, "label")], {}),
        ([{"input": x}], {}),
        ([{"pixels": x}], {"forward": lambda model, batch: model(batch["pixels"])}),
        ((x for _ in range(9)), {"batches": 1}),
    ):
        torch.manual_seed(0)
        model = network()
        nc.prepare_qat_(model, "apot4", "apot4")
        assert nc.calibrate_(model, loader, **options).batches == 1
        clips.append(model[2].input_quantizer.clip)
    assert all(torch.equal(clip, clips[0]) for clip in clips)


def test_nothing_is_printed_where_there_is_no_terminal() -> None:
    code = (
        "import torch, narrowcast as nc; model = torch.nn.Linear(4, 4); nc.prepare_qat_(model, 'int4', 'int4');"
        "nc.calibrate_(model, [torch.randn(3, 4)], rounding='learned', steps=3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout + done.stderr == ""


def test_a_batch_that_fails_leaves_the_model_as_it_was() -> None:
    model = network()
    nc.prepare_qat_(model, "apot4", "apot4")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nc.calibrate_(model, [torch.randn(2, 16), torch.randn(2, 17)])
    assert model.state_dict().keys() == before.keys()
    assert not model[0].input_quantizer.collecting
    assert not model[0].input_quantizer.is_started
    assert model.training


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    ("model", "loader", "options", "error", "words"),
    [
        (network, [], {}, CalibrationError, "it gave no batch"),
        (network, torch.ones(2, 16), {}, CalibrationError, r"loader: it is a tensor, .* Give a list of batches: \["),
        (network, {"x": torch.ones(2, 16)}, {}, CalibrationError, r"loader: it is a mapping, .* a list of batches: \["),
        (Forked, [torch.ones(1, 4)], {}, CalibrationError, r"no batch reached unused\.input_quantizer"),
        (network, [torch.ones(1, 16)], {"rounding": "up"}, SpecError, "rounding='up'"),
        (network, [torch.ones(1, 16)], {"observer": "best"}, SpecError, "observer='best'"),
        (network, iter([torch.ones(1, 16)]), {"rounding": "learned"}, CalibrationError, "needs them twice"),
        (network, [torch.full((1, 16), math.nan)], {}, CalibrationError, "an infinity or a NaN"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model, loader, options, error, words) -> None:
    made = model()
    nc.prepare_qat_(made, "apot4", "apot4")
    with pytest.raises(error, match=words):
        nc.calibrate_(made, loader, **options)
    assert not any(m.is_started for n, m in made.named_modules() if n.endswith("input_quantizer"))


def test_a_float_model_is_refused() -> None:
    with pytest.raises(QuantizeError, match="prepare_qat_"):
        nc.calibrate_(network(), batches())


# -- learned rounding -------------------------------------------------------------------------------------------------


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
