"""`narrowcast generate`, on a small Llama with a tokenizer of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import small_llama
from narrowcast.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    small_llama.write_bytewise(path)
    return path


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["generate", *words])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.untried
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_is_streamed_and_is_what_json_says(folder: Path, device: str, dtype: str) -> None:
    words = (str(folder), "--prompt", "Grüße, ", "--max-new-tokens", "24", "--codec", "int8", "--dtype", dtype)
    words += ("--device", device)
    code, said, figures = invoke(*words)
    assert code == 0, figures
    assert "24 tokens; the first after" in figures
    code, summary, _ = invoke(*words, "--json")
    known = json.loads(summary)
    assert said == f"Grüße, {known['texts'][0]}\n"
    assert known["tokens"] == [24]
    assert known["tokens_per_second"] > 0
    assert invoke(*words, "--no-cuda-graph")[1] == said


@pytest.mark.untried
def test_a_quantized_folder_writes_what_quantizing_first_writes(folder: Path, tmp_path: Path, device: str) -> None:
    target = tmp_path / "int8"
    assert CliRunner().invoke(app, ["quantize", str(folder), str(target)]).exit_code == 0
    arguments = ("--prompt", "one", "--prompt", "another", "--max-new-tokens", "12", "--json", "--device", device)
    _, here, _ = invoke(str(folder), "--codec", "int8", *arguments)
    _, there, _ = invoke(str(target), *arguments)
    assert json.loads(here)["texts"] == json.loads(there)["texts"]
    assert json.loads(here)["weight_bytes"] == json.loads(there)["weight_bytes"]


@pytest.mark.untried
def test_random_weights_show_figures_and_no_text(device: str) -> None:
    words = ("--random", "110m", "--codec", "int4", "--max-new-tokens", "2", "--batch", "2", "--device", device)
    code, said, figures = invoke(*words)
    assert (code, said) == (0, ""), figures
    assert "4 tokens; " in figures
    assert "MB, cache" in figures


@pytest.mark.parametrize("words", [[], ["--no-cuda-graph"]])
def test_the_command_passes_on_whether_steps_are_captured(
    folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowcast.generate import run

    wanted: list[bool] = []
    plain = run.Generation.__init__

    def begin(self: run.Generation, *given: Any) -> None:
        wanted.append(given[-1])
        plain(self, *given)

    monkeypatch.setattr(run.Generation, "__init__", begin)
    code, _, figures = invoke(str(folder), "--prompt", "a", "--max-new-tokens", "1", *words)
    assert code == 0, figures
    assert wanted == [not words]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model's folder"),
        (["nowhere", "--prompt", "x"], "no such folder"),
        (["{folder}"], "nothing to continue"),
        (["{folder}", "--random", "110m", "--prompt", "x"], "one of the two"),
        (["--random", "110m", "--prompt", "x"], "no tokenizer"),
        (["--random", "3b"], "is none of 110m, 1b, 7b"),
        (["{folder}", "--prompt", "x", "--batch", "2"], "only with --random"),
        (["{folder}", "--prompt", "x", "--dtype", "int8"], "is none of bfloat16"),
        (["{folder}", "--prompt", "x", "--device", "tpu"], "expected cpu, or cuda"),
        (["{folder}", "--prompt", "x", "--codec", "int9"], "int9"),
        (["{folder}", "--prompt", "x", "--top-p", "2"], "top_p=2.0"),
        (["{folder}/config.json", "--prompt", "x"], "is a file. Name the folder"),
        (["{folder}", "--prompt", "", "--max-new-tokens", "4"], "--prompt '': this model's tokenizer makes no token"),
        (["{folder}", "--prompt", "x", "--max-new-tokens", "256"], "take 257 positions"),
        (["{empty}", "--prompt", "x"], "has no config.json"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(folder: Path, tmp_path: Path, words: list[str], message: str) -> None:
    code, said, error = invoke(*(word.format(folder=folder, empty=tmp_path) for word in words))
    assert (code, said) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_weights_that_are_left_as_they_were_are_a_line_for_each_reason(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "int8"
    assert CliRunner().invoke(app, ["quantize", str(folder), str(target)]).exit_code == 0
    code, _, figures = invoke(str(target), "--prompt", "x", "--max-new-tokens", "1", "--codec", "int4")
    assert code == 0
    (skipped, _) = figures.splitlines()
    assert re.fullmatch(r"model\.embed_tokens\.weight and \d+ more: left as they were, since already.*int8", skipped)


def test_text_that_the_terminal_cannot_show_is_a_question_mark(folder: Path) -> None:
    command = [sys.executable, "-m", "narrowcast.cli", "generate", str(folder), "--prompt", "Grüße", "--codec", "int8"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "8"],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"Gr??e")


def test_a_folder_without_a_tokenizer_says_what_to_copy(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "narrowcast.cli", "generate", str(tmp_path), "--prompt", "x"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2
    assert "Copy tokenizer.json" in done.stderr.splitlines()[-1]
