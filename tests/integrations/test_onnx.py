"""Models exported to ONNX, run by onnxruntime: weights decode to the same bits, products keep a derived bound."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import ExportError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from narrowcast.integrations.onnx import export  # noqa: E402

INTEGERS = ["int4", "int8", "int4:block=32", "int8:block=32,scale=fp32", "int4:block=row", "int8:block=row"]
INTEGERS += ["int4:zero_point=true", "int8:zero_point=true,block=16", "int4:block=24", "int4:scale=e8m0,block=32"]
SPECS = [*INTEGERS, "fp16", "bf16", "raw"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch's exporter speaks of packages that are not installed."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def run(path: Path, *inputs: Tensor) -> Tensor:
    options = ort.SessionOptions()
    # onnxruntime's own default, 4, rounds the inputs of 4-bit products to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {given.name: x.numpy() for given, x in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(session.run(None, feeds)[0])


def initializers(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in onnx.load(str(path)).graph.initializer}


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


def bound(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What two sums of the same products in fp32, in any order, may differ by: 2 gamma_n sum |x||w|, n = K + 1."""
    count, u = weight.shape[1] + 1, 2.0**-24
    gamma = count * u / (1 - count * u)
    size = x.double().abs() @ weight.double().abs().t()
    return 2 * gamma * (size if bias is None else size + bias.double().abs())


class Each(nn.Module):
    """A layer for each codec, all of which get the same input. One export takes about a second."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in SPECS)
        nc.quantize_(self, rules={rf"layers\.{i}": spec for i, spec in enumerate(SPECS)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers])


@pytest.mark.parametrize("width", [128, 200])
def test_embeddings_decode_to_the_bits_of_their_codecs(width: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Each(lambda: nn.Embedding(31, width))
    ids = torch.arange(31)
    assert export(model, (ids,), tmp_path / "m.onnx") == {}
    for spec, found, expected in zip(SPECS, run(tmp_path / "m.onnx", ids), model(ids), strict=True):
        assert torch.equal(found, expected), spec


@pytest.mark.parametrize("kind", ["standard", "microsoft"])
@pytest.mark.parametrize("shape", [(3, 200), (2, 3, 256)])
def test_linear_layers_keep_the_bound_of_their_sums(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Each(lambda: nn.Linear(shape[-1], 40))
    x = torch.randn(shape)
    export(model, (x,), tmp_path / "m.onnx", operators=kind)
    for spec, found, layer in zip(SPECS, run(tmp_path / "m.onnx", x), model.layers, strict=True):
        weight, bias = layer.dequantize().weight.detach(), layer.bias.detach()
        expected = x.double() @ weight.double().t() + bias.double()
        assert ((found - expected).abs() <= bound(x, weight, bias)).all(), spec


@pytest.mark.parametrize(("spec", "bits"), [("int4:block=128", 4), ("int8:block=128", 8)])
@pytest.mark.parametrize("kind", ["standard", "microsoft"])
def test_codes_take_their_bits_in_the_file(spec: str, bits: int, kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 512, bias=False))
    nc.quantize_(model, spec)
    path = tmp_path / "m.onnx"
    export(model, (torch.randn(2, 3, 1024),), path, operators=kind)
    codes, scales = 1024 * 512 * bits // 8, 1024 * 512 // 128 * 4
    assert codes + scales <= path.stat().st_size <= codes + scales + 8192  # the graph, and its names
    assert len(initializers(path)["0.weight_codes"].raw_data) == codes
    assert "0.weight" not in initializers(path)


def test_standard_operators_are_standard_and_nothing_is_transposed_at_run_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 64))
    nc.quantize_(model, "int4")
    path = tmp_path / "m.onnx"
    export(model, (torch.randn(2, 3, 256),), path)
    loaded = onnx.load(str(path))
    onnx.checker.check_model(loaded)
    assert [entry.domain for entry in loaded.opset_import] == [""]
    assert operators(path) == ["DequantizeLinear", "MatMul", "Add"]
    assert initializers(path)["0.weight_codes"].data_type == onnx.TensorProto.INT4


def test_microsofts_operator_multiplies_codes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8, bias=False))
    nc.quantize_(model, "int4:block=32")
    for shape in ((2, 256), (2, 3, 256)):
        export(model, (torch.randn(shape),), tmp_path / "m.onnx", operators="microsoft")
        assert operators(tmp_path / "m.onnx") == ["MatMulNBits", "Add", "Relu", "MatMulNBits"]


class Several(nn.Module):
    """Tied weights, a convolution, a recurrent layer, attention, and an output that is a weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.lstm(x)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x)


