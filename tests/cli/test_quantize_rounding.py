"""`quantize --rounding` and `inspect --rounding` on the command line: the bytes of quantize_, and refusals in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.checkpoint import read
from narrowcast.cli import app
from narrowcast.kernels.reference.search import GAIN

WORDS = [f"word{number}" for number in range(40)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "source"
    nc.save(nn.Sequential(nn.Linear(200, 30), nn.Linear(30, 7)), folder)
    return folder


def test_search_gives_the_bytes_of_quantize_(source: Path, tmp_path: Path) -> None:
    result = run("quantize", source, tmp_path / "out", "--codec", "int4", "--rounding", "search")
    assert result.exit_code == 0, result.output
    model = nc.load(source, nn.Sequential(nn.Linear(200, 30), nn.Linear(30, 7)))
    nc.quantize_(model, "int4", rounding="search")
    loaded = nc.load(tmp_path / "out", nn.Sequential(nn.Linear(200, 30), nn.Linear(30, 7)))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_run_with_another_rounding_does_not_resume(source: Path, tmp_path: Path) -> None:
    assert run("quantize", source, tmp_path / "out", "--codec", "int4").exit_code == 0
    result = run("quantize", source, tmp_path / "out", "--codec", "int4", "--rounding", "search")
    assert result.exit_code != 0
    assert "is not empty" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounding", "best"], "expected nearest, search or gptq"),
        (["--rounding", "gptq"], "--rounding gptq and --data go together"),
        (["--data", "text.txt"], "--rounding gptq and --data go together"),
    ],
)
def test_options_that_do_not_go_together(source: Path, tmp_path: Path, options: list[str], message: str) -> None:
    result = run("quantize", source, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_bert(tmp_path / "bert", 32)


def save_bert(folder: Path, width: int) -> Path:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * width}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, architectures=["BertModel"], **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokens = {"tokenizer_class": "BertTokenizer", "model_max_length": 32, "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder


OF_BERT = pytest.mark.parametrize("spec", ["int4:block=16", "nf4", "int3", "int4:zero_point=true", "int8:block=row"])


def rows_of(bert: Path, out: Path, spec: str, rounding: str) -> dict[str, torch.Tensor]:
    """What the command writes."""
    assert run("quantize", bert, out, "--codec", spec, "--rounding", rounding).exit_code == 0
    written = read(out)
    return {name: written.read(name, 0, written.stored[name].nbytes) for name in written.encodings}


@OF_BERT
def test_a_model_has_the_same_bytes_either_way(bert: Path, tmp_path: Path, spec: str) -> None:
    transformers = pytest.importorskip("transformers")
    written = rows_of(bert, tmp_path / "out", spec, "nearest")
    model = transformers.BertModel.from_pretrained(bert)
    nc.quantize_(model, spec)
    state = model.state_dict()
    assert written.keys() == nc.nn.encodings(model).keys()
    assert all(torch.equal(rows.view_as(state[name]), state[name]) for name, rows in written.items())


@OF_BERT
def test_a_search_of_a_folder_has_no_model_that_could_run(bert: Path, tmp_path: Path, spec: str) -> None:
    """`quantize_` runs random tokens through the model; the command reads tiles, and columns count alike."""
    transformers = pytest.importorskip("transformers")
    written, codec = rows_of(bert, tmp_path / "out", spec, "search"), nc.codec(spec)
    state = transformers.BertModel.from_pretrained(bert).state_dict()
    for name, rows in written.items():
        expected = codec.encode_searched(state[name], gain=GAIN)
        assert torch.equal(rows.view_as(expected), expected), name


def test_gptq_rounds_on_the_text_of_a_file(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(" ".join(WORDS[i : i + 9]) for i in range(30)))
    options = ["--codec", "int4:block=16", "--rounding", "gptq", "--data", tmp_path / "text.txt"]
    result = run("quantize", bert, tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.glob(".*"))  # rows that were kept until the folder was written
    nearest = run("quantize", bert, tmp_path / "nearest", "--codec", "int4:block=16")
    assert nearest.exit_code == 0
    name = "encoder.layer.0.output.dense.weight"
    one, other = (read(tmp_path / folder) for folder in ("out", "nearest"))
    assert one.stored[name] == other.stored[name]  # as many bytes
    assert one.encodings == other.encodings
    rows = [checkpoint.read(name, 0, checkpoint.stored[name].nbytes) for checkpoint in (one, other)]
    assert not torch.equal(*rows)


def test_gptq_needs_a_models_folder_and_text(source: Path, bert: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    options = ["--rounding", "gptq", "--data", tmp_path / "empty.txt"]
    for folder, message in ((source, "needs its folder, with config.json"), (bert, "holds no text")):
        result = run("quantize", folder, tmp_path / "out", *options)
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", [3, 3.5, 4, 4.5])
def test_a_budget_by_searched_scales(tmp_path: Path, bits: float) -> None:
    torch.manual_seed(0)
    nc.save(nn.Sequential(*(nn.Linear(512, 64) for _ in range(6))), tmp_path / "model.safetensors")
    found = {}
    for rounding in ("nearest", "search"):
        result = run("inspect", tmp_path / "model.safetensors", "--budget", bits, "--rounding", rounding, "--json")
        assert result.exit_code == 0, result.output
        found[rounding] = json.loads(result.stdout)["plan"]
        assert found[rounding]["bits"] <= bits
    assert found["search"]["sqnr_db"] > found["nearest"]["sqnr_db"]


def test_inspect_has_no_data(tmp_path: Path) -> None:
    nc.save(nn.Linear(8, 8), tmp_path / "model.safetensors")
    result = run("inspect", tmp_path / "model.safetensors", "--rounding", "gptq")
    assert result.exit_code == 2
    assert "expected nearest or search" in " ".join(result.output.split())
