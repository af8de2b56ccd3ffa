"""The command line as a whole: it starts fast, explains itself, and fails in one line."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import narrowcast as nc
from narrowcast.cli import app

COMMANDS = {
    *("demo", "doctor", "codecs", "encode", "decode", "inspect", "quantize", "generate", "plan", "netlab"),
    *(f"bench {name}" for name in ("codec", "wire", "training", "linear", "grids")),
}
# Asks every command for its help, in one process, and says what was imported.
HELPS = """
import json, sys
from typer.main import get_command
from typer.testing import CliRunner
from narrowcast.cli import app
def leaves(command, path):
    below = getattr(command, "commands", None)
    return [path] if below is None else [leaf for name, own in below.items() for leaf in leaves(own, [*path, name])]
paths = [[], ["bench"], *leaves(get_command(app), [])]
found = {" ".join(path): CliRunner().invoke(app, [*path, "--help"]) for path in paths}
assert all(result.exit_code == 0 for result in found.values())
heavy = sorted({"torch", "numpy", "safetensors", "matplotlib"} & set(sys.modules))
print(json.dumps([{path: result.stdout for path, result in found.items()}, heavy]))
"""


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def invoke(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, words)], env={"RANK": None, "WORLD_SIZE": None})
    return result.exit_code, result.stdout, result.stderr


# -- help -------------------------------------------------------------------------------------------------------------


def test_every_command_explains_itself_with_an_example_and_without_torch() -> None:
    texts, heavy = json.loads(fresh(HELPS))
    assert heavy == []
    assert texts.keys() - {"", "bench"} == COMMANDS
    for path in COMMANDS:
        # plan has two ways to be called, and an example for each.
        assert re.search(rf"(Example|On paper): (.*\s)?narrowcast {path} ", texts[path]), path
    assert "Exit codes: 0 success" in texts[""]
    # rich takes a word in square brackets for markup, and drops it unless it is escaped.
    assert "a table [rules] of regex" in " ".join(re.sub("[│╭╰─]", "", texts["quantize"]).split())


def test_help_takes_less_than_400_ms() -> None:
    # Processor time, since others are at work too. The best of 5: a busy machine can only make it slower.
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "narrowcast.cli", "--help"], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if times[-1] < 0.4:
            return
    pytest.fail(f"--help took {times} s")


def test_the_version_is_the_packages() -> None:
    assert invoke("--version") == (0, f"{nc.__version__}\n", "")


# -- codecs -----------------------------------------------------------------------------------------------------------


def test_codecs_lists_every_codec_with_the_bytes_that_it_takes() -> None:
    code, out, _ = invoke("codecs", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [row["codec"] for row in rows] == nc.list_codecs()
    for row in rows:
        codec = nc.codec(row["codec"])
        assert (row["bits"], row["block"]) == (codec.bits, codec.block)
        assert row["bytes_per_element"] == codec.row_bytes(1 << 18) / (1 << 18)
    ratios = {row["codec"]: row["sqnr_db"] for row in rows}
    assert ratios.pop("raw") is None  # exact; JSON has no infinity
    assert all(ratio > 2 for ratio in ratios.values())
    # A uniform grid gains 6.02 dB a bit; the block of int8 is twice that of int4, which costs less than 1 dB.
    assert ratios["int8"] - ratios["int4"] == pytest.approx(4 * 6.02, abs=1)


def test_the_table_of_codecs_has_a_line_for_each() -> None:
    code, out, _ = invoke("codecs")
    assert code == 0
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in cells] == nc.list_codecs()
    assert cells[0] == ["raw", "32", "-", "4.0000", "exact"]
    assert {row[0]: row[1:4] for row in cells}["int4"] == ["4", "64", "0.5312"]


# -- failing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["encoed"], "No such command 'encoed'. Did you mean 'encode', 'decode'? See: "),
        (["codecs", "--jsno"], "--jsno"),
        (["bench", "codecs"], "No such command 'codecs'"),
        (["encode"], "Missing argument 'SRC'. See: "),
        (["encode", "nowhere.npy", "x.safetensors"], "SRC='nowhere.npy': no such file"),
        (["decode", "nowhere.safetensors", "x.npy"], "SRC='nowhere.safetensors': no such file"),
        (["inspect", "nowhere"], "nowhere: no such file or folder"),
        (["quantize", "nowhere", "x"], "SRC='nowhere': no such file or folder"),
        (["quantize", "x.safetensors", "y", "--codec", "int9"], "codec 'int9' does not exist"),
        (["quantize", "x.safetensors", "y.pt"], "DST='y.pt': narrowcast writes safetensors files, not pickles."),
        (["inspect", "x.safetensors", "--codecs", "int9"], "codec 'int9' does not exist"),
        (["inspect", "x.safetensors", "--budget", "8", "--rules-out", "no/rules.toml"], "there is no folder 'no'."),
        (["encode", "x.safetensors", "y.safetensors", "--codec", "int9"], "codec 'int9' does not exist"),
        (["plan", "--params", "1M", "--ranks", "2", "--bandwidth", "1gbit", "--codecs", "int9"], "codec 'int9'"),
        (
            ["inspect", "x.safetensors", "--rules-out", "mix.toml"],
            "--rules-out 'mix.toml' writes the mix that --budget",
        ),
        (["plan", "--params", "many", "--ranks", "2", "--bandwidth", "1gbit"], "--params 'many'"),
    ],
)
def test_what_cannot_be_is_one_line_and_2(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.ones(8, 64)}, "x.safetensors")
    code, out, err = invoke(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
    assert os.listdir() == ["x.safetensors"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_disk_that_is_full_is_one_line_and_1() -> None:
    code = (
        "import typer; from narrowcast.cli.shared.failing import Commands\n"
        "app = typer.Typer(cls=Commands)\n"
        "@app.callback()\n"
        "def main() -> None: ...\n"
        "@app.command()\n"
        "def write() -> None:\n"
        "    with open('/dev/full', 'w') as file: file.write('x')\n"
        "app(['write'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device.\n")


@pytest.mark.parametrize("words", [["codecs"], ["codecs", "--json"], ["--help"], ["--version"]], ids=" ".join)
def test_output_that_nobody_reads_ends_it_with_141_and_no_word(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "narrowcast.cli", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_mistake_in_narrowcast_keeps_its_traceback() -> None:
    code = (
        "import typer; from narrowcast.cli.shared.failing import Commands\n"
        "app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)\n"
        "@app.callback()\n"
        "def main() -> None: ...\n"
        "@app.command()\n"
        "def mistaken() -> None: [].pop()\n"
        "app(['mistaken'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "IndexError: pop from empty list" in done.stderr
