"""What collectives cost, counted as they run.

`stats()` has one entry per operation. Bytes are those that this rank sent, headers included; plain bytes are those
that the same collective would have sent in the tensor's own dtype (for a reduction, by the ring that gloo and NCCL
use). Seconds are of the thread that did the work, and do not overlap: what is encoded or decoded while bytes are on
the wire counts as encoding or decoding, so wire seconds are those spent waiting. On CUDA, encoding and decoding are
launches.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]


@dataclass
class OpStats:
    """The sums over all calls of one operation."""

    calls: int = 0
    plain_bytes: int = 0
    sent_bytes: int = 0
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass
class Meter:
    """The cost of one call, while it runs."""

    op: str
    plain_bytes: int
    sent_bytes: int = 0
    encoding: float = 0.0
    decoding: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def encode(self) -> Iterator[None]:
        start = time.perf_counter()
        with span("narrowcast::encode"):
            yield
        self.encoding += time.perf_counter() - start

    @contextlib.contextmanager
    def decode(self) -> Iterator[None]:
        start = time.perf_counter()
        with span("narrowcast::decode"):
            yield
        self.decoding += time.perf_counter() - start

    def done(self) -> None:
        elapsed = time.perf_counter() - self.started
        with _lock:
            total = _totals.setdefault(self.op, OpStats())
            total.calls += 1
            total.plain_bytes += self.plain_bytes
            total.sent_bytes += self.sent_bytes
            total.encode_seconds += self.encoding
            total.decode_seconds += self.decoding
            total.wire_seconds += max(0.0, elapsed - self.encoding - self.decoding)


_totals: dict[str, OpStats] = {}
_lock = threading.Lock()


def stats() -> dict[str, OpStats]:
    """What this process's collectives have cost so far, by operation."""
    with _lock:
        return {op: replace(total) for op, total in _totals.items()}


def reset_stats() -> None:
    """Count from zero again."""
    with _lock:
        _totals.clear()


def profiling() -> bool:
    """Whether this thread is being profiled."""
    return bool(_profiler_enabled())


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A range in the profile of this thread, and nothing when none is being taken."""
    if profiling():
        return torch.profiler.record_function(name)
    return _NOTHING


_NOTHING = contextlib.nullcontext()
