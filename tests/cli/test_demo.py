"""`narrowcast demo`, at a small size: real ranks, a real table, a real picture."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowcast.cli import app
from narrowcast.cli import demo as demo_module

NARROWCAST = [sys.executable, "-c", "from narrowcast.cli import app; app()"]


def test_the_demo_trains_quantizes_writes_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    command = [*NARROWCAST, "demo", "--steps", "4", "--picture", str(picture)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for words in ("int4, error feedback", "step 4 of 4", "then weights in int4", "def __init__(self, "):
        assert words in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["demo.png"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x.foo", "the name must end in .png, .svg or .pdf."),
        ("x", "the name must end in .png, .svg or .pdf."),
        ("nodir/x.png", "there is no folder 'nodir'. Create it first."),
        ("folder.png", "is a folder."),
        pytest.param(
            *("/proc/x.png", "cannot write to the folder '/proc': "),
            marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="Linux has a folder that takes no file"),
        ),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_trained(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    started: list[object] = []
    monkeypatch.setattr(demo_module, "_run_ranks", lambda *given: started.append(given) or [])
    result = CliRunner().invoke(app, ["demo", "--picture", name])
    assert (result.exit_code, result.stdout, started) == (2, "", [])
    assert result.stderr.startswith(f"error: --picture {name!r}: {said}")
    assert result.stderr.count("\n") == 1


def running(session: int) -> bool:
    """Whether a process of the session is there."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def test_interrupting_the_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [*NARROWCAST, "demo", "--steps", "100000", "--picture", str(tmp_path / "demo.png")]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    try:
        assert any(b"step 1 of 100000" in line for line in process.stdout), "the demo did not start"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) != 0
        deadline = time.monotonic() + 30
        while running(process.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not running(process.pid), "ranks of an interrupted demo are still there"
    finally:
        process.kill()
    assert not (tmp_path / "demo.png").exists()
