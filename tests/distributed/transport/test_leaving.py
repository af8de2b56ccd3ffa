"""How a process ends that never said goodbye: soon, with its own exit code, without a word, whatever is in flight."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import within

pytestmark = pytest.mark.timeout(60)

SOON = 2.0


def _leave(way: str, tmp_path: Path) -> list[tuple[int, float, str]]:
    """Exit code, seconds from the end of the script to that of the process, and stderr, of rank 0 and 1.

    The seconds are those beyond what a process beside them takes to unload torch: half a second, or many times that on
    a loaded machine.
    """
    script = str(Path(__file__).parent.with_name("leaving.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, how, str(rank), str(tmp_path / store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for how, rank, store in ((way, 0, "store"), (way, 1, "store"), ("plain", 0, "store of its own"))
    ]
    ends: dict[int, float] = {}
    deadline = time.monotonic() + within(30, most=50.0)
    try:
        while len(ends) < 3:
            assert time.monotonic() < deadline, f"process {set(range(3)) - set(ends)} does not end"
            for rank, process in enumerate(processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic()
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
    found = []
    for rank, process in enumerate(processes):
        out, err = process.communicate()
        found.append((process.returncode, ends[rank] - float(out.split()[-1] if out else "inf"), err))
    *leaving, (_, plain, _) = found
    return [(code, seconds - plain, err) for code, seconds, err in leaving]


@pytest.mark.parametrize("way", ["in flight", "hang", "never met", "half-way", "connecting", "fork"])
def test_a_process_ends_soon_and_silently(way: str, tmp_path: Path) -> None:
    for code, seconds, err in _leave(way, tmp_path):
        assert code == (5 if way == "hang" else 0), err
        assert seconds < within(SOON)
        assert err == ""


def test_a_script_that_raises_shows_its_own_traceback_only(tmp_path: Path) -> None:
    (code, seconds, err), _ = _leave("raise", tmp_path)
    assert code == 1
    assert seconds < within(SOON)
    assert err.count("Traceback") == 1
    assert err.strip().endswith("LookupError: the script's own")
