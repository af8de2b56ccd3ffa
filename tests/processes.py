"""Processes of their own: Triton's interpreter, and forked children."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def in_interpreter(file: str, *options: str) -> str:
    """Run a file's tests where Triton's kernels run on CPU tensors; what pytest printed. They must pass.

    The interpreter must be asked for before Triton is imported, and then nothing else in that process can compile.
    """
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, file],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


def calls_that_survived(script: str, *arguments: str) -> int:
    """Run a script of tests/kernels/cpu/ that calls the core on memory whose neighbours may not be touched.

    Returns how many calls it made. One that touches more than its tensors ends the script."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "kernels" / "cpu" / script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    return int(run.stdout.removesuffix(" calls\n"))


def holds_in_a_fork(check: Callable[[], bool], seconds: float) -> None:
    """Assert what `check` says in a forked child, which must not hang. It should not compare with torch: its own
    threads do not survive a fork."""
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    for _ in range(int(10 * seconds)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
