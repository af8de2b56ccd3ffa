"""How long things may take where the machine has more to do than these tests.

A time limit in a test says "at once", or "at the timeout and not later", of ranks that get a processor when they ask
for one. Where n threads want each core, they get an n-th of it, and the limit grows n times; where a virtual machine's
host gives its cores to others for half of the time, it doubles. On an idle machine it is what it says. (What was
raised, and which rank it names, is checked in any case.)
"""

from __future__ import annotations

import os
from pathlib import Path

MOST_SECONDS = 15.0
"""Half of the timeout that groups of tests have: what is raised at once must not be what is raised then."""


def slowdown() -> float:
    """How many threads want each core, now or on average in the last minute, and how much of it this machine gets."""
    average, _, _, now, _ = Path("/proc/loadavg").read_text().split()
    return max(1.0, float(average) / _cores(), int(now.split("/")[0]) / _cores()) / (1.0 - _stolen())


def within(seconds: float, most: float = MOST_SECONDS, idle: float = 1.0) -> float:
    """A limit of so many seconds, on this machine as it is now. Where `idle` threads want each core, it is as ever."""
    return max(seconds, min(most, seconds * slowdown() / idle))


def _times() -> tuple[int, int]:
    """Ticks of all cores since the machine started, and those that its host gave to others while it had work."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return sum(ticks), ticks[7]


_TICKS, _STOLEN = _times()


def _stolen() -> float:
    """The share of the cores' time since these tests began that the host gave to others; at most nine tenths."""
    ticks, stolen = _times()
    return min(0.9, (stolen - _STOLEN) / max(1, ticks - _TICKS))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
