"""Exports, decoded by the compressed-tensors package itself and loaded by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CompressedTensorsConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import narrowcast as nc
from narrowcast.checkpoint.conversion import open_conversion
from narrowcast.codecs.payload import encode_rows
from narrowcast.errors import ExportError
from narrowcast.integrations.compressed_tensors import export
from small_llama import TOKENS, llama

EXPRESSIBLE = [
    "int4",
    "int8",
    "int4:block=32",
    "int8:block=row",
    "int4:block=row",
    "int4:scale=fp32",
    "int8:scale=fp16,block=64",
    "int4:scale=e8m0",
    "int4:zero_point=true",
    "int8:zero_point=true,block=row",
    "int4:stochastic=true",
]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def decoded(folder: Path, module: str) -> Tensor:
    """A module's weight, as the package reads it from the files and the config of an export."""
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    (scheme,) = (s for s in config.config_groups.values() if module in s.targets or s.targets == ["Linear"])
    stored: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    prefix = f"{module}." if module else ""
    local = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
    compressor = BaseCompressor.get_value_from_registry(config.format)
    found: Tensor = compressor.decompress(local, scheme)["weight"]
    return found


# compressed-tensors 0.20 cannot read zero points of 8 rows or fewer, those that its own compress wrote included.
SHAPES = [(5, 128), (1, 256), (48, 384), (11, 128)]
EXPORTS = [(spec, shape) for spec in EXPRESSIBLE for shape in SHAPES if shape[0] > 8 or "zero_point" not in spec]


@pytest.mark.parametrize(("spec", "shape"), EXPORTS, ids=str)
def test_the_package_decodes_an_export_to_our_own_numbers(spec: str, shape: tuple[int, int], tmp_path: Path) -> None:
    rows = encode_rows(random(*shape), spec)
    export({"layer.weight": rows}, tmp_path / "out")
    found = decoded(tmp_path / "out", "layer")
    assert found.dtype == torch.float32
    assert torch.equal(found, rows.decode())


@pytest.mark.parametrize("columns", [1, 7, 33, 100])
def test_rows_of_any_length_fit_with_one_scale_each(columns: int, tmp_path: Path) -> None:
    for spec in ("int4:block=row", "int8:block=128"):  # a block that holds the whole row is one scale, too
        rows = encode_rows(random(6, columns), spec)
        export({"layer.weight": rows}, tmp_path / spec)
        assert torch.equal(decoded(tmp_path / spec, "layer"), rows.decode())


def test_a_block_that_is_not_finite_stays_nan_and_its_neighbours_stay(tmp_path: Path) -> None:
    weight = random(4, 128)
    weight[1, 3], weight[2, 100] = torch.nan, torch.inf
    rows = encode_rows(weight, "int4")
    export({"layer.weight": rows}, tmp_path / "out")
    torch.testing.assert_close(decoded(tmp_path / "out", "layer"), rows.decode(), rtol=0, atol=0, equal_nan=True)


def test_large_weights_are_packed_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowcast.codecs.tiles.TILE", 1000)
    rows = encode_rows(random(37, 192), "int4")
    export({"layer.weight": rows}, tmp_path / "out")
    assert torch.equal(decoded(tmp_path / "out", "layer"), rows.decode())


def test_scales_may_be_rounded_to_the_dtype_that_a_loader_would_round_them_to(tmp_path: Path) -> None:
    rows = encode_rows(random(8, 128), "int8")
    export({"layer.weight": rows}, tmp_path / "out", scale_dtype=torch.bfloat16)
    found, exact = decoded(tmp_path / "out", "layer"), rows.decode()
    assert found.dtype == torch.bfloat16
    # The scale rounds once to bf16, the product once more: 2**-8 of the value each, and 2**-16 for both.
    assert bool(((found.float() - exact).abs() <= exact.abs() * (2.0**-7 + 2.0**-16)).all())
    bf16_scales = encode_rows(random(8, 128), "int4")
    export({"layer.weight": bf16_scales}, tmp_path / "same", scale_dtype=torch.bfloat16)
    assert torch.equal(decoded(tmp_path / "same", "layer"), bf16_scales.decode(torch.bfloat16))


@pytest.mark.parametrize("codec", ["int4", "int8:block=64", "int4:zero_point=true", "int8:block=row"])
def test_transformers_loads_an_exported_model_and_computes_the_same(codec: str, tmp_path: Path) -> None:
    model = llama()
    nc.quantize_(model, codec, rules={"lm_head|embed_tokens": None})
    export(model, tmp_path / "out")
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert described["ignore"] == ["lm_head"]
    # compressed-tensors 0.20 prepares an empty model for unpacked zero points, and packs those that it saves:
    # transformers 5.23 notices and refuses every such folder, unless it decodes while it loads.
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "zero_point" in codec else {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how)
    with torch.no_grad():
        found = loaded(TOKENS).logits
        expected = nc.dequantize_(model)(TOKENS).logits
    assert torch.equal(found, expected)


