"""sentence-transformers on a quantized folder: sub-folders are there, and what it does with dtypes works."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast

import narrowcast as nc
import narrowcast.integrations.transformers
from narrowcast.checkpoint.conversion import open_conversion

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bytes", "travel", "far", "and", "fast"]
SENTENCES = ["bytes travel", "far and fast"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized folder in the form of sentence-transformers: a BERT at the root, its other modules in sub-folders."""
    here = tmp_path_factory.mktemp("sentences")
    source = here / "float"
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=32)).save_pretrained(source)
    (here / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(here / "vocab.txt")).save_pretrained(source)
    kind = "sentence_transformers.models"
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    (source / "modules.json").write_text(
        json.dumps([{"idx": i, "name": str(i), "path": p, "type": f"{kind}.{t}"} for i, (p, t) in enumerate(modules)])
    )
    for path, about in {
        "1_Pooling": {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
        "2_Dense": {"in_features": 64, "out_features": 16, "bias": True, "activation_function": "torch.nn.Tanh"},
    }.items():
        (source / path).mkdir()
        (source / path / "config.json").write_text(json.dumps(about))
    dense = nn.Linear(64, 16)
    nc.save(
        {f"linear.{name}": value for name, value in dense.state_dict().items()}, source / "2_Dense/model.safetensors"
    )
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"the original model")
    conversion = open_conversion(source, here / "int8", "int8")
    conversion.prepare(overwrite=False)
    for part in conversion.parts:
        conversion.convert(part)
    conversion.finish()
    assert conversion.summary()["files_left"] == ["onnx"]
    return here / "int8"


def test_the_folders_of_modules_are_copied_whole_and_other_weights_are_not(folder: Path) -> None:
    source = folder.parent / "float"
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert not (folder / "onnx").exists()


def test_a_target_inside_of_the_source_is_not_copied_into_itself(tmp_path: Path) -> None:
    nc.save({"a.weight": torch.ones(8, 64)}, tmp_path / "source")
    (tmp_path / "source" / "notes").mkdir()
    (tmp_path / "source" / "notes" / "a.txt").write_text("kept")
    (tmp_path / "source" / "notes" / ".hidden.txt").write_text("not")
    conversion = open_conversion(tmp_path / "source", tmp_path / "source" / "int8", "int8")
    conversion.prepare(overwrite=False)
    conversion.convert(conversion.parts[0])
    conversion.finish()
    found = sorted(str(path.relative_to(conversion.target)) for path in conversion.target.rglob("*"))
    assert found == ["model.safetensors", "notes", "notes/a.txt"]


def test_the_first_parameter_of_a_loaded_model_has_the_dtype_of_its_floats(folder: Path) -> None:
    model = AutoModel.from_pretrained(folder)
    assert isinstance(model.embeddings.word_embeddings, nc.nn.Embedding)
    assert next(model.parameters()).dtype == torch.float32
    assert next(model.to(torch.bfloat16).parameters()).dtype == torch.bfloat16
    assert not [name for name in model.state_dict() if "empty" in name]
    model.load_state_dict(model.state_dict())
    model.save_pretrained(folder.parent / "again")
    again = AutoModel.from_pretrained(folder.parent / "again")
    assert torch.equal(again.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)
    nc.dequantize_(model)
    assert not [name for name, _ in model.named_parameters() if "empty" in name]


def test_load_takes_a_file_with_buffers_that_the_model_makes_itself(folder: Path, tmp_path: Path) -> None:
    state = nc.load(folder)
    # Earlier versions of transformers stored it.
    nc.save({**state, "embeddings.position_ids": torch.arange(32)[None]}, tmp_path / "old.safetensors")
    config = BertConfig.from_pretrained(folder)
    model = nc.load(tmp_path / "old.safetensors", BertModel(config))
    assert isinstance(model.embeddings.word_embeddings, nc.nn.Embedding)
    nc.save({**state, "strange": torch.arange(3)}, tmp_path / "strange.safetensors")
    with pytest.raises(nc.errors.ModelMismatchError, match="strange"):
        nc.load(tmp_path / "strange.safetensors", BertModel(config))


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers")
def test_sentence_transformers_loads_moves_and_encodes(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    exact = SentenceTransformer(str(folder.parent / "float"), device="cpu").encode(SENTENCES)
    model = SentenceTransformer(str(folder), device="cpu")
    assert model.dtype == torch.float32
    found = model.to("cpu").encode(SENTENCES)
    cosines = torch.cosine_similarity(torch.tensor(exact), torch.tensor(found))
    assert bool((cosines > 0.999).all())
    assert not torch.equal(torch.tensor(exact), torch.tensor(found))
    assert model.to(torch.bfloat16).dtype == torch.bfloat16
