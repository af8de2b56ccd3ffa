"""One test of netlab runs at a time, whatever the number of workers."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def one_at_a_time() -> Iterator[None]:
    """A sweep by another worker's test would take away what a test here is looking at, and two rates would mix."""
    with (Path(tempfile.gettempdir()) / "netlab-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
