"""`narrowcast inspect`, run as a user runs it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app
from narrowcast.codecs.payload import encode_rows


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state() -> dict[str, Tensor]:
    return {
        "layers.0.up.weight": random(64, 128, seed=1),
        "layers.0.down.weight": random(32, 256, seed=2).bfloat16(),
        "layers.0.up.bias": random(64),
        "layers.0.norm.weight": random(128),
        "layers.1.up.weight": random(64, 128, seed=3) ** 5,
        "layers.1.experts.gate_up_proj": random(4, 16, 64, seed=4),
        "conv.weight": random(8, 4, 3, 3, seed=5),
        "position_ids": torch.arange(10).view(2, 5),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(state(), path)
    return path


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def as_json(*arguments: object) -> Any:
    result = inspect(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def words(result: Result) -> str:
    """What was said on either stream, with its lines joined."""
    return re.sub(r"\s+", " ", result.output)


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_every_weight_is_shown_with_its_range_and_its_sqnr_in_every_codec(file: Path) -> None:
    found = {
        entry["name"]: entry for entry in as_json(file, "--codecs", "int8,int4:block=32,scale=fp32,nf4")["weights"]
    }
    weights = {name: value for name, value in state().items() if value.dim() > 1 and value.is_floating_point()}
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        entry, exact = found[name], value.float()
        assert (entry["shape"], entry["codec"]) == (list(value.shape), None)
        assert entry["dtype"] == str(value.dtype).removeprefix("torch.")
        assert (entry["min"], entry["max"]) == (float(exact.min()), float(exact.max()))
        # fp64 sums over at most 8192 elements.
        assert entry["std"] == pytest.approx(float(exact.double().std(correction=0)), rel=1e-11)
        for spec, sqnr in entry["sqnr_db"].items():
            rows = encode_rows(exact, spec, lead=1 if name == "conv.weight" else None)
            noise = (exact - rows.decode()).double().square().sum()
            assert sqnr == pytest.approx(float(10 * torch.log10(exact.double().square().sum() / noise)), rel=1e-9)
            assert entry["bytes"][spec] == rows.nbytes
        assert list(entry["sqnr_db"]) == ["int8", "int4:block=32,scale=fp32", "nf4"]


def test_the_table_has_a_line_for_every_weight(file: Path) -> None:
    result = inspect(file, "--codecs", "int8,int4")
    assert result.exit_code == 0
    lines = {line.split("│")[1].strip(): line.split("│") for line in result.stdout.splitlines() if "│" in line}
    cells = [cell.strip() for cell in lines["layers.0.down.weight"][1:-1]]
    assert cells[1:3] == ["32x256", "bfloat16"]
    assert 40 < float(cells[6]) < 50
    assert 18 < float(cells[7]) < 22
    assert "5 weights; 3 other tensors" in words(result)


def test_a_folder_with_shards_is_read_by_its_index(tmp_path: Path, file: Path) -> None:
    nc.save(state(), tmp_path / "shards", max_shard_size=20_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    sharded = sorted(as_json(tmp_path / "shards")["weights"], key=lambda entry: entry["name"])
    assert sharded == sorted(as_json(file)["weights"], key=lambda entry: entry["name"])


def test_what_is_quantized_already_is_shown_with_its_codec(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    nc.quantize_(model, "int4:block=32", rules={"1": None})
    nc.save(model, tmp_path / "model.safetensors")
    first, second = as_json(tmp_path)["weights"]
    assert (first["name"], first["codec"], first["shape"]) == ("0.weight", "int4:block=32", [32, 64])
    assert first["sqnr_db"] == {}
    assert first["max"] == float(model[0].decoded().max())
    assert second["codec"] is None
    result = inspect(tmp_path, "--budget", 5, "--rules-out", tmp_path / "rules.toml")
    assert "int4:block=32 of float32" in words(result)
    assert "Left as it is: 0.weight (is int4:block=32 already)" in words(result)


def test_a_weight_that_is_not_finite_is_shown_and_left_alone(tmp_path: Path) -> None:
    bad = random(16, 64)
    bad[3, 5] = math.nan
    save_file({"bad.weight": bad, "good.weight": random(16, 64)}, tmp_path / "model.safetensors")
    rules = tmp_path / "rules.toml"
    result = inspect(tmp_path, "--budget", 8, "--rules-out", rules)
    assert result.exit_code == 0
    assert "bad.weight (holds a NaN or an infinity)" in words(result)
    assert '"^bad$" = false' in rules.read_text()
    assert as_json(tmp_path)["weights"][0]["sqnr_db"]["int8"] is None


def test_memory_does_not_grow_with_the_weight(tmp_path: Path) -> None:
    """A weight of 256 MB, in a process of its own; pages of the mapped file are the system's and not counted."""
    save_file({"big.weight": torch.zeros(16384, 4096)}, tmp_path / "model.safetensors")
    code = """
import sys
from typer.testing import CliRunner
import torch, narrowcast as nc
from narrowcast.cli import app
torch.set_num_threads(1)
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
from narrowcast.codecs import sensitivity as statistics
add, seen = statistics._add, []
def spy(*arguments):
    add(*arguments)
    seen.append(anonymous())
statistics._add = spy
assert CliRunner().invoke(app, ["inspect", sys.argv[1], "--codecs", "int8,int4", "--json"]).exit_code == 0
print(max(seen) - seen[0], len(seen))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    # What is freed is given back at once: by itself, glibc's allocator keeps up to 60 MB, or more.
    surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=surroundings)
    growth, tiles = map(int, done.stdout.split())
    assert tiles == 64
    assert growth < 13 << 20  # since the first tile: less than another tile, its rows and its decoding


# -- the best mix ----------------------------------------------------------------------------------------------------


def test_a_budget_gives_rules_that_quantize_takes_and_that_keep_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(256, 512), "down": nn.Linear(512, 256), "head": nn.Linear(256, 64)})
    with torch.no_grad():
        model["head"].weight.pow_(5)
    nc.save(model, tmp_path / "model.safetensors")
    rules = tmp_path / "rules.toml"
    plan = as_json(tmp_path, "--budget", 4.5, "--rules-out", rules)["plan"]
    assert plan["exact"] == (plan["sqnr_db"] == pytest.approx(plan["bound_db"], rel=1e-12))
    assert plan["sqnr_db"] <= plan["bound_db"]
    assert plan["bits"] <= 4.5
    assert plan["sqnr_db"] > plan["uniform"]["sqnr_db"]

    done = CliRunner().invoke(app, ["quantize", str(tmp_path), str(tmp_path / "out"), "--rules", str(rules)])
    assert done.exit_code == 0, done.output
    stored = {name: rows for name, rows in nc.load(tmp_path / "out").items() if not isinstance(rows, Tensor)}
    assert {name: rows.codec.spec for name, rows in stored.items()} == plan["codecs"]
    numel = sum(rows.shape.numel() for rows in stored.values())
    assert 8 * sum(rows.nbytes for rows in stored.values()) / numel == plan["bits"]

    lines = re.findall(r'^("\^.*") = "(.*)"$', rules.read_text(), re.MULTILINE)
    report = nc.quantize_(model, None, rules={json.loads(key): spec for key, spec in lines})
    assert {entry.name: entry.codec for entry in report.entries} == plan["codecs"]
    assert report.unused_rules == []


def test_names_are_matched_whole_and_literally(tmp_path: Path) -> None:
    names = ["up", "up.up", "upxup", 'odd"name\\', "ümlaut"]
    save_file({f"{name}.weight": random(8, 64, seed=i) for i, name in enumerate(names)}, tmp_path / "model.safetensors")
    rules = tmp_path / "rules.toml"
    plan = as_json(tmp_path, "--budget", 7, "--rules-out", rules)["plan"]
    done = CliRunner().invoke(app, ["quantize", str(tmp_path), str(tmp_path / "out"), "--rules", str(rules)])
    assert done.exit_code == 0, done.output
    assert {name: rows.codec.spec for name, rows in nc.load(tmp_path / "out").items()} == plan["codecs"]


def test_what_is_skipped_is_left_alone_by_the_rules_and_out_of_the_budget(tmp_path: Path, file: Path) -> None:
    rules = tmp_path / "rules.toml"
    result = inspect(file, "--budget", 5, "--rules-out", rules, "--skip", "conv", "--skip", r"experts")
    assert result.exit_code == 0
    text = rules.read_text()
    assert '"^conv$" = false' in text
    assert r'"^layers\\.1\\.experts\\.gate_up_proj$" = false' in text
    assert "conv.weight (--skip conv)" in words(result)
    assert f"Rules written to {rules}" in words(result)


def test_the_summary_sets_the_mix_beside_the_best_single_codec(tmp_path: Path, file: Path) -> None:
    result = inspect(file, "--budget", 6, "--rules-out", tmp_path / "rules.toml")
    assert re.search(
        r"Best mix: 5\.\d+ bits per weight, mean SQNR [\d.]+ dB; no mix exceeds [\d.]+ dB\. "
        r"Best single codec: int5, 5\.\d+ bits per weight, mean SQNR [\d.]+ dB\.",
        words(result),
    )
    # Where every weight gets its best codec, the mix reaches its bound.
    assert "no mix of these codecs does better" in words(inspect(file, "--budget", 10))


def test_a_budget_that_cannot_be_names_the_smallest_that_can(tmp_path: Path, file: Path) -> None:
    rules = tmp_path / "rules.toml"
    result = inspect(file, "--budget", 2, "--rules-out", rules)
    assert result.exit_code == 2
    found = re.search(r"budget=2 bits per weight: .* Ask for ([\d.]+) or more", words(result))
    assert found
    assert not rules.exists()
    assert inspect(file, "--budget", found[1], "--rules-out", rules).exit_code == 0
    assert inspect(file, "--budget", float(found[1]) - 0.002, "--rules-out", rules, "--overwrite").exit_code == 2


def test_a_budget_writes_nothing_unless_it_is_asked_to(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "rules.toml").write_text("mine")
    result = inspect(file, "--budget", 5)
    assert result.exit_code == 0
    assert words(result).endswith("Keep this mix with --rules-out rules.toml. ")
    assert as_json(file, "--budget", 5)["plan"]["rules"] is None
    assert [(path.name, path.read_text()) for path in here.iterdir()] == [("rules.toml", "mine")]


def test_rules_that_are_there_are_replaced_only_with_overwrite(tmp_path: Path, file: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("mine")
    result = inspect(file, "--budget", 5, "--rules-out", rules)
    assert result.exit_code == 2
    assert "rules.toml': exists already. Pass --overwrite, or name another file." in words(result)
    assert rules.read_text() == "mine"
    assert inspect(file, "--budget", 5, "--rules-out", rules, "--overwrite").exit_code == 0
    assert "[rules]" in rules.read_text()


# -- the figure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_drawn(ending: str, magic: bytes, tmp_path: Path, file: Path) -> None:
    picture = tmp_path / f"figure.{ending}"
    assert inspect(file, "--plot", picture).exit_code == 0
    assert picture.read_bytes().startswith(magic)


def test_a_figure_names_every_weight_and_codec_and_rings_the_chosen(tmp_path: Path, file: Path) -> None:
    from narrowcast.cli.inspect.plot import draw
    from narrowcast.codecs.mix import mix_codecs
    from narrowcast.codecs.sensitivity import measure

    x = random(8, 64)
    statistics = [measure("a.weight", 8, 64, lambda i, j: x[i:j], [nc.codec("int8"), nc.codec("int4")])]
    figure = draw(statistics, mix_codecs(statistics, ["int8", "int4"], 6.0), tmp_path / "figure.png")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a.weight"]
    dots = {dots.get_label(): dots.get_offsets().tolist() for dots in axes.collections}
    assert dots["int8"] == [[statistics[0].sqnr("int8"), 0.0]]
    assert dots["chosen"] == dots["int4"]
    assert sorted(words.get_text() for words in axes.texts) == ["int4", "int8"]
    assert figure.legends == []  # names stand at the dots


def test_a_figure_of_an_unknown_kind_or_nowhere_is_refused(tmp_path: Path, file: Path) -> None:
    for name, said in (("figure.docx", ".png, .svg or .pdf"), ("nodir/figure.png", "there is no folder")):
        result = inspect(file, "--plot", tmp_path / name, "--codecs", "int9")  # refused before the rest is looked at
        assert result.exit_code == 2
        assert said in words(result)


def test_without_matplotlib_the_error_says_what_to_install(file: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from narrowcast.cli import app;"
        f"app(['inspect', {str(file)!r}, '--plot', {str(tmp_path / 'figure.png')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--plot: drawing needs the package matplotlib" in done.stderr
    assert "pip install 'narrowcast[plot]'" in done.stderr


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "5", "--codecs", "int9"], "codec 'int9' does not exist"),
        (["--budget", "5", "--codecs", " , "], "names no codec"),
        (["--budget", "-1"], "positive number of bits"),
        (["--budget", "5", "--skip", "("], "--skip '(': not a regular expression"),
        (["--budget", "5", "--skip", "."], "no weight to spend it on"),
    ],
)
def test_arguments_that_cannot_be_end_with_2_and_the_reason(arguments: list[str], message: str, file: Path) -> None:
    result = inspect(file, *arguments, "--rules-out", file.parent / "rules.toml")
    assert result.exit_code == 2
    assert message in words(result)


def test_a_file_that_is_no_checkpoint_ends_with_2_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    result = inspect(tmp_path)
    assert result.exit_code == 2
    assert "not a whole safetensors file" in words(result)
    assert inspect(tmp_path / "nothing").exit_code == 2


def test_codecs_may_have_options_of_several_parts(file: Path) -> None:
    weight = as_json(file, "--codecs", "int8, int4:block=32,scale=fp32,nf4:block=128,int8")["weights"][0]
    assert list(weight["sqnr_db"]) == ["int8", "int4:block=32,scale=fp32", "nf4:block=128"]
