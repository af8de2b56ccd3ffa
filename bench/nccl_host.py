"""What a call over NCCL holds the host up for, piece by piece; `python bench/nccl.py --host` runs it.

Microseconds of the host, medians of rounds of calls in a row, with the GPU waited for in between. `call` is all of
`ncd.all_reduce`; then the same with nothing exchanged, and with nothing encoded or decoded either; then its pieces,
each by itself. `python` is a thousand calls of an empty function, to compare processors by.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from narrowcast import codec as as_codec
from narrowcast import distributed as ncd
from narrowcast.distributed.protocols import together
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.nccl import NcclWire

ROUNDS, CALLS = 9, 40


def per_call(call: Callable[[], object]) -> float:
    """Microseconds that the host is at it."""
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds.append((time.perf_counter() - start) / CALLS)
    return 1e6 * statistics.median(seconds[1:])


def nothing(*values: Any) -> None:
    pass


@contextmanager
def without_exchange() -> Iterator[None]:
    with mock.patch.object(NcclWire, "_exchange", nothing), mock.patch.object(NcclWire, "_add_up", nothing):
        yield


@contextmanager
def without_coding() -> Iterator[None]:
    names = ("encode_", "decode_", "decode_sum_", "decode_sum_encode_")
    with mock.patch.object(together, "operators", SimpleNamespace(**dict.fromkeys(names, nothing))):
        yield


def pieces(kb: int, spec: str) -> dict[str, float]:
    """What each piece of a reduction of so many KB takes."""
    x = torch.randn(kb * 256, device="cuda")

    def call() -> None:
        ncd.all_reduce(x, codec=spec)

    call()
    found = {"NCCL's own": per_call(lambda: dist.all_reduce(x)), "call": per_call(call)}
    found["async, waited for"] = per_call(lambda: ncd.all_reduce(x, codec=spec, async_op=True).wait())  # type: ignore
    with without_exchange():
        found["call, no exchange"] = per_call(call)
        with without_coding():
            found["call, no exchange, no coding"] = per_call(call)
    dist.barrier()
    group = group_for(dist.group.WORLD, x.device)
    found["lane, streams, events"] = per_call(lambda: group.lane.start("nothing", lambda: [x], [x, x], False, True))
    found["one event recorded and waited for"] = per_call(_event)
    wire = group._wire
    assert isinstance(wire, NcclWire)
    found["add_up"] = per_call(lambda: wire.add_up(x))
    reduction = group.prepared.get((as_codec(spec), len(x)))
    if isinstance(reduction, together._OneStage):
        found["exchange"] = per_call(lambda: wire.exchange(reduction._to_all))
        mine, inbox, recipe = reduction._mine, reduction._inbox, reduction._recipe
        found["encode_"] = per_call(lambda: together.operators.encode_(mine, x[None], recipe, 0))
        found["decode_sum_"] = per_call(lambda: together.operators.decode_sum_(x, inbox, recipe, None, 0, 1))
    found["python, 1000 calls"] = per_call(lambda: [nothing() for _ in range(1000)])
    return found


def _event() -> None:
    torch.cuda.current_stream().wait_event(torch.cuda.current_stream().record_event())


def profiled(kb: int, spec: str, lines: int = 32) -> str:
    """Where Python's time goes, by function. The profiler itself takes about as long again."""
    x = torch.randn(kb * 256, device="cuda")
    ncd.all_reduce(x, codec=spec)
    profile = cProfile.Profile()
    for _ in range(10):
        torch.cuda.synchronize()
        profile.enable()
        for _ in range(CALLS):
            ncd.all_reduce(x, codec=spec)
        profile.disable()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).strip_dirs().sort_stats("tottime").print_stats(lines)
    return "\n".join(line for line in out.getvalue().splitlines() if line.strip())
