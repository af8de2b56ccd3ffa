"""calibrate_: clips from data, all of them or none."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import CalibrationError, QuantizeError, ShapeError, SpecError
from narrowcast.nn.qat.grids import codec_grid
from narrowcast.nn.qat.observers import Percentile

INT8 = codec_grid("int8")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def batches(count: int = 4) -> list[Tensor]:
    return [torch.randn(32, 16) for _ in range(count)]


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


def test_clips_that_were_set_or_loaded_stay_and_others_are_chosen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    nc.prepare_qat_(model, "int4", "apot4", first_last=None)
    batches = [torch.randn(8, 4)]
    model[2].input_quantizer.set_clip(1.25, signed=False)
    assert model[2].input_quantizer(torch.tensor([-1.0, 9.0])).tolist() == [0.0, 1.25]
    assert nc.calibrate_(model, batches).quantizers == ["0.input_quantizer", "4.input_quantizer"]
    assert model[2].input_quantizer.clip.tolist() == [1.25]
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    nc.prepare_qat_(other, "int4", "apot4", first_last=None)
    other.load_state_dict(model.state_dict())
    before = [layer.input_quantizer.clip.clone() for layer in other[::2]]
    assert nc.calibrate_(other, [10 * batches[0]]).quantizers == []
    assert all(torch.equal(a, b.input_quantizer.clip) for a, b in zip(before, other[::2], strict=True))
    assert len(nc.calibrate_(other, [10 * batches[0]], keep=False).quantizers) == 3
    assert other[2].input_quantizer.clip.tolist() != [1.25]
    assert len(nc.calibrate_(other, batches).quantizers) == 3  # these came from data, and follow new data


@pytest.mark.parametrize("clip", [0.0, -1.0, math.inf, math.nan, torch.ones(2)])
def test_a_clip_that_cannot_be_one_is_refused(clip: object) -> None:
    quantizer = nc.nn.FakeQuantize("int4", signed=True)
    with pytest.raises((SpecError, ShapeError), match=r"^clip"):
        quantizer.set_clip(clip)  # type: ignore[arg-type]
    assert not quantizer.is_started
    with pytest.raises(SpecError, match=r"signed=False: .* was made with signed=True"):
        quantizer.set_clip(1.0, signed=False)
    with pytest.raises(SpecError, match="no unsigned grid"):
        nc.nn.FakeQuantize("nf4").set_clip(1.0, signed=False)
