"""What the suites of netlab share: the command, run as a user runs it, and a look at what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from narrowcast.netlab import NetlabError, owners, permission

try:
    permission.require()
    refusal = ""
except NetlabError as error:
    refusal = str(error)
networked = pytest.mark.skipif(bool(refusal), reason=f"namespaces may not be made: {refusal}")

# Rank 1 prints the best of 20 round trips to rank 0, in seconds.
PINGS = """
import os, socket, time
server = socket.create_server(("", 5000))
if os.environ["RANK"] == "0":
    other = server.accept()[0]
    while byte := other.recv(1):
        other.sendall(byte)
else:
    times = []
    while True:
        try:
            other = socket.create_connection(("rank0", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(20):
        began = time.perf_counter()
        other.sendall(b"x"), other.recv(1)
        times.append(time.perf_counter() - began)
    print(min(times))
"""


def words(*given: str) -> list[str]:
    return [sys.executable, "-m", "narrowcast.cli", "netlab", *given]


def netlab(*given: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(words(*given), capture_output=True, text=True, timeout=100, env=env)


def python(script: str, *given: str) -> list[str]:
    return [sys.executable, "-c", script, *given]


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def wait_for(what: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def left_by(pid: int) -> list[str]:
    return [name for name in owners.names() if name.startswith(f"nl{pid}.")]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if owners.start_of(pid) is not None]
