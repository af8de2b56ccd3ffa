"""What a state dict carries beside tensors: the codec of rows, and all that a quantizer's results depend on."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import DtypeError, StateDictError
from narrowcast.nn.state import KEY


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 8, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.up[1])


KINDS = {
    "linear": lambda: nn.Linear(64, 8),
    "embedding": lambda: nn.Embedding(9, 64),
    "convolution": lambda: nn.Conv1d(16, 8, 4),
    "attention": lambda: nn.MultiheadAttention(64, 2),
    "experts": Experts,
}


def through_pickle(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def through_safetensors(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "state.safetensors")
    return load_file(folder / "state.safetensors")


WAYS = {
    "as it is": lambda state, folder: state,
    "a plain dict": lambda state, folder: {key: value.clone() for key, value in state.items()},
    "torch.save": through_pickle,
    "safetensors": through_safetensors,
}


# -- the codec of rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_another_codec_with_the_same_width_are_refused_by_both_names(
    kind: str, way: str, tmp_path: Path
) -> None:
    one, other = nn.Sequential(KINDS[kind]()), nn.Sequential(KINDS[kind]())
    nc.quantize_(one, "int4")
    nc.quantize_(other, "nf4")
    before = copy.deepcopy(other.state_dict())
    state = WAYS[way](one.state_dict(), tmp_path)
    with pytest.raises(StateDictError, match=r"held as rows of codec 'nf4'.*the state dict has rows of codec 'int4'"):
        other.load_state_dict(state)
    with pytest.raises(StateDictError, match=r"'nf4'.*'int4'"):
        other[0].load_state_dict({key.removeprefix("0."): value for key, value in state.items()}, strict=False)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    again = nn.Sequential(KINDS[kind]())
    nc.quantize_(again, "int4")
    again.load_state_dict(WAYS[way](one.state_dict(), tmp_path))
    assert all(torch.equal(value, one.state_dict()[key]) for key, value in again.state_dict().items())


def test_rows_of_another_weight_with_the_same_width_are_refused() -> None:
    one, other = nn.Linear(61, 8), nn.Linear(62, 8)
    for layer in (one, other):
        nc.quantize_(layer, "int8:block=row")
    assert one.weight.shape == other.weight.shape
    with pytest.raises(StateDictError, match=r"a weight of \[8, 62\].*has rows .* of \[8, 61\]"):
        other.load_state_dict(one.state_dict())
    flat, tall = nn.Conv2d(4, 8, (1, 3)), nn.Conv2d(4, 8, (3, 1))
    for layer in (flat, tall):
        nc.quantize_(layer, "int8")
    with pytest.raises(StateDictError, match=r"\[8, 4, 3, 1\].*\[8, 4, 1, 3\]"):
        tall.load_state_dict(flat.state_dict())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_from_before_codecs_were_in_it_loads(kind: str, strict: bool) -> None:
    one, other = nn.Sequential(KINDS[kind]()), nn.Sequential(KINDS[kind]())
    for model in (one, other):
        nc.quantize_(model, "int4")
    old = {key: value for key, value in one.state_dict().items() if not key.endswith(KEY)}
    assert not [*other.load_state_dict(old, strict=strict).missing_keys]
    assert all(torch.equal(value, one.state_dict()[key]) for key, value in other.state_dict().items())


def test_rows_do_not_go_into_a_float_model_of_the_same_shapes() -> None:
    one, other = nn.Linear(64, 8), nn.Linear(64, 8)
    nc.quantize_(one, "fp8_e4m3:scale=none")
    with pytest.raises(RuntimeError, match=KEY):
        other.load_state_dict(one.state_dict())


def test_an_extra_state_that_is_none_of_ours_is_refused_in_words() -> None:
    layer = nn.Linear(8, 8)
    nc.quantize_(layer)
    for wrong in (torch.zeros(64), torch.zeros(64, dtype=torch.uint8), {"a": 1}):
        with pytest.raises(StateDictError, match=r"'_extra_state'.*expected what narrowcast writes"):
            layer.load_state_dict({**layer.state_dict(), KEY: wrong})


def test_experts_with_an_extra_state_of_their_own_are_left() -> None:
    class Own(Experts):
        def get_extra_state(self) -> Tensor:
            return torch.ones(1)

    (skip,) = nc.quantize_(nn.Sequential(Own())).skips
    assert "Own has an extra state of its own" in skip.reason


def test_files_hold_a_codec_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    nc.quantize_(model, "int4")
    nc.save(model, tmp_path / "x.safetensors")
    assert set(load_file(tmp_path / "x.safetensors")) == {"0.weight", "0.bias"}
    assert nc.load(tmp_path / "x.safetensors", nn.Sequential(nn.Linear(64, 8)))[0].codec == nc.codec("int4")


# -- rows stay bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_casts_of_a_module_leave_its_rows(kind: str) -> None:
    model = nn.Sequential(KINDS[kind]())
    nc.quantize_(model, "int4")
    rows = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    for cast in (
        lambda: model.type(torch.float64),
        lambda: model.to(torch.bfloat16),
        model.half,
        lambda: model.type(torch.float32),
        model.float,
    ):
        cast()
        assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in rows.items())
    assert next(iter(nc.nn.encodings(model).values())).dtype == torch.float32
    model.type(torch.float64)
    assert next(iter(nc.nn.encodings(model).values())).dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.int64])
def test_rows_that_are_no_bytes_any_more_are_refused(kind: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(KINDS[kind]())
    nc.quantize_(model, "int4")
    for parameter in model.parameters():
        if parameter.dtype == torch.uint8:
            parameter.data = parameter.data.to(dtype)
    x = torch.tensor([1, 2]) if kind == "embedding" else torch.randn(3, 16, 9) if kind == "convolution" else None
    x = torch.randn(3, 64) if x is None else x
    with pytest.raises(DtypeError, match=r"encoded rows are uint8, and these are .*model\.to\(dtype\)"):
        model[0](x, x, x) if kind == "attention" else model(x)


def test_the_operands_of_an_integer_layer_are_never_cast() -> None:
    layer, x = nn.Linear(12, 4), torch.randn(5, 12)
    nc.prepare_qat_(layer, "int8", "int8")
    nc.calibrate_(layer, [x])
    nc.convert_(layer.eval())
    y = layer(x)
    assert torch.equal(layer.type(torch.float64).type(torch.float32)(x), y)
    layer.half().float()
    assert layer.weight_integers.dtype == torch.int8


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(nn.Conv1d, torch.channels_last), (nn.Conv2d, torch.channels_last), (nn.Conv2d, torch.channels_last_3d)],
)
def test_the_operands_of_an_integer_convolution_lie_as_they_do_in_any_memory_format(
    kind: type[nn.Module], layout: torch.memory_format
) -> None:
    layer, x = kind(6, 4, 3), torch.randn(2, 6, 9) if kind is nn.Conv1d else torch.randn(2, 6, 9, 9)
    nc.prepare_qat_(layer, "int8", "int8")
    nc.calibrate_(layer, [x])
    nc.convert_(layer.eval())
    y, integers = layer(x), layer.weight_integers
    layer.to(memory_format=layout)
    assert layer.weight_integers.is_contiguous()
    assert torch.equal(layer.weight_integers, integers)
    assert torch.equal(layer(x), y)
    assert layer.share_memory().weight_integers.is_shared()


# -- quantizers --------------------------------------------------------------------------------------------------------


def trained(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))


def batches() -> list[Tensor]:
    torch.manual_seed(9)
    return [torch.randn(32, 16) for _ in range(3)]


@pytest.mark.parametrize("way", WAYS)
def test_learned_rounding_survives_a_state_dict(way: str, tmp_path: Path) -> None:
    model, x = trained(), batches()[0]
    nc.prepare_qat_(model, "apot4", "int8")
    nc.calibrate_(model, batches(), rounding="learned", steps=30)
    fresh = trained(1)
    nc.prepare_qat_(fresh, "apot4", "int8")
    fresh.load_state_dict(WAYS[way](model.state_dict(), tmp_path))
    assert torch.equal(fresh.eval()(x), model.eval()(x))
    nc.convert_(model)
    nc.convert_(fresh)
    assert torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("meta", [False, True])
def test_learned_rounding_survives_a_file(meta: bool, tmp_path: Path) -> None:
    model, x = trained(), batches()[0]
    nc.prepare_qat_(model, "apot4", "int8")
    nc.calibrate_(model, batches(), rounding="learned", steps=30)
    nc.save(model, tmp_path / "x.safetensors")
    fresh = trained(1).to("meta") if meta else trained(1)
    nc.prepare_qat_(fresh, "apot4", "int8")
    nc.load(tmp_path / "x.safetensors", fresh)
    assert torch.equal(fresh.eval()(x), model.eval()(x))


def test_whether_weights_are_normalized_comes_from_the_state_dict() -> None:
    x = batches()[0]
    for theirs, ours in (("through", None), (None, "through"), ("detached", None), ("through", "detached")):
        one, other = trained(), trained(1)
        nc.prepare_qat_(one, "apot4", normalize=theirs)
        nc.prepare_qat_(other, "apot4", normalize=ours)
        other.load_state_dict(one.state_dict())
        assert torch.equal(other(x), one(x))
        kept = ours if theirs and ours else theirs  # which of the two is a matter of gradients
        assert other[2].weight_quantizer.normalize == kept


def test_clips_of_another_dimension_are_refused() -> None:
    one, other = nc.nn.FakeQuantize("int4", 0), nc.nn.FakeQuantize("int4", 1)
    one(torch.randn(4, 4))
    other(torch.randn(4, 4))
    with pytest.raises(StateDictError, match=r"those of channel_axis=0, and this quantizer's of channel_axis=1"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("observer", ["minmax", "moving_average", "percentile", "mse", "own numbers"])
def test_clips_that_follow_the_data_are_resumed(observer: str, file: bool, tmp_path: Path) -> None:
    made: Any = (lambda: nc.nn.Percentile(0.9)) if observer == "own numbers" else observer
    model, fresh, more = trained(), trained(1), torch.randn(8, 16) * 3
    for some in (model, fresh):
        nc.prepare_qat_(some, "int4", "int4", learn=False)
    nc.calibrate_(model, batches(), observer=made)
    if file:
        nc.save(model, tmp_path / "x.safetensors")
        nc.load(tmp_path / "x.safetensors", fresh)
    else:
        fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(more), model.eval()(more))
    assert torch.equal(fresh.train()(more), model.train()(more))  # both observe, and move their clips alike
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in fresh.state_dict().items())


def test_an_observer_of_another_library_is_asked_for() -> None:
    class Own(nc.nn.MinMax):
        pass

    model, fresh = trained(), trained()
    for some in (model, fresh):
        nc.prepare_qat_(some, "int4", "int4", learn=False)
    nc.calibrate_(model, batches(), observer=Own)
    with pytest.raises(StateDictError, match=r"an observer of the class .*Own.*quantizer\.observer = "):
        fresh.load_state_dict(model.state_dict())
    nc.calibrate_(fresh, [batches()[0]], observer=Own)
    fresh.load_state_dict(model.state_dict())


def test_a_state_dict_of_a_quantizer_from_before_loads_as_it_did() -> None:
    model, fresh = trained(), trained(1)
    for some in (model, fresh):
        nc.prepare_qat_(some, "apot4", "int8")
    nc.calibrate_(model, batches())
    old = {key: value for key, value in model.state_dict().items() if not key.endswith(KEY)}
    fresh.load_state_dict(old)
    assert torch.equal(fresh.eval()(batches()[0]), model.eval()(batches()[0]))


def test_a_file_from_before_loads_as_it_did(tmp_path: Path) -> None:
    model, x = trained(), batches()[0]
    nc.prepare_qat_(model, "apot4", "int8")
    nc.calibrate_(model, batches())
    old = {key: value for key, value in model.state_dict().items() if not key.endswith(KEY)}
    nc.save(old, tmp_path / "old.safetensors")
    fresh = trained(1)
    nc.prepare_qat_(fresh, "apot4", "int8")
    nc.load(tmp_path / "old.safetensors", fresh)
    assert torch.equal(fresh.eval()(x), model.eval()(x))