def test_several_codecs_name_their_modules(tmp_path: Path) -> None:
    model = llama()
    nc.quantize_(model, "int4", rules={"lm_head": "int8", "embed_tokens|q_proj": None})
    export(model, tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    targets = sorted(group["targets"] for group in described["config_groups"].values())
    assert targets[0] == ["lm_head"]
    assert described["ignore"] == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    for name, module in model.named_modules():
        if isinstance(module, nc.nn.Linear):
            assert torch.equal(decoded(tmp_path / "out", name), module.decoded())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, nc.dequantize_(model)(TOKENS).logits)


def test_a_folder_is_exported_like_its_model(tmp_path: Path) -> None:
    model = llama()
    nc.quantize_(model, "int4", rules={"lm_head|embed_tokens": None})
    nc.save(model, tmp_path / "saved")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, nc.dequantize_(model)(TOKENS).logits)


def test_a_model_without_a_config_is_exported_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    nc.quantize_(model, "int8:block=32")
    export(model, tmp_path / "out")
    assert torch.equal(decoded(tmp_path / "out", "0"), model[0].decoded())
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["0.bias"], model[0].bias)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_encoded_embeddings_are_written_as_the_floats_that_they_decode_to(tied: bool, tmp_path: Path) -> None:
    model = llama(tied)
    nc.quantize_(model, "int4")
    written = export(model, tmp_path / "out")
    names = {"model.embed_tokens.weight": "belongs to an Embedding"}
    assert written == ({**names, "lm_head.weight": "is tied to such a weight"} if tied else names)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, nc.dequantize_(model)(TOKENS).logits)


def quantized_folder(model: PreTrainedModel, folder: Path) -> Path:
    """What `narrowcast quantize` makes of a model by default, with a tokenizer beside it."""
    model.save_pretrained(folder / "float")
    (folder / "float" / "tokenizer.json").write_text("{}")
    (folder / "float" / "extra").mkdir()
    (folder / "float" / "extra" / "settings.json").write_text("{}")
    conversion = open_conversion(folder / "float", folder / "int8", "int8")
    conversion.prepare(overwrite=False)
    for part in conversion.parts:
        conversion.convert(part)
    conversion.finish()
    return folder / "int8"


def bert(kind: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return kind(BertConfig(**sizes, vocab_size=96, max_position_embeddings=64)).eval()


@pytest.mark.parametrize("kind", ["llama", "tied llama", "BertModel", "BertForMaskedLM"])
def test_quantize_then_export_by_default_gives_a_folder_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    made = llama(kind == "tied llama") if "llama" in kind else bert(getattr(transformers, kind))
    folder = quantized_folder(made, tmp_path)
    written = export(folder, tmp_path / "out")
    assert written
    assert all("Embedding" in reason or "tied" in reason for reason in written.values())
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "extra" / "settings.json").exists()
    expected = nc.dequantize_(nc.load(folder, type(made)(made.config).eval()))
    loaded = type(made).from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS)[0], expected(TOKENS)[0])


def test_a_folder_of_an_unknown_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = quantized_folder(llama(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for architectures in (["NoSuchModel"], []):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
        with pytest.raises(ExportError, match=r"no class of transformers.*narrowcast\.load\(folder, model\)"):
            export(folder, tmp_path / "out")
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"], "model_type": "bert"}))
    with pytest.raises(ExportError, match=r"lm_head.weight|model\..*: BertModel has no weight of that name"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- what cannot be exported -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["nf4", "apot4", "fp8_e4m3", "int3", "int6", "bf16", "sign"])
def test_other_codecs_are_refused_with_those_that_fit(spec: str, tmp_path: Path) -> None:
    words = f"layer.weight: codec '{nc.codec(spec).spec}' has no place in pack-quantized.*int4.*int8.*None"
    with pytest.raises(ExportError, match=words):
        export({"layer.weight": encode_rows(random(4, 64), spec)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_short_block_is_refused_with_a_block_that_fits(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r'rows of 96 are not .* blocks of 64.*"int4:block=32"'):
        export({"layer.weight": encode_rows(random(4, 96), "int4")}, tmp_path / "out")
    with pytest.raises(ExportError, match=r'"int4:block=row"'):
        export({"layer.weight": encode_rows(random(4, 101), "int4")}, tmp_path / "out")


def test_stacks_of_matrices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"experts.up: .*2-D weights .* \[2, 4, 64\].*None"):
        export({"experts.up": encode_rows(random(2, 4, 64), "int4")}, tmp_path / "out")


def test_tied_rows_are_refused(tmp_path: Path) -> None:
    rows = encode_rows(random(4, 64), "int4")
    with pytest.raises(ExportError, match=r"a.weight and b.weight are one tied weight"):
        export({"a.weight": rows, "b.weight": rows}, tmp_path / "out")


def test_gpt2_is_refused_for_its_transposed_weights(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96, n_positions=64))
    nc.quantize_(model, "int4", rules={"lm_head|wte|wpe": None})
    with pytest.raises(ExportError, match=r"c_attn: is a Conv1D, with a weight of \[in, out\].*None"):
        export(model, tmp_path / "out")


def test_a_model_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no weight of a Linear module in it is quantized.*quantize_"):
        export(nn.Linear(8, 8), tmp_path / "out")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ExportError, match="new or empty folder"):
        export({"layer.weight": encode_rows(random(4, 64), "int4")}, tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"
