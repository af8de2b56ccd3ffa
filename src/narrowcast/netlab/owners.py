"""Who a namespace belongs to: its name says which process made it, so that one left behind by a dead owner is known.

A name is `nl<pid>.<start>.<run>-<who>`: the owner's process id, the time it started (a process id comes round again), a
count of its networks, and a rank or "switch". A namespace holds its interfaces and says which processes live in it, so
removing one means: end those, delete the name, and the kernel does the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from .commands import run
from .errors import NetlabError

FOLDER = Path("/var/run/netns")  # where iproute2 keeps them, by contract
NAME = re.compile(r"nl(\d+)\.(\d+)\.\d+-(?:\d+|switch)")


def start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None for one that is dead, a zombie too."""
    try:
        # The name in brackets may hold anything, brackets and spaces too.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def prefix(count: int) -> str:
    pid = os.getpid()
    return f"nl{pid}.{start_of(pid)}.{count}-"


def names() -> list[str]:
    """Every namespace on the machine that a netlab made."""
    return sorted(entry.name for entry in FOLDER.glob("nl*") if NAME.fullmatch(entry.name))


def stale() -> list[str]:
    """Those of them whose owner is dead."""
    found = [(name, NAME.fullmatch(name)) for name in names()]
    return [name for name, match in found if match and start_of(int(match[1])) != int(match[2])]


def sweep() -> list[str]:
    """Remove what dead owners left; returns the names."""
    found = stale()
    remove(found)
    return found


def remove(which: list[str]) -> None:
    """End every process in these namespaces and delete them. Those already gone are no error."""
    end_processes(which)
    left = []
    for name in which:
        try:
            run("ip", "netns", "del", name)
        except NetlabError as error:
            # Another netlab may have swept the same one at the same moment.
            if (FOLDER / name).exists():
                left.append(str(error))
    if left:
        raise NetlabError("netlab could not remove every namespace. " + "\n".join(left))


def end_processes(which: list[str], seconds: float = 5.0) -> None:
    """SIGKILL to every process in these namespaces, until none is left: a process may fork while others are ended."""
    deadline = time.monotonic() + seconds
    while (found := inhabitants(which)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def inhabitants(which: list[str]) -> list[int]:
    """The processes whose network namespace is one of these."""
    wanted = {identity(FOLDER / name) for name in which} - {None, identity(Path("/proc/self/ns/net"))}
    if not wanted:
        return []
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if identity(Path(f"/proc/{pid}/ns/net")) in wanted and start_of(pid) is not None]


def identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
