"""`narrowcast quantize`, run as a user runs it: the bytes of quantize_, in bounded memory, cut off and resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.checkpoint import read
from narrowcast.cli import app
from ports import free_port

INDEX = "model.safetensors.index.json"
RULES = "[rules]\n'^layers\\.0\\.' = \"int8:block=row\"\nhead = false\n"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)
        self.up = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(96)
        self.conv = nn.Conv2d(4, 4, 3)
        self.conv1d = nn.Conv1d(8, 8, 5)


class Experts(nn.Module):
    """As mixtures of experts hold their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 64))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 32))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.experts = Experts()
        self.head = nn.Linear(64, 50)
        self.register_buffer("steps", torch.arange(6).view(2, 3))
        self.position = nn.Parameter(torch.randn(1, 7, 64))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as Hugging Face writes it: shards with an index, a configuration, a tokenizer, and other weights."""
    torch.manual_seed(0)
    folder = tmp_path / "source"
    nc.save(Model().bfloat16(), folder, max_shard_size="13kB")
    (folder / "config.json").write_text('{"model_type": "small", "hidden_size": 64}')
    for name in ("tokenizer.json", "merges.txt", "spiece.model", "chat_template.jinja", "README.md", "LICENSE"):
        (folder / name).write_text(name)
    for name in ("pytorch_model.bin", "model.gguf", "pytorch_model.bin.index.json", ".gitattributes"):
        (folder / name).write_text("not this")
    (folder / "onnx").mkdir()
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def report(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def failed(code: int, *arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def model_like(source: Path) -> Model:
    model = Model().bfloat16()
    nc.load(source, model)
    return model


# -- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int4:block=64", "int8", "nf4", "apot4", "fp8_e4m3", "int3", "int4:stochastic=true"])
def test_the_bytes_are_those_of_quantize_in_memory(source: Path, tmp_path: Path, codec: str) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    report(source, tmp_path / "target", "--codec", codec, "--rules", tmp_path / "rules.toml")
    wanted = model_like(source)
    nc.quantize_(wanted, codec, rules={r"^layers\.0\.": "int8:block=row", "head": None})
    with torch.device("meta"):
        found = Model()
    nc.load(tmp_path / "target", found)
    assert nc.nn.encodings(found) == nc.nn.encodings(wanted)
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_the_report_says_what_became_of_each_tensor(source: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES + "'misspelt' = 'int2'\n")
    found = report(source, tmp_path / "target", "--codec", "int4", "--rules", tmp_path / "rules.toml")
    stored = read(source).stored
    assert found["quantized"] + found["copied"] == len(stored)
    assert {codec: line["tensors"] for codec, line in found["codecs"].items()} == {"int4": 7, "int8:block=row": 5}
    assert found["bytes_before"] == sum(tensor.nbytes for tensor in stored.values())
    assert found["bytes_after"] == sum(tensor.nbytes for tensor in read(tmp_path / "target").stored.values())
    assert found["unused_rules"] == ["misspelt"]
    reasons = {name: found["skips"][name] for name in ("head.weight", "steps", "head.bias", "position")}
    assert reasons == {
        "head.weight": "a rule leaves it alone",
        "steps": "is int64",
        "head.bias": "is a vector or a number",
        "position": "is not called weight",
    }


def test_the_table_says_the_same(source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "target", "--codec", "int4")
    assert result.exit_code == 0
    lines = {line.split("│")[1].strip(): line.split("│") for line in result.stdout.splitlines() if line.startswith("│")}
    assert lines.keys() == {"int4", "copied", "all"}
    assert lines["int4"][2].strip() == "13"
    words = " ".join(result.stdout.split())
    assert "files not copied: model.gguf, onnx, pytorch_model.bin, pytorch_model.bin.index.json" in words
    assert "not quantized (is int64): steps" in words


def test_files_keep_their_names_and_small_ones_go_along(source: Path, tmp_path: Path) -> None:
    found = report(source, tmp_path / "target", "--codec", "int4")
    shards = {name for name in content(source) if name.endswith(".safetensors")}
    assert len(shards) > 3
    along = {"tokenizer.json", "merges.txt", "spiece.model", "chat_template.jinja", "README.md", "LICENSE"}
    assert content(tmp_path / "target").keys() == shards | along | {"config.json", "model.safetensors.index.json"}
    assert (tmp_path / "target" / "merges.txt").read_text() == "merges.txt"
    assert sorted(found["files_copied"]) == sorted(along | {"config.json"})


def test_config_json_says_what_was_done(source: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    report(source, tmp_path / "target", "--codec", "int4", "--rules", tmp_path / "rules.toml")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == {"model_type": "small", "hidden_size": 64}
    weights = quantization.pop("weights")
    assert quantization == {
        "quant_method": "narrowcast",
        "codec": "int4",
        "rules": {r"^layers\.0\.": "int8:block=row", "head": None},
    }
    assert weights["embed"] == weights["experts.gate_up_proj"] == weights["layers.1.attention.in_proj_weight"] == "int4"
    assert weights["layers.0.up"] == "int8:block=row"
    assert "head" not in weights


@pytest.mark.parametrize(("size", "limit"), [("5GB", 5 * 10**9), ("4kB", 4000)])
def test_max_shard_size_packs_the_files_anew(source: Path, tmp_path: Path, size: str, limit: int) -> None:
    report(source, tmp_path / "plain", "--codec", "int4")
    found = report(source, tmp_path / "target", "--codec", "int4", "--max-shard-size", size)
    files = [file.contents.tensors.values() for file in read(tmp_path / "target").files]
    assert len(files) == len(found["files"])
    assert all(len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= limit for tensors in files)
    assert (len(files) > 5) == (limit == 4000)
    first, second = nc.load(tmp_path / "plain"), nc.load(tmp_path / "target")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].data, second[name].data) for name in first)


def test_a_file_becomes_a_file_or_a_folder(source: Path, tmp_path: Path) -> None:
    nc.save(nc.load(source), tmp_path / "one.safetensors")
    report(tmp_path / "one.safetensors", tmp_path / "new" / "two.safetensors", "--codec", "int4")
    report(tmp_path / "one.safetensors", tmp_path / "three", "--codec", "int4")
    assert [*content(tmp_path / "new")] == ["two.safetensors"]
    assert [*content(tmp_path / "three")] == ["model.safetensors"]
    assert content(tmp_path / "new")["two.safetensors"] == content(tmp_path / "three")["model.safetensors"]


def test_a_folder_that_transformers_would_write_is_read(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    safetensors.torch.save_file(
        {"up.weight": torch.randn(8, 64), "norm.weight": torch.ones(64)},
        tmp_path / "source" / "model.safetensors",
        {"format": "pt"},
    )
    report(tmp_path / "source", tmp_path / "target", "--codec", "int4")
    assert read(tmp_path / "target").encodings.keys() == {"up.weight"}


def test_tied_weights_stay_tied_and_a_rule_for_one_is_a_rule_for_both(tmp_path: Path) -> None:
    weight = torch.randn(8, 64)
    nc.save({"embed.weight": weight, "head.weight": weight}, tmp_path / "x.safetensors")
    report(tmp_path / "x.safetensors", tmp_path / "y.safetensors", "--codec", "int4")
    assert read(tmp_path / "y.safetensors").encodings.keys() == {"embed.weight", "head.weight"}
    (tmp_path / "rules.toml").write_text("[rules]\nhead = false")
    found = report(tmp_path / "x.safetensors", tmp_path / "z.safetensors", "--rules", tmp_path / "rules.toml")
    assert found["skips"] == {"embed.weight": "tied to head.weight, which a rule leaves alone"}
    (tmp_path / "rules.toml").write_text("[rules]\nhead = 'int2'")
    words = failed(2, tmp_path / "x.safetensors", tmp_path / "w.safetensors", "--rules", tmp_path / "rules.toml")
    assert "one tied weight, which can have one codec" in words


def test_rules_may_be_json(source: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text('{"rules": {"": null}}')
    assert report(source, tmp_path / "target", "--rules", tmp_path / "rules.json")["quantized"] == 0


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[rules]\n'(' = 'int4'", "'(' is not a regular expression"),
        ("[rules]\nup = 'int44'", "rules['up']: codec 'int44' does not exist"),
        ("[rules]\nup = true", "rules['up']: codec=True"),
        ("[rules]\nup = 'int44'", "write None (false in a file of rules)"),
        ("[rules]\nup = 3", "rules['up']: codec=3"),
        ("[rules", "cannot be read"),
        ("up = 'int4'", "expected one table, [rules]"),
        ("[rules]\n[other]", "expected one table, [rules]"),
        ("rules = 3", "expected one table, [rules]"),
    ],
)
def test_rules_that_cannot_be_are_a_usage_error(source: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "rules.toml").write_text(text)
    assert words in failed(2, source, tmp_path / "target", "--rules", tmp_path / "rules.toml")
    assert not (tmp_path / "target").exists()


def test_the_hint_about_toml_is_for_toml_that_is_there(source: Path, tmp_path: Path) -> None:
    hint = "In TOML, write regular expressions in single quotes."
    (tmp_path / "rules.toml").write_text("[rules")
    (tmp_path / "rules.json").write_text("[rules")
    assert hint in failed(2, source, tmp_path / "target", "--rules", tmp_path / "rules.toml")
    assert hint not in failed(2, source, tmp_path / "target", "--rules", tmp_path / "rules.json")
    said = failed(2, source, tmp_path / "target", "--rules", tmp_path / "nope.toml")
    assert said.strip().endswith("nope.toml: cannot be read: No such file or directory. Check the path.")


def test_arguments_that_cannot_be_are_usage_errors(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert "codec 'int44' does not exist" in failed(2, source, target, "--codec", "int44")
    assert "SRC" in failed(2, tmp_path / "nowhere", target)
    assert "cannot be read" in failed(2, source, target, "--rules", tmp_path / "nowhere.toml")
    assert "'5 parsecs'" in failed(2, source, target, "--max-shard-size", "5 parsecs")
    assert not target.exists()


def test_the_source_is_never_the_target(source: Path, tmp_path: Path) -> None:
    before = content(source)
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / ".." / "source", tmp_path / "link"):
        assert "is the source, or holds it" in failed(2, source, target, "--overwrite")
    shard = next(source.glob("*.safetensors"))
    assert "is the source, or holds it" in failed(2, shard, shard, "--overwrite")
    assert "is the source, or holds it" in failed(2, shard, source, "--overwrite")
    assert content(source) == before


def test_a_target_that_is_not_empty_is_left_alone_unless_asked(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    assert "is not empty" in failed(2, source, target)
    assert content(target) == {"thesis.txt": b"mine"}
    report(source, target, "--overwrite")
    assert "is not empty" in failed(2, source, target)
    first = content(target)
    report(source, target, "--codec", "int4", "--overwrite")
    shards = {name for name in content(target) if name.endswith(".safetensors")}
    assert shards == set(json.loads((target / INDEX).read_text())["weight_map"].values())  # the old ones are gone
    assert len(shards) == len(read(source).files)
    assert {*content(target)} - shards == {name for name in first if not name.endswith(".safetensors")}
    assert (target / "thesis.txt").read_text() == "mine"
    assert {encoding.codec.spec for encoding in read(target).encodings.values()} == {"int4"}
    assert "is a file" in failed(2, source, target / "thesis.txt")
    nc.save({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    assert "exists already" in failed(2, source, tmp_path / "x.safetensors")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_weight_that_is_not_finite_is_refused_unless_asked(tmp_path: Path, value: float) -> None:
    weight = torch.ones(4, 64)
    weight[2, 3] = value
    nc.save({"good.weight": torch.ones(4, 64), "bad.weight": weight}, tmp_path / "source", max_shard_size=1)
    words = failed(2, tmp_path / "source", tmp_path / "target", "--codec", "int4:block=64")
    assert "'bad.weight' holds an infinity or a NaN" in words
    assert '"bad" = false' in words
    report(tmp_path / "source", tmp_path / "other", "--codec", "int4:block=64", "--allow-nonfinite")
    rows = nc.load(tmp_path / "other")["bad.weight"]
    assert rows.decode()[2].isnan().all()  # type: ignore[union-attr]
    assert rows.decode()[[0, 1, 3]].isfinite().all()  # type: ignore[union-attr]


def test_what_is_quantized_already_is_refused(source: Path, tmp_path: Path) -> None:
    report(source, tmp_path / "once")
    assert '"quantization_config"' in failed(2, tmp_path / "once", tmp_path / "twice")
    (tmp_path / "once" / "config.json").unlink()
    assert "quantized already. Start from the original" in failed(2, tmp_path / "once", tmp_path / "twice")


def test_weights_that_gpt2_keeps_transposed_are_refused_unless_left(tmp_path: Path) -> None:
    nc.save({"h.0.attn.c_attn.weight": torch.ones(64, 192), "wte.weight": torch.ones(9, 64)}, tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "gpt2"}')
    assert "store these weights as [in, out]" in failed(2, tmp_path / "source", tmp_path / "target")
    (tmp_path / "rules.toml").write_text("[rules]\n'c_attn|q_attn|c_fc|c_proj' = false")
    report(tmp_path / "source", tmp_path / "target", "--rules", tmp_path / "rules.toml")
    assert read(tmp_path / "target").encodings.keys() == {"wte.weight"}


def test_a_damaged_source_is_refused(source: Path, tmp_path: Path) -> None:
    shard = next(source.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "not a whole safetensors file" in failed(2, source, tmp_path / "target")


# -- processes --------------------------------------------------------------------------------------------------------

MAIN = "from narrowcast.cli import app; app()"
# Stops for good inside the fourth weight, when the third file is there and a part of the fourth is written.
HANGS = (
    """
