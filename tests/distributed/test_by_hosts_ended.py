"""Sums by hosts that end early: interrupted, without memory or threads, or with their group destroyed. No rank waits on
for one that has left, and ranks that are still there go on together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from hosted import launched
from patience import within

from narrowcast import distributed as ncd
from narrowcast.distributed import meshes
from narrowcast.distributed.protocols import mesh
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.work import Work

pytestmark = pytest.mark.timeout(120)

SIDE_BY_SIDE = 1 << 15
"""Chunks of so many elements: phases follow each other chunk by chunk."""
CPU = torch.device("cpu")


def _large() -> Any:
    return ncd.all_reduce(torch.ones(faults.NUMEL))


def _right(rank: int) -> bool:
    x = torch.full((9000,), float(rank + 1))
    ncd.all_reduce(x, codec="raw")
    return bool((x == 10).all())


def _on_two_hosts(rank: int) -> None:
    launched(rank, 2, 2)
    mesh.CHUNK, mesh.HOST_CHUNK = SIDE_BY_SIDE, 1
    assert _right(rank)
    dist.barrier()


def _interrupted(rank: int, absent: tuple[int, ...]) -> tuple[str, float, bool]:
    _on_two_hosts(rank)
    if rank in absent:
        time.sleep(6.0)
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    error, seconds = faults.error_of(_large)
    return repr(error), seconds, _right(rank)


@pytest.mark.parametrize("absent", [(2, 3), (1,), (3,)])
def test_an_interrupt_ends_the_call_at_once_whichever_ranks_it_waits_for(absent: tuple[int, ...]) -> None:
    found = ranks.run(4, _interrupted, absent)
    for rank, (error, seconds, right) in enumerate(found):
        assert right
        if rank == 0:
            assert error == "KeyboardInterrupt()"
            assert seconds < within(3.0, most=5.5)
        else:
            assert "rank 0 failed in it: KeyboardInterrupt" in error


def _without_memory(rank: int) -> tuple[str, bool]:
    _on_two_hosts(rank)
    if rank == 1:
        plain = torch.empty_like

        def no_room(*args: Any, **options: Any) -> Any:
            torch.empty_like = plain
            faults.run_out_of_memory()

        torch.empty_like = no_room
    return repr(faults.error_of(_large)[0]), _right(rank)


def test_a_rank_without_memory_for_its_part_fails_the_call_on_all_and_counts_it() -> None:
    for rank, (error, right) in enumerate(ranks.run(4, _without_memory)):
        assert "MemoryError" in error if rank == 1 else "rank 1 failed in it: MemoryError" in error
        assert right


def _without_threads(rank: int) -> tuple[str, bool, bool]:
    _on_two_hosts(rank)
    time.sleep(1.5)  # lanes without work have no thread
    plain: Callable[[threading.Thread], None] = threading.Thread.start

    def no_more(self: threading.Thread) -> None:
        if self.name.startswith("narrowcast") and "between hosts" in self.name:
            threading.Thread.start = plain  # type: ignore[method-assign]
            raise RuntimeError("can't start new thread")
        plain(self)

    if rank == 1:
        threading.Thread.start = no_more  # type: ignore[method-assign]
    return repr(faults.error_of(_large)[0]), _right(rank), faults.error_of(_large)[0] is None


def test_a_rank_that_cannot_start_a_thread_fails_the_call_on_all_and_the_next_one_works() -> None:
    for rank, (error, *right) in enumerate(ranks.run(4, _without_threads)):
        assert "can't start new thread" in error
        assert "rank 1 failed in it" in error or rank == 1
        assert right == [True, True]


def _destroyed(rank: int, absent: tuple[int, ...]) -> tuple[str, float]:
    _on_two_hosts(rank)
    if rank in absent:
        time.sleep(4.0)
        return repr(faults.error_of(_large)[0]), 0.0
    work: Any = ncd.all_reduce(torch.ones(faults.NUMEL), async_op=True)
    time.sleep(0.3)
    start = time.monotonic()
    dist.destroy_process_group()
    error, _ = faults.error_of(work.wait)
    return repr(error), time.monotonic() - start


@pytest.mark.parametrize("absent", [(1,), (2, 3)])
def test_works_in_flight_fail_when_their_group_is_destroyed_in_whichever_phase(absent: tuple[int, ...]) -> None:
    for rank, (error, seconds) in enumerate(ranks.run(4, _destroyed, absent)):
        if rank in absent:
            assert "the process group was destroyed" in error
        elif absent != (1,) or rank == 0:
            assert "the process group was destroyed" in error
            assert seconds < within(3.0)


def _never_begun(rank: int) -> str:
    _on_two_hosts(rank)
    members: Any = dist.group.WORLD
    by_hosts = meshes.mesh_of_hosts(members, group_for(members, CPU), "collectives")
    assert by_hosts is not None
    busy = threading.Event()
    by_hosts.between.lane.submit(Work("busy", lambda: [torch.tensor(busy.wait(15))]))
    work: Any = ncd.all_reduce(torch.ones(faults.NUMEL), async_op=True)
    time.sleep(0.3)
    del by_hosts, members
    dist.destroy_process_group()
    found = threading.Thread(target=lambda: faults.error_of(work.wait), daemon=True)
    found.start()
    found.join(within(5.0))
    busy.set()
    return "it waits" if found.is_alive() else repr(work.exception())


def test_a_second_phase_that_never_runs_is_not_waited_for() -> None:
    for error in ranks.run(4, _never_begun):
        assert "the process group was destroyed" in error
