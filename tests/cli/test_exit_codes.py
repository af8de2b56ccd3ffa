"""One rule for every command: 0 success, 1 failed while running, 2 wrong arguments or files, 130 Ctrl-C.

An error is one line on stderr that begins with "error: ". The rule is that of docs/commands.md.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.main import get_command
from typer.testing import CliRunner

from narrowcast.cli import app
from narrowcast.errors import CollectiveError

# Of every command: arguments that would do, and the function inside it that does the work.
COMMANDS: dict[str, tuple[list[str], str]] = {
    "demo": (["--steps", "2"], "narrowcast.cli.demo._train"),
    "doctor": ([], "narrowcast.cli.doctor._examine"),
    "codecs": ([], "narrowcast.cli.codecs.catalogue"),
    "encode": (["x.safetensors", "y.safetensors"], "narrowcast.cli.shared.payload_files.encode"),
    "decode": (["x.safetensors", "y.safetensors"], "narrowcast.cli.shared.payload_files.decode"),
    "inspect": (["x.safetensors"], "narrowcast.cli.inspect.weights.weights_in"),
    "quantize": (["x.safetensors", "y"], "narrowcast.checkpoint.conversion.Conversion.convert"),
    "generate": (["--random", "110m"], "narrowcast.generate.random_decoder"),
    "plan": (
        ["--params", "1M", "--ranks", "2", "--bandwidth", "1gbit"],
        "narrowcast.distributed.planning.codec_speed.measure_codecs",
    ),
    "netlab": (["--ranks", "2", "--", "true"], "narrowcast.netlab.run.run"),
    **{
        f"bench {name}": ([], "narrowcast.cli.shared.scripts._wait")
        for name in ("codec", "wire", "training", "linear", "grids")
    },
}
WRONG_FILES = {
    "missing": lambda: None,
    "a folder without weights": lambda: Path("x.safetensors").mkdir(),
    "damaged": lambda: Path("x.safetensors").write_bytes(b"damaged"),
}


def invoke(command: str, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*command.split(), *words], env={"RANK": None, "WORLD_SIZE": None})
    return result.exit_code, result.stderr


def is_one_line(said: str) -> bool:
    return said.startswith("error: ") and said.count("\n") == 1 and len(said) > 12


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table_has_every_command() -> None:
    group = get_command(app)
    below = group.commands  # type: ignore[attr-defined]
    names = {name for name in below if name != "bench"} | {f"bench {name}" for name in below["bench"].commands}
    assert names == set(COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if not name.startswith("bench")])
def test_an_unknown_option_is_2(command: str) -> None:
    code, said = invoke(command, "--no-such-option")
    assert code == 2
    assert is_one_line(said)
    assert "--no-such-option" in said


@pytest.mark.parametrize("command", ["encode", "decode", "inspect", "quantize", "plan"])
def test_a_missing_argument_is_2(command: str) -> None:
    code, said = invoke(command)
    assert code == 2
    assert is_one_line(said)


@pytest.mark.parametrize("wrong", WRONG_FILES)
@pytest.mark.parametrize("command", ["encode", "decode", "inspect", "quantize"])
def test_a_file_that_is_wrong_is_2(command: str, wrong: str) -> None:
    WRONG_FILES[wrong]()
    code, said = invoke(command, *COMMANDS[command][0])
    assert code == 2
    assert is_one_line(said)
    assert "x.safetensors" in said


@pytest.mark.parametrize("command", ["encode", "quantize", "demo", "inspect", "netlab"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES], ids=["read-only", "not permitted"])
def test_a_folder_that_cannot_be_written_to_is_2_and_is_named(
    command: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a.weight": torch.ones(8, 64)}, "x.safetensors")
    Path("taken").mkdir()

    def refuse(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "taken/tmp0123")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    words = {
        "encode": ["x.safetensors", "taken/y.safetensors"],
        "quantize": ["x.safetensors", "taken"],
        "demo": ["--picture", "taken/x.png"],
        "inspect": ["x.safetensors", "--budget", "8", "--rules-out", "taken/rules.toml"],
        "netlab": ["--json", "taken/x.json", "--", "true"],
    }
    code, said = invoke(command, *words[command])
    assert code == 2
    assert is_one_line(said)
    assert "folder 'taken'" in said
    assert os.strerror(number) in said
    assert "tmp0123" not in said
    assert not [*Path("taken").iterdir()]


FAILURES: dict[str, tuple[Callable[[], BaseException], int]] = {
    "Ctrl-C": (KeyboardInterrupt, 130),
    "a full disk": (lambda: OSError(errno.ENOSPC, "No space left on device"), 1),
    "no memory": (MemoryError, 1),
    "a lost rank": (lambda: CollectiveError("rank 1 is gone."), 1),
    "a file that vanished": (lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), 2),
    "a read-only disk": (lambda: OSError(errno.EROFS, "Read-only file system", "x"), 2),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_stops_the_work_has_one_code_in_every_command(
    command: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a.weight": torch.ones(8, 64)}, "x.safetensors")
    make, expected = FAILURES[failure]

    def stop(*args: object, **options: object) -> None:
        raise make()

    words, work = COMMANDS[command]
    monkeypatch.setattr(work, stop)
    if command.startswith("bench"):
        monkeypatch.setattr("narrowcast.cli.shared.scripts.find_checkout", lambda script: Path("."))
    code, said = invoke(command, *words)
    assert code == expected
    assert is_one_line(said.splitlines(keepends=True)[-1] if said else said)
    assert "Traceback" not in said
    assert sorted(os.listdir()) in (["x.safetensors"], ["x.safetensors", "y"])


def test_ctrl_c_at_a_terminal_is_130(tmp_path: Path) -> None:
    code = (
        "import os, signal, narrowcast.cli.codecs as codecs; from narrowcast.cli import app\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it\n"
        "codecs.catalogue = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "app(['codecs'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip().endswith("error: stopped.")


WHILE = {
    "imports": "import narrowcast\nclass Finder:\n    def find_spec(self, name, *given):\n"
    "        if name == 'rich.table': stop()\nsys.meta_path.insert(0, Finder())",
    "options are read": "import typer.main; typer.main.get_command = lambda *given: stop()",
    "torch swallows it": "import narrowcast.cli.codecs as codecs\ndef swallow():\n    try: stop()\n"
    "    except KeyboardInterrupt: pass\n    raise ImportError('cannot load module more than once')\n"
    "codecs.catalogue = swallow",
}


@pytest.mark.parametrize("moment", WHILE)
def test_ctrl_c_before_the_command_runs_is_one_line_too(moment: str) -> None:
    code = (
        "import os, signal, sys\ndef stop(): os.kill(os.getpid(), signal.SIGINT)\n"
        f"signal.signal(signal.SIGINT, signal.default_int_handler)\n{WHILE[moment]}\n"
        "from narrowcast.cli import app\napp(['codecs'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: stopped.\n")


def test_the_page_has_the_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    for code in ("| 0 |", "| 1 |", "| 2 |", "| 130 |", "| 141 |"):
        assert code in page
