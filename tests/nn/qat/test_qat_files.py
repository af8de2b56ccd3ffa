"""Converted models with quantized inputs, through files: bit for bit the same layer again, or an error in words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.checkpoint.models import state_of
from narrowcast.cli import app
from narrowcast.errors import CheckpointError, ModelMismatchError, NarrowcastError
from narrowcast.nn.qat.input_grids import adopt_inputs, quantized_inputs


class Net(nn.Module):
    """Every kind of layer that can have quantized inputs, one of them twice, two of them with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv3 = nn.Conv3d(1, 2, 1)
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).relu()
        x = self.conv2(x.unsqueeze(1)).sum(1)
        x = self.conv3(x[:, None, :, :, None]).sum((1, 4))
        return self.last(self.tied(self.again(self.first(x)).sigmoid()))


X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
PAIRS = [("apot4", "apot4"), ("int8", "int8"), ("nf4", "fp8_e4m3")]
"""Integers; integers with unsigned inputs up to 255; other grids, which are multiplied as floats."""


def converted(weights: str = "apot4", activations: str | None = "apot4", factor: float = 1.0) -> Net:
    torch.manual_seed(0)
    model = Net()
    nc.prepare_qat_(model, weights, activations, first_last=None, start="max")
    model(X * factor)
    nc.convert_(model.eval())
    return model


def empty() -> Net:
    with torch.device("meta"):
        return Net()


def on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("into", ["float", "meta", "converted", "converted on meta"])
@pytest.mark.parametrize("place", ["x.safetensors", "folder"])
def test_a_model_with_quantized_inputs_comes_back_into_any_model_like_it(
    tmp_path: Path, pair: tuple[str, str], into: str, place: str
) -> None:
    model = converted(*pair)
    nc.save(model, tmp_path / place, max_shard_size="100B")
    makers: dict[str, Callable[[], nn.Module]] = {
        "float": Net,
        "meta": empty,
        "converted": lambda: converted(*pair, factor=3.0),
        "converted on meta": lambda: on_meta(converted(*pair)),
    }
    other = nc.load(tmp_path / place, makers[into]()).eval()
    assert torch.equal(other(X), model(X))
    assert kinds(other) == kinds(model)
    assert quantized_inputs(other) == quantized_inputs(model)
    assert other.again is other.first
    assert other.tied.weight is other.first.weight
    assert not any(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
    assert not any(parameter.requires_grad for name, parameter in other.named_parameters() if "alpha" in name)


def test_what_was_loaded_is_a_converted_model_like_any_other(tmp_path: Path) -> None:
    model = converted()
    nc.save(model, tmp_path / "x.safetensors")
    other = nc.load(tmp_path / "x.safetensors", empty()).eval()
    assert torch.equal(copy.deepcopy(other)(X), model(X))
    nc.save(other, tmp_path / "y.safetensors")
    assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()
    nc.dequantize_(other)
    assert kinds(other) == kinds(Net())


def test_a_layer_that_is_the_whole_model_comes_back(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    nc.prepare_qat_(layer, "apot4", "apot4")
    layer(X)
    nc.convert_(layer.eval())
    nc.save(layer, tmp_path / "x.safetensors")
    assert torch.equal(nc.load(tmp_path / "x.safetensors", nn.Linear(8, 8))(X), layer(X))


def test_some_layers_may_have_quantized_inputs_and_others_not(tmp_path: Path) -> None:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))

    model = made()
    nc.prepare_qat_(model, "apot4", "apot4", rules={"^2$": None})
    model(X)
    nc.convert_(model.eval())
    nc.quantize_(model, "int4")
    nc.save(model, tmp_path / "x.safetensors")
    other = nc.load(tmp_path / "x.safetensors", made()).eval()
    assert kinds(other)["2"] == "Linear"
    assert quantized_inputs(other).keys() == {"0", "3"}
    assert torch.equal(other(X), model(X))


def test_a_model_in_training_comes_back_into_one_that_has_seen_no_data(tmp_path: Path) -> None:
    def prepared() -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        nc.prepare_qat_(model, "apot4", "apot4")
        return model

    model = prepared()
    model(X)
    assert not model.tied.input_quantizer.codec_grid.signed  # what it saw decided the grid
    nc.save(model, tmp_path / "x.safetensors")
    assert torch.equal(nc.load(tmp_path / "x.safetensors", prepared())(X), model(X))


def test_strict_false_takes_on_the_layers_that_are_there(tmp_path: Path) -> None:
    model = converted()
    nc.save(model, tmp_path / "x.safetensors")
    other = Net()
    del other.last
    nc.load(tmp_path / "x.safetensors", other, strict=False)
    assert quantized_inputs(other) == {k: v for k, v in quantized_inputs(model).items() if k != "last"}
    assert torch.equal(other.first(X), model.first(X))


