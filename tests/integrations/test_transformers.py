"""transformers' own from_pretrained and save_pretrained, on small models made on the spot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app
from narrowcast.codecs.payload import encode_rows
from narrowcast.errors import SpecError, StateDictError
from narrowcast.integrations.transformers import NarrowcastConfig
from small_llama import SMALL, TOKENS, llama


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[PreTrainedModel], Path]:
    """A function that saves a model and gives the folder."""

    def save(model: PreTrainedModel) -> Path:
        path = tmp_path / f"saved{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(path)
        return path

    return save


Save = Callable[[PreTrainedModel], Path]


def load(path: Path, config: NarrowcastConfig | None = None, kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    return kind.from_pretrained(path, **({"quantization_config": config} if config else {}), **more)


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first
    )


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


# -- quantizing while loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [llama, lambda: llama(tied=True), gpt2, mixtral], ids=["llama", "tied", "gpt2", "mixtral"]
)
@pytest.mark.parametrize("codec", ["int8", "int4", "nf4"])
def test_loading_gives_the_bytes_that_quantize_gives_and_saving_keeps_them(
    make: Callable[[], PreTrainedModel], codec: str, folder: Save
) -> None:
    model = make()
    quantized = load(folder(model), NarrowcastConfig(codec))
    listed = quantized.config.quantization_config.weights
    assert set(listed.values()) == {codec}
    names = "|".join(f"^{key.removesuffix('.weight')}$".replace(".", r"\.") for key in listed)
    nc.quantize_(model, None, rules={names: codec})
    assert same_bits(quantized, model)
    assert torch.equal(logits(quantized), logits(model))

    again = load(folder(quantized))
    assert same_bits(again, quantized)
    assert nc.nn.encodings(again) == nc.nn.encodings(quantized)
    assert torch.equal(logits(again), logits(quantized))
    assert same_bits(load(folder(again)), quantized)  # and so on


def test_heads_ties_and_embeddings_stay_floats_by_habit(folder: Save) -> None:
    quantized = load(folder(llama()), NarrowcastConfig("int4"))
    assert type(quantized.lm_head) is nn.Linear
    assert type(quantized.model.embed_tokens) is nn.Embedding
    kinds = {type(module) for module in quantized.model.layers.modules() if "Linear" in type(module).__name__}
    assert kinds == {nc.nn.Linear}


def test_rules_decide_and_may_take_the_head_and_the_embeddings_too(folder: Save) -> None:
    rules = {"lm_head|embed_tokens": "int8", "q_proj": None, r"layers\.0\.mlp": "int6"}
    quantized = load(folder(llama()), NarrowcastConfig("int4", rules=rules))
    codecs = {name.removesuffix(".weight"): found.codec.spec for name, found in nc.nn.encodings(quantized).items()}
    assert codecs["lm_head"] == codecs["model.embed_tokens"] == "int8"
    assert codecs["model.layers.0.mlp.up_proj"] == "int6"
    assert codecs["model.layers.1.mlp.up_proj"] == "int4"
    assert not [name for name in codecs if "q_proj" in name]
    assert same_bits(load(folder(quantized)), quantized)


def test_modules_to_not_convert_come_before_rules(folder: Save) -> None:
    config = NarrowcastConfig("int4", rules={"mlp": "int8"}, modules_to_not_convert=["down_proj", "model.layers.1"])
    found = nc.nn.encodings(load(folder(llama()), config))
    assert not [name for name in found if "down_proj" in name or "layers.1" in name]
    assert found["model.layers.0.mlp.up_proj.weight"].codec.spec == "int8"


def test_a_rule_that_matches_nothing_is_reported(folder: Save, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging

    logging.enable_propagation()
    load(folder(llama()), NarrowcastConfig("int4", rules={"atention": None}))
    assert "these rules match no module: ['atention']" in caplog.text


def test_tied_embeddings_are_encoded_once_and_stay_tied(folder: Save) -> None:
    quantized = load(folder(llama(tied=True)), NarrowcastConfig("int4", rules={"embed_tokens": "int8"}))
    path = folder(quantized)
    for model in (quantized, load(path)):
        assert isinstance(model.lm_head, nc.nn.Linear)
        assert isinstance(model.model.embed_tokens, nc.nn.Embedding)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = load_file(path / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.uint8
    assert "lm_head.weight" not in stored
    assert torch.equal(logits(load(path)), logits(quantized))


def test_weights_that_a_config_ties_but_the_files_do_not_are_encoded_each(folder: Save) -> None:
    path, model = folder(llama()), llama()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    quantized = load(path, NarrowcastConfig("int4", rules={"embed_tokens|lm_head": "int8"}))
    assert torch.equal(quantized.lm_head.weight, encode_rows(model.lm_head.weight, "int8").data)
    assert torch.equal(quantized.model.embed_tokens.weight, encode_rows(model.model.embed_tokens.weight, "int8").data)


def test_without_a_codec_only_what_a_rule_names_is_encoded(folder: Save) -> None:
    quantized = load(folder(llama()), NarrowcastConfig(None, rules={"q_proj": "int4"}))
    assert {name.split(".")[-2] for name in nc.nn.encodings(quantized)} == {"q_proj"}
    assert same_bits(load(folder(quantized)), quantized)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_asked_for_is_the_dtype_of_the_floats(dtype: torch.dtype, folder: Save) -> None:
    config = NarrowcastConfig("int4", rules={"embed_tokens": "int8"})
    quantized = load(folder(llama()), config, dtype=dtype)
    again = load(folder(quantized))
    for model in (quantized, again):
        assert logits(model).dtype == model.model.embed_tokens.dtype == model.dtype == dtype
    assert torch.equal(logits(again), logits(quantized))


@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_a_quantized_model_generates_what_its_decoded_weights_generate(
    make: Callable[[], PreTrainedModel], folder: Save
) -> None:
    quantized = load(folder(make()), NarrowcastConfig("int8"))
    found = quantized.generate(TOKENS, max_new_tokens=5, do_sample=False)
    assert found.shape == (1, TOKENS.shape[1] + 5)
    floats = quantized.dequantize()
    assert torch.equal(floats.generate(TOKENS, max_new_tokens=5, do_sample=False), found)


@pytest.mark.parametrize(
    "make", [llama, lambda: llama(tied=True), gpt2, mixtral], ids=["llama", "tied", "gpt2", "mixtral"]
)
def test_dequantize_gives_the_float_model_with_decoded_weights(
    make: Callable[[], PreTrainedModel], folder: Save
) -> None:
    quantized = load(folder(make()), NarrowcastConfig("int8"))
    expected = logits(quantized)
    floats = quantized.dequantize()
    assert not nc.nn.encodings(floats)
    assert not hasattr(floats.config, "quantization_config")
    assert {type(module) for module in floats.modules()} == {type(module) for module in make().modules()}
    # Both sum the same fp32 products, in another order: 128 terms at most, of layers stacked two deep.
    torch.testing.assert_close(logits(floats), expected, rtol=1e-4, atol=1e-5)
    plain = load(folder(floats))
    assert same_bits(plain, floats)


def test_a_head_less_model_loads_from_the_folder_of_one_with_a_head(folder: Save) -> None:
    torch.manual_seed(0)
    config = BertConfig(**{key: value for key, value in SMALL.items() if key != "num_key_value_heads"})
    quantized = load(folder(BertForMaskedLM(config).eval()), NarrowcastConfig("int8"), AutoModelForMaskedLM)
    body = load(folder(quantized), kind=AutoModel)
    with torch.no_grad():
        assert torch.equal(body(TOKENS).last_hidden_state, quantized.bert(TOKENS).last_hidden_state)


def test_sharded_folders_load(tmp_path: Path, folder: Save) -> None:
    quantized = load(folder(llama()), NarrowcastConfig("int4"))
    quantized.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert same_bits(load(tmp_path / "shards"), quantized)


def test_gradients_reach_what_lies_below_encoded_layers(folder: Save) -> None:
    model = load(folder(llama()), NarrowcastConfig("int8"))
    model(TOKENS).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
    assert all(not weight.requires_grad for weight in model.parameters() if weight.dtype == torch.uint8)


def test_while_loading_only_one_weight_is_there_as_floats(tmp_path: Path) -> None:
    """Memory of a process of its own that loads to another dtype, so that no float is a page of the file."""
    torch.manual_seed(0)
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    LlamaForCausalLM(LlamaConfig(**{**SMALL, **size})).save_pretrained(tmp_path / "model")
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "tiny")
    code = f"""
