"""How many threads a call of the compiled core takes, and whose they are."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from functools import cache
from pathlib import Path

import torch

GRAIN = 1 << 18
"""Elements that are worth a thread of their own. A guess on the safe side, not a measurement."""
LINEAR_GRAIN = 1 << 17
"""Bytes of rows, times vectors that they are multiplied with, that are worth a thread of their own."""


@cache
def openmp() -> int | None:
    """The address of GOMP_parallel in the OpenMP that torch brought along, where it is GNU's."""
    beside = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    beside += sorted(Path(torch.__file__).parent.with_name("torch.libs").glob("libgomp*.so*"))
    if not beside or "USE_OPENMP=ON" not in torch.__config__.show():
        return None
    return ctypes.cast(ctypes.CDLL(str(beside[0])).GOMP_parallel, c_void_p).value


def team(work: int, grain: int) -> int:
    """All threads or one: OpenMP ends those that a call leaves out, and starts them again for torch's next call."""
    return torch.get_num_threads() if work >= 2 * grain else 1


def threads_for(elements: int) -> int:
    return 1 if elements < 2 * GRAIN else min(torch.get_num_threads(), elements // GRAIN)