def test_inspect_reads_such_a_file(tmp_path: Path) -> None:
    nc.save(converted(), tmp_path / "x.safetensors")
    run = CliRunner().invoke(app, ["inspect", str(tmp_path / "x.safetensors"), "--json"])
    assert run.exit_code == 0, run.output
    weights = {weight["name"]: weight["codec"] for weight in json.loads(run.stdout)["weights"]}
    assert weights == {
        f"{name}.weight": "apot4:block=row,scale=fp32" for name in ("conv1", "conv2", "conv3", "first", "last")
    }


# -- what does not fit ------------------------------------------------------------------------------------------------


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; what quantizers say beside them is made anew each time."""
    return {key: value for key, value in model.state_dict(keep_vars=True).items() if not key.endswith("_extra_state")}


def refused(path: Path, model: nn.Module, *words: str, strict: bool = True) -> None:
    """The file is refused in these words, and the model is as it was."""
    before = kinds(model), {name: (id(v), v._version) for name, v in stored_tensors(model).items()}
    with pytest.raises(NarrowcastError) as caught:
        nc.load(path, model, strict=strict)
    assert isinstance(caught.value, ModelMismatchError) or not strict
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    after = kinds(model), {name: (id(v), v._version) for name, v in stored_tensors(model).items()}
    assert after == before


def test_models_that_quantize_inputs_otherwise_are_refused(tmp_path: Path) -> None:
    nc.save(converted(), tmp_path / "x.safetensors")
    path = tmp_path / "x.safetensors"
    said = "but 'apot4', signed=True in the file. Load into the float model"
    refused(path, converted(activations="int4"), "inputs of 'conv1' are 'int4', signed=True in the model", said)
    refused(path, converted(activations=None), "inputs of 'conv1' are not quantized in the model", said)
    other = converted()
    other.conv1.input_quantizer.signed = False
    other.conv1.input_quantizer.choose_grid(0.0)
    refused(path, other, "inputs of 'conv1' are 'apot4', signed=False in the model", said)


def test_a_model_in_training_is_refused(tmp_path: Path) -> None:
    nc.save(converted(), tmp_path / "x.safetensors")
    model = Net()
    nc.prepare_qat_(model, "apot4", "apot4", first_last=None)
    refused(tmp_path / "x.safetensors", model, "weight_quantizer.alpha", "missing from the file")
    refused(
        tmp_path / "x.safetensors",
        model,
        "quantized inputs belong to a packed Linear or convolution",
        "a QatConv1d",
        strict=False,
    )


def test_a_file_without_quantized_inputs_does_not_go_into_a_model_with_them(tmp_path: Path) -> None:
    nc.save(converted(activations=None), tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", converted(), "conv1.input_quantizer.alpha", "missing from the file")


def test_a_file_that_was_saved_from_a_state_dict_goes_into_the_same_model_only(tmp_path: Path) -> None:
    model = converted()
    nc.save(state_of(model), tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", Net(), "does not say on which grid", "converted the same way")
    other = converted(factor=3.0)
    assert torch.equal(nc.load(tmp_path / "x.safetensors", other)(X), model(X))
    words = "another grid, with 15 levels", "this one is 'int4', with 16 from -8 to 7", "The model is as it was"
    refused(tmp_path / "x.safetensors", converted(activations="int4"), *words)


def test_metadata_that_lies_about_inputs_is_refused(tmp_path: Path) -> None:
    model = converted()
    codec = nc.codec("apot4")
    state = state_of(model)

    def saved(state: dict, **inputs: tuple[nc.Codec, bool]) -> Path:
        nc.checkpoint.save_state(state, tmp_path / "x.safetensors", inputs=inputs)
        return tmp_path / "x.safetensors"

    with pytest.raises(CheckpointError, match=r"inputs of 'gone' need .*a tensor 'gone.input_quantizer.alpha'"):
        nc.load(saved(state, gone=(codec, True)), Net())
    own = quantized_inputs(model)
    # A grid that has other levels than the file, a codec that has none, and a layer that is no packed one.
    refused(saved(state, **{**own, "conv1": (codec, False)}), Net(), "conv1.input_quantizer.levels")
    with pytest.raises(NarrowcastError, match="a plain cast has no scale to learn"):
        nc.load(saved(state, **{**own, "conv1": (nc.codec("bf16"), True)}), Net())
    plain = {name: value for name, value in state.items() if name != "last.weight"}
    plain["last.weight"] = Net().last.weight.detach()
    with pytest.raises(
        NarrowcastError, match=r"'last'.*belong to a packed Linear or convolution, and the model has a Lin"
    ):
        nc.load(saved(plain, **own), Net())


def test_adopting_inputs_changes_nothing_where_one_does_not_fit() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    nc.quantize_(model, "apot4:block=row,scale=fp32")
    with pytest.raises(NarrowcastError, match=r"^'1': .*the model has a ReLU there"):
        adopt_inputs(model, {"0": (nc.codec("apot4"), True), "1": (nc.codec("apot4"), True)})
    with pytest.raises(NarrowcastError, match=r"^'2': .*the model has nothing there"):
        adopt_inputs(model, {"0": (nc.codec("apot4"), True), "2": (nc.codec("apot4"), True)})
    assert type(model[0]) is nc.nn.Linear