from transformers import AutoModelForCausalLM
from narrowcast.integrations import transformers as integration

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

convert, seen = integration.Encode.convert, []
def spy(self, *args, **kwargs):
    found = convert(self, *args, **kwargs)  # the floats are still there: the loader holds them
    seen.append(anonymous())
    return found
integration.Encode.convert = spy
config = integration.NarrowcastConfig("int4")
AutoModelForCausalLM.from_pretrained({str(tmp_path / "tiny")!r}, quantization_config=config)
before = anonymous()  # what loading imports is there by now
seen.clear()
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, quantization_config=config, dtype="bfloat16")
print(max(seen) - before, sum(weight.nbytes for weight in model.parameters()))
"""
    # glibc keeps what is freed, unless large blocks are always mapped: then only what is in use counts.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    peak, rows = map(int, done.stdout.split()[-2:])
    # The largest weight is 8 MiB in bf16 and 16 in the file. 48 MiB are room for both, its rows, and the allocator's
    # habits; the floats of the whole model would be 189 MB.
    assert peak < rows + (48 << 20)


# -- folders from elsewhere ------------------------------------------------------------------------------------------


def convert(source: Path, target: Path, *options: str) -> Path:
    done = CliRunner().invoke(app, ["quantize", str(source), str(target), *options])
    assert done.exit_code == 0, done.output
    return target


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_that_narrowcast_quantize_wrote_loads_as_it_is(tied: bool, tmp_path: Path, folder: Save) -> None:
    expected = llama(tied)
    model = load(convert(folder(expected), tmp_path / "converted", "--codec", "int4"))
    nc.quantize_(expected, "int4")
    assert same_bits(model, expected)
    assert nc.nn.encodings(model) == nc.nn.encodings(expected)
    assert same_bits(load(folder(model)), expected)


def test_experts_encoded_one_by_one_become_the_rows_of_the_fused_weight(tmp_path: Path, folder: Save) -> None:
    expected = mixtral()
    model = load(convert(folder(expected), tmp_path / "converted", "--codec", "int4"))
    # The router is a Parameter of a module that can hold no rows, which the files cannot know: it is decoded.
    with torch.no_grad():
        for layer in expected.model.layers:
            layer.mlp.gate.weight.copy_(encode_rows(layer.mlp.gate.weight, "int4").decode())
    nc.quantize_(expected, "int4")
    assert same_bits(model, expected)
    assert same_bits(load(folder(model)), expected)


def test_experts_in_different_codecs_are_refused(tmp_path: Path, folder: Save) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": {r"experts\.2\.w1": "int8"}}))
    path = convert(folder(mixtral()), tmp_path / "converted", "--codec", "int4", "--rules", str(rules))
    with pytest.raises(StateDictError, match=r"experts\.2\.w1.* is 'int8', and another .* merges .* is 'int4'"):
        load(path)


def test_rows_of_a_weight_that_lies_as_in_out_are_refused(folder: Save) -> None:
    model = gpt2()
    path = folder(load(folder(model), NarrowcastConfig("int4")))
    stored, weight = load_file(path / "model.safetensors"), model.transformer.h[0].attn.c_attn.weight
    (key,) = (key for key in stored if key.endswith("h.0.attn.c_attn.weight"))
    stored[key] = encode_rows(weight, "int4").data
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        StateDictError, match=r"c_attn\.weight: .*as \[in, out\], as GPT-2 keeps it: .*NarrowcastConfig"
    ):
        load(path)


def test_rows_that_do_not_fit_the_model_are_refused(folder: Save) -> None:
    path = folder(load(folder(llama()), NarrowcastConfig("int4")))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["weights"]["model.layers.0.mlp.up_proj.weight"] = "int8"
    (path / "config.json").write_text(json.dumps(config))
    words = r"layers\.0\.mlp\.up_proj\.weight: expected rows of 'int8' .*\[128, 64\], found uint8 \[128, 48\]"
    with pytest.raises(StateDictError, match=words):
        load(path)


def test_rows_that_the_config_does_not_list_are_refused(folder: Save) -> None:
    path = folder(load(folder(llama()), NarrowcastConfig("int4")))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]["weights"]["model.layers.0.mlp.up_proj.weight"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StateDictError, match=r"up_proj\.weight: expected floats, found uint8"):
        load(path)


def test_floats_of_another_shape_are_refused(folder: Save) -> None:
    path = folder(load(folder(llama()), NarrowcastConfig("int4", rules={"up_proj": None})))
    stored = load_file(path / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 32)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        StateDictError, match=r"up_proj\.weight: expected floats of shape \[128, 64\], found .*\[128, 32\]"
    ):
        load(path)


def test_rows_that_are_missing_are_refused(folder: Save) -> None:
    path = folder(load(folder(llama()), NarrowcastConfig("int4")))
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.weight"]
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StateDictError, match=r"up_proj\.weight: config.json lists it .* no file holds its rows"):
        load(path)


def test_a_config_without_weights_is_refused(folder: Save) -> None:
    path = folder(load(folder(llama()), NarrowcastConfig("int4")))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["weights"] = {}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StateDictError, match='quantization_config has no "weights"'):
        load(path)


def test_a_weight_that_is_not_finite_is_refused(folder: Save, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging

    logging.enable_propagation()
    logging.set_verbosity_warning()  # other tests ask for silence
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    path = folder(model)
    with pytest.raises(RuntimeError, match="conversion"):  # transformers' own, which collects such errors in a report
        load(path, NarrowcastConfig("int4"))
    assert "model.layers.1.mlp.up_proj.weight: holds an infinity or a NaN" in caplog.text
    left = load(path, NarrowcastConfig("int4", rules={r"^model\.layers\.1\.mlp\.up_proj$": None}))
    assert type(left.model.layers[1].mlp.up_proj) is nn.Linear


# -- the config ------------------------------------------------------------------------------------------------------


def test_a_config_is_plain_values_and_comes_back_from_them() -> None:
    config = NarrowcastConfig({"name": "int4", "block": 32}, rules={"lm_head": False, "mlp": nc.codec("nf4")})
    values = json.loads(json.dumps(config.to_dict()))
    assert values == {
        "quant_method": "narrowcast",
        "codec": "int4:block=32",
        "rules": {"lm_head": None, "mlp": "nf4"},
        "modules_to_not_convert": None,
        "weights": {},
    }
    assert NarrowcastConfig.from_dict(values).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"codec": "int9"}, "codec 'int9' does not exist"),
        ({"rules": {"(": "int4"}}, "is not a regular expression"),
        ({"group_size": 4}, "group_size is unknown.*later narrowcast"),
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
    ],
)
def test_a_config_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        NarrowcastConfig(**arguments)