import sys, time
from narrowcast.checkpoint import parts
encode_tiles, calls = parts.encode_tiles, []
def slow(*arguments, **options):
    calls.append(0)
    if len(calls) == 4:
        print("here", flush=True)
        time.sleep(600)
    yield from encode_tiles(*arguments, **options)
parts.encode_tiles = slow
"""
    + MAIN
)


def one_weight_a_file(folder: Path, count: int, rows: int = 16) -> Path:
    torch.manual_seed(0)
    nc.save({f"layers.{i}.weight": torch.randn(rows, 64) for i in range(count)}, folder, max_shard_size=1)
    return folder


def killed(source: Path, target: Path, *options: str) -> None:
    arguments = [sys.executable, "-c", HANGS, "quantize", str(source), str(target), "--codec", "int4", *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_a_run_that_was_killed_is_taken_up_where_it_was(tmp_path: Path) -> None:
    source, target = one_weight_a_file(tmp_path / "source", 6), tmp_path / "target"
    killed(source, target)
    done = sorted(path.name for path in target.glob("model-*.safetensors"))
    assert done == [f"model-0000{i}-of-00006.safetensors" for i in (1, 2, 3)]
    assert len([*target.glob(".*.narrowcast-tmp")]) == 1
    with pytest.raises(nc.errors.CheckpointError):
        nc.load(target)
    assert "holds no unfinished run with these arguments" in failed(2, source, target, "--codec", "int8")
    damaged = target / done[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    times = {name: (target / name).stat().st_mtime_ns for name in done}
    assert report(source, target, "--codec", "int4")["files_kept"] == [done[0], done[2]]
    assert {name for name in done if (target / name).stat().st_mtime_ns == times[name]} == {done[0], done[2]}
    report(source, tmp_path / "at once", "--codec", "int4")
    assert content(target) == content(tmp_path / "at once")


@pytest.mark.parametrize("old", ["shards", "file"])
def test_a_run_over_a_checkpoint_leaves_it_loadable_until_the_new_one_is_there(tmp_path: Path, old: str) -> None:
    source, target = one_weight_a_file(tmp_path / "source", 6), tmp_path / "target"
    before = {f"layers.{i}.weight": torch.full((16, 64), float(i)) for i in range(6)}
    nc.save(before, target, max_shard_size=1 if old == "shards" else "5GB")
    killed(source, target, "--overwrite")
    found = nc.load(target)
    assert all(torch.equal(found[name].data, before[name]) for name in before)
    # The same command without --overwrite goes on; with it, or with other arguments, a run begins anew.
    assert len(report(source, target, "--codec", "int4")["files_kept"]) == 3
    report(source, tmp_path / "at once", "--codec", "int4")
    first, second = nc.load(target), nc.load(tmp_path / "at once")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].data, second[name].data) for name in first)
    assert {path.name for path in target.iterdir()} == {
        INDEX,
        *json.loads((target / INDEX).read_text())["weight_map"].values(),
    }


def test_a_run_to_one_file_takes_the_place_of_shards_and_back(tmp_path: Path) -> None:
    source, target = one_weight_a_file(tmp_path / "source", 6), tmp_path / "target"
    report(source, target, "--codec", "int4")
    for size in ("5GB", "1", "5GB"):
        report(source, target, "--codec", "int4", "--max-shard-size", size, "--overwrite")
        names = {"model.safetensors"} if size == "5GB" else {INDEX, *(file.path.name for file in read(target).files)}
        assert {path.name for path in target.iterdir()} == names
        assert len(nc.load(target)) == 6


def test_files_of_a_source_that_was_saved_again_get_the_names_of_a_first_save(tmp_path: Path) -> None:
    source = one_weight_a_file(one_weight_a_file(tmp_path / "source", 3), 3)
    assert "model-00001-of-00003.safetensors" not in content(source)
    found = report(source, tmp_path / "target", "--codec", "int4")
    assert found["files"] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_run_on_another_source_does_not_take_up_the_old_one(tmp_path: Path) -> None:
    source, target = one_weight_a_file(tmp_path / "source", 6), tmp_path / "target"
    killed(source, target)
    shutil.rmtree(source)
    one_weight_a_file(source, 6)
    assert "holds no unfinished run" in failed(2, source, target, "--codec", "int4")
    assert report(source, target, "--codec", "int4", "--overwrite")["files_kept"] == []


def test_two_processes_under_torchrun_share_the_files(tmp_path: Path) -> None:
    source = one_weight_a_file(tmp_path / "source", 5)
    (source / "config.json").write_text("{}")
    (tmp_path / "main.py").write_text(MAIN)
    arguments = [tmp_path / "main.py", "quantize", source, tmp_path / "target", "--codec", "int4", "--json"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["files"]) == 5  # one of them prints
    report(source, tmp_path / "alone", "--codec", "int4")
    assert content(tmp_path / "target") == content(tmp_path / "alone")


def test_an_error_on_one_process_ends_all_of_them_in_the_same_words(tmp_path: Path) -> None:
    source = tmp_path / "source"
    weights = {f"layers.{i}.weight": torch.full((16, 64), math.nan if i == 1 else 1.0) for i in range(3)}
    nc.save(weights, source, max_shard_size=1)
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [sys.executable, "-c", MAIN, "quantize", str(source), str(tmp_path / "target")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(arguments, env={**common, "RANK": str(rank)}, **pipes) for rank in range(2)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 2
        assert "'layers.1.weight' holds an infinity or a NaN" in " ".join(errors.split())
    # What was finished stays for the next run.
    assert len([*(tmp_path / "target").glob("*.safetensors")]) == 2


# VmHWM is the peak of this process alone; ru_maxrss begins with the peak of the one that started it.
PEAK = """
import sys
from typer.testing import CliRunner
from narrowcast.cli import app
def run(source, target):
    result = CliRunner().invoke(app, ["quantize", source, target, "--codec", "int8"])
    assert result.exit_code == 0, result.output
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = run(sys.argv[1], sys.argv[1] + ".out")
print(run(sys.argv[2], sys.argv[2] + ".out") - before)
"""


def test_converting_holds_one_tensor_and_its_encoding(tmp_path: Path) -> None:
    one_weight_a_file(tmp_path / "small", 1)
    large = {f"layers.{i}.weight": torch.ones(4096, 1024) for i in range(12)}
    nc.save(large, tmp_path / "large")
    arguments = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # KB. Each tensor has 16 MB and its encoding 4.2 MB. 12 MB are left for the allocator, and pages rounded up to 2 MB:
    # less than a second tensor, so that holding two would fail. The file has 192 MB, encoded 50 MB.
    assert int(done.stdout) < (16 + 4.2 + 12) * 1024