@pytest.mark.parametrize("kind", ["standard", "microsoft"])
def test_a_model_of_many_kinds_of_layers_runs_and_tied_weights_are_there_once(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Several().eval()
    report = nc.quantize_(model, "int8")
    assert not report.skips
    ids = torch.arange(12).view(2, 6)
    path = tmp_path / "m.onnx"
    assert export(model, (ids,), path, operators=kind) == {}
    assert not [name for name in initializers(path) if name.endswith("weight")]
    assert sum("_codes" in name and ("embedding" in name or "head" in name) for name in initializers(path)) == 1
    # Sums of at most 192 products of numbers below 8 in fp32, four layers deep: each may be off by 2 * 193 * 2**-24 of
    # its size, below 2e-4 for a size of 8; what is added to x keeps later layers near that.
    torch.testing.assert_close(run(path, ids), model(ids), rtol=0, atol=2e-4)


def test_the_model_stays_encoded_and_in_its_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    nc.quantize_(model, "int4")
    before = model[0].weight
    model.train()
    export(model, (torch.randn(2, 64),), tmp_path / "m.onnx")
    assert model[0].weight is before
    assert model.training
    assert model[1].training
    assert type(model[0]) is nc.nn.Linear
    assert "Dropout" not in operators(tmp_path / "m.onnx")


def test_sizes_may_stay_open(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    nc.quantize_(model, "int8")
    batch = torch.export.Dim("batch")
    path = tmp_path / "m.onnx"
    export(model, (torch.randn(2, 64),), path, dynamic_shapes=({0: batch},), input_names=["x"], output_names=["y"])
    assert run(path, torch.randn(7, 64)).shape == (7, 8)
    assert [value.name for value in onnx.load(str(path)).graph.output] == ["y"]


def test_a_model_in_bf16_decodes_to_bf16(tmp_path: Path) -> None:
    model = nn.Embedding(8, 64, dtype=torch.bfloat16)
    nc.quantize_(model, "int4")
    export(model, (torch.arange(8),), tmp_path / "m.onnx")
    (output,) = onnx.load(str(tmp_path / "m.onnx")).graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert operators(tmp_path / "m.onnx") == ["DequantizeLinear", "Cast", "Gather"]


@pytest.mark.parametrize("spec", ["nf4", "apot4", "int3", "int6", "sign", "fp8_e4m3", "int5:zero_point=true"])
def test_a_codec_that_onnx_cannot_hold_is_refused(spec: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    nc.quantize_(model, rules={"0": spec, "1": "int8"})
    with pytest.raises(ExportError, match=r'^0\.weight: codec .*"int4" or "int8".*others="decode".*One of 1 such'):
        export(model, (torch.randn(2, 64),), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_or_it_is_decoded_and_the_reason_returned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    nc.quantize_(model, rules={"0": "nf4", "1": "int8"})
    x, path = torch.randn(2, 64), tmp_path / "m.onnx"
    decoded = export(model, (x,), path, others="decode")
    assert list(decoded) == ["0.weight"]
    assert model[0].codec.spec in decoded["0.weight"]
    assert {"0.weight", "1.weight_codes"} <= set(initializers(path))
    torch.testing.assert_close(run(path, x), model(x), rtol=0, atol=1e-4)  # sums of 64 products below 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"args": torch.randn(2, 64)}, r"args: expected a tuple of the model's inputs, got Tensor.*args=\(x,\)"),
        ({"operators": "tensorrt"}, "operators='tensorrt': is none of standard, microsoft"),
        ({"others": "skip"}, "others='skip': is none of refuse, decode"),
        ({"opset_version": 18}, "opset_version=18: .* opset 21"),
        ({"path": "/nowhere/at/all/m.onnx"}, "there is no folder '/nowhere/at/all'"),
        ({"model": nn.Linear(64, 8)}, r"model: no weight in it is quantized by narrowcast.*quantize_\(model\) first"),
        ({"model": {}}, "model: expected a torch.nn.Module, got dict"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    nc.quantize_(model, "int8")
    given = {"model": model, "args": (torch.randn(2, 64),), "path": tmp_path / "m.onnx", **change}
    with pytest.raises(ExportError, match=said):
        export(**given)
    assert not list(tmp_path.iterdir())


class Logits(nn.Module):
    """A model of transformers with tensors in and out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False)[0]


@pytest.mark.parametrize("kind", ["standard", "microsoft"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers_run_with_tied_and_transposed_weights(name: str, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "llama":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=96, tie_word_embeddings=True, **sizes)
        model = Logits(transformers.LlamaForCausalLM(config)).eval()
    else:
        config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        model = Logits(transformers.GPT2LMHeadModel(config)).eval()
    nc.quantize_(model, "int4:block=32")
    ids, path = torch.arange(12).view(1, 12), tmp_path / "m.onnx"
    assert export(model, (ids,), path, operators=kind) == {}
    floats = [tensor for tensor in initializers(path).values() if tensor.data_type == 1 and len(tensor.dims) == 2]
    assert all(tensor.name.endswith("scales") or len(tensor.raw_data) < 4096 for tensor in floats)  # a mask, no weight
    # Logits are below 1, and so are the sums of at most 256 products on the way, in 14 layers: 14 * 2 * 257 * 2**-24.
    torch.testing.assert_close(run(path, ids), model(ids), rtol=0, atol=5e-4)


def test_the_surroundings_of_the_call_do_not_matter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(31, 64), nn.Linear(64, 8))
    nc.quantize_(model, "int4")
    ids = torch.arange(31)
    export(model, (ids,), tmp_path / "plain.onnx")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            export(model, (ids,), tmp_path / "other.onnx")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(run(tmp_path / "plain.onnx", ids), run(tmp_path / "other.onnx", ids))
