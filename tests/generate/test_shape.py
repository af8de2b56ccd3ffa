"""config.json and generation_config.json, read as transformers reads them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.generate import Shape, load_decoder
from narrowcast.generate.cache import Cache
from narrowcast.generate.shape import read_shape, shape_of

transformers = pytest.importorskip("transformers")
import small_llama  # noqa: E402

CONFIG = small_llama.SMALL | {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 7}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (None, None, ()),
        (7, {"eos_token_id": [8, 9]}, (8, 9)),
        (7, {"eos_token_id": None}, ()),
        (7, {"temperature": 0.6}, ()),
    ],
)
def test_the_tokens_that_end_a_text_are_those_of_transformers_generate(
    config: Any, generation: dict[str, Any] | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small_llama.SMALL))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": config}))
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    known = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    assert read_shape(tmp_path).ends == ends
    assert ends == (tuple(known) if isinstance(known, list) else () if known is None else (known,))


READ: dict[str, dict[str, Any]] = {
    "llama 3 without its own length": {"rope_parameters": LLAMA3},
    "llama 3 with a length beside": {
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
        "original_max_position_embeddings": 16,
    },
    "two entries for angles": {"rope_parameters": LINEAR | {"factor": 4.0}, "rope_scaling": LINEAR},
    "a window as long as all texts": {"model_type": "mistral", "sliding_window": 128},
    "biases that mistral does not have": {"model_type": "mistral", "sliding_window": None, "attention_bias": True},
}


@pytest.mark.parametrize("change", READ.values(), ids=READ)
def test_entries_mean_what_they_mean_to_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    small_llama.llama().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    decoder, tokens = load_decoder(tmp_path), list(range(20, 70))
    cache = Cache(decoder.shape, 1, len(tokens), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
        # fp32 sums of up to 128 products, through two layers; other angles change logits by 0.001 and more.
        torch.testing.assert_close(decoder.prefill(torch.tensor(tokens), cache, 0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, "sliding_window is 4096"),
        ({"model_type": "mistral", "sliding_window": 4, "use_sliding_window": False}, "sliding_window is 4"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_parameters": LLAMA3 | {"factor": "8"}}, "'llama3' needs 'factor'"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.1}}, "low_freq_factor must not be above high_freq_factor"),
        ({"rope_theta": None}, "'default' needs 'rope_theta'"),
        ({"partial_rotary_factor": 0.5}, "on whole heads"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2': must be a whole number"),
        ({"vocab_size": None}, "vocab_size=None: must be a whole number"),
        ({"rms_norm_eps": None}, "norm_eps=None: must be a number"),
        ({"eos_token_id": "</s>"}, "ends='</s>': must be a whole number"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_file_and_the_entry(change: dict[str, Any], words: str) -> None:
    with pytest.raises(nc.errors.ModelKindError, match=f"here/config.json: .*{words}"):
        shape_of(CONFIG | {"max_position_embeddings": 8192} | change, "here/config.json")


@pytest.mark.parametrize("entry", ["sliding_window", "attention_chunk_size"])
def test_a_llama_whose_cache_in_transformers_has_a_window_is_refused(entry: str, tmp_path: Path) -> None:
    small_llama.llama().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {entry: 4}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert transformers.DynamicCache(config=model.config).layers[0].sliding_window == 4
    with pytest.raises(nc.errors.ModelKindError, match=f"config.json: {entry} is 4, and the runner attends to every"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {entry: 128}))
    assert load_decoder(tmp_path).shape.context == 128


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotary": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "knows the types default, linear"),
        ({"rotary": {}}, "knows the types"),
        ({"rotary": {"rope_type": "default"}}, "needs 'rope_theta'"),
        ({"layers": 2.0}, "layers=2.0"),
        ({"key_heads": -2}, "sizes must be at least 1"),
        ({"ends": ("7",)}, "ends='7'"),
    ],
)
def test_a_shape_that_would_run_as_another_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(nc.errors.ModelKindError, match=words):
        Shape(**{"width": 64, "layers": 1, "heads": 4, "hidden": 128, "words": 32} | options)


def test_a_config_that_is_no_table_of_entries_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(nc.errors.ModelKindError, match=r"holds a list, not entries by name"):
        read_shape(tmp_path)
