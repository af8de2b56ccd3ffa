"""`narrowcast bench`: the repository's scripts with their arguments, exit codes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import narrowcast as nc
from narrowcast.cli import bench
from narrowcast.cli.shared import scripts

SOURCE = str(Path(nc.__file__).parent.parent)
ROOT = Path(__file__).parents[2]
ECHO = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["PYTHONPATH"].split(os.pathsep)]))
sys.exit(7)
"""
CLEANS_UP = """
import sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("cleaned up")
    sys.exit(3)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder that looks like a checkout, with scripts that say what they were told."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "narrowcast"\n')
    (tmp_path / "bench").mkdir(parents=True)
    (tmp_path / "bench" / "codec.py").write_text(ECHO)
    (tmp_path / "bench" / "wire.py").write_text(CLEANS_UP)
    (tmp_path / "docs").mkdir()
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "narrowcast.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench", "codec"], []),
        (["bench", "codec", "--quick", "--json", "x y"], ["--quick", "--json", "x y"]),
        (["bench", "codec", "--", "--help"], ["--help"]),
    ],
)
def test_a_script_gets_its_arguments_as_they_are_and_gives_its_exit_code(
    words: list[str], told: list[str], repository: Path
) -> None:
    process = start(repository / "docs", *words)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (7, "")
    arguments, paths = json.loads(out)
    assert arguments == told
    # The narrowcast that was called is the one that is measured.
    assert paths[:2] == [SOURCE, str(repository / "bench")]


def test_ctrl_c_lets_a_script_clean_up(repository: Path) -> None:
    process = start(repository, "bench", "wire")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (3, "cleaned up\n", "")


def test_sigterm_reaches_the_script(repository: Path) -> None:
    process = start(repository, "bench", "wire")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_every_script_is_there() -> None:
    for name in bench.SCRIPTS:
        assert (ROOT / "bench" / f"{name}.py").is_file()
        assert scripts.find_checkout(f"bench/{name}.py") == ROOT


def test_netlab_needs_no_repository(tmp_path: Path) -> None:
    process = start(tmp_path, "netlab", "--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "narrowcast netlab --ranks 4 --rate 1gbit" in " ".join(out.split())
    process = start(tmp_path, "netlab", "--rate", "fast", "--", "true")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("error: --rate 'fast': a rate is a number and kbit, mbit, gbit or tbit")


def test_without_the_repository_it_says_where_the_scripts_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        scripts.run_script("bench speed", "bench/speed.py", [])
    assert caught.value.exit_code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: bench speed: runs bench/speed.py of narrowcast's repository")
    assert said.endswith("Clone the repository, and run narrowcast bench speed inside it.\n")


def test_a_folder_of_another_project_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "speed.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert scripts.find_checkout("bench/speed.py") is None
