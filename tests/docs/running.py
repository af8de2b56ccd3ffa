"""Commands of the pages, run by a real shell. Whatever they start is gone when they have been run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

MARK = "NARROWCAST_DOCS_RUN"


def run(script: str, folder: Path, timeout: float = 250.0) -> str:
    """Run a bash script in a folder and return what it said. It ends at the first line that fails, and that raises.

    Programs are those of the environment that runs the tests.
    """
    token = uuid.uuid4().hex
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        MARK: token,
    }
    command = ["bash", "-euxo", "pipefail", "-c", script]  # x: each line is named before what it says
    with tempfile.TemporaryFile("w+") as said:
        # Into a file, as a process that was left behind would keep a pipe open.
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"no end after {timeout:g} s"
        finally:
            end(token)
            process.wait()
        said.seek(0)
        words = said.read()
    assert code == 0, f"{code}:\n{words}"
    return words


def started(token: str) -> list[int]:
    """The processes that carry a token. torchrun gives ranks sessions of their own, so groups do not find them."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={token}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:  # it is gone, or not ours
            continue
    return found


def end(token: str) -> None:
    """Kill them all; again, while some were still being started."""
    deadline = time.monotonic() + 10
    while (left := started(token)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    assert not left, f"processes {left} do not end"
