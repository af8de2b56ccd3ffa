"""`narrowcast demo`, at a small size: real ranks, a real table, a real picture."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
    try:
        deadline = time.monotonic() + 60
        while not (found := list(tmp_path.glob("tmp*/errors"))) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert found, "the demo did not start"
        time.sleep(3)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) != 0
        deadline = time.monotonic() + 30
        while running(process.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not running(process.pid), "ranks of an interrupted demo are still there"
    finally:
        process.kill()
    assert not (tmp_path / "demo.png").exists()
