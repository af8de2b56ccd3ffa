"""What lanes leave behind when their group is destroyed, their process forks, or a work is asked twice: nothing."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from patience import within

from narrowcast import distributed as ncd
from narrowcast.distributed.transport import group as peers
from narrowcast.errors import CollectiveError
from ports import free_port

pytestmark = pytest.mark.timeout(60)


def _ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("narrowcast"))


def _open() -> tuple[int, int]:
    """Descriptors and threads of all kinds, gloo's own among them."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _use(rank: int, group: Any = None) -> float:
    """Synchronous and asynchronous, small and large, and a message."""
    tensor, large = torch.ones(10), torch.ones(2_000_000)
    ncd.all_reduce(tensor, group=group, codec="raw")
    work = ncd.all_reduce(large, group=group, async_op=True)
    assert work is not None
    work.wait()
    number = dist.get_rank(group)
    if number == 0:
        ncd.send(tensor, group=group, group_dst=1)
    elif number == 1:
        ncd.recv(tensor, group=group, group_src=0)
    return float(tensor[0])


def _made() -> int:
    return sum(len(of_group) for of_group in peers._known.values())


def _again_and_again(rank: int, way: str, place: str) -> Any:
    """A process group five times over: made, used, destroyed."""
    limit = timedelta(seconds=20)
    store: Any = dist.TCPStore("127.0.0.1", int(place), 2, rank == 0, limit) if way == "shared" else None
    found = []
    for number in range(5):
        how: dict[str, Any] = {"init_method": f"file://{place}/{number}"}
        if way == "tcp":
            how = {"init_method": f"tcp://127.0.0.1:{place.split()[number]}"}
        elif way == "shared":
            how = {"store": dist.PrefixStore(str(number), store)}
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit, **how)
        total = _use(rank)
        alive = [weakref.ref(made) for of_group in peers._known.values() for made in of_group.values()]
        assert len(alive) == 2
        assert _ours()
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        threads, made = _ours(), _made()
        time.sleep(0.1)  # the server of a TCPStore lets go of the peers' connections in its own time
        found.append((total, threads, made, [ref() is None for ref in alive], _open()))
    return found


@pytest.mark.parametrize("way", ["file", "tcp", "shared"])
def test_a_destroyed_group_leaves_nothing_and_a_new_one_works(way: str, tmp_path: Any) -> None:
    place = {"file": str(tmp_path), "tcp": " ".join(str(free_port()) for _ in range(5))}.get(way)
    place = place or str(free_port())
    for found in ranks.run(2, _again_and_again, way, place, init=False, timeout=30):
        for total, threads, made, gone, _ in found:
            assert total == 2.0
            assert threads == []
            assert made == 0
            assert gone == [True, True]
        (files, tasks), (files_after, tasks_after) = found[0][4], found[4][4]
        assert tasks_after == tasks
        # A peer's connection to the store may come or go at any time; a leak would be one per group, four by now.
        assert abs(files_after - files) <= 1


def _destroy_one(rank: int) -> Any:
    first, second = dist.new_group(), dist.new_group()
    _use(rank, first)
    before = _open()
    _use(rank, second)
    dist.barrier()
    dist.destroy_process_group(second)  # which this function still holds
    deadline = time.monotonic() + 5
    while _open() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    refused, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(1), group=second))
    after = _open()
    return before, after, str(refused), _use(rank, first), _use(rank)


def test_destroying_one_group_frees_its_own_and_leaves_the_others_alone() -> None:
    for before, after, refused, total, total_of_all in ranks.run(2, _destroy_one, timeout=30):
        # Threads of gloo for the second group itself, and the thread of the first one's lane, may be gone too.
        assert after <= before
        assert "the process group was destroyed" in refused
        assert total == total_of_all == 2.0


def _destroy_in_flight(rank: int) -> Any:
    ncd.all_reduce(torch.ones(10))
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        return faults.error_of(lambda: ncd.all_reduce(torch.ones(10)))
    works = [ncd.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
    time.sleep(0.1)
    start = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - start
    return [str(faults.error_of(work.wait)[0]) for work in works if work], took, _ours()


def test_works_in_flight_fail_when_their_group_is_destroyed() -> None:
    (texts, took, threads), (other, seconds) = ranks.run(2, _destroy_in_flight, timeout=20)
    assert len(texts) == 3
    assert all("the process group was destroyed" in text for text in texts)
    assert took < within(2.0)
    assert threads == []
    assert type(other) is CollectiveError
    assert "rank 0 is gone" in str(other)
    assert seconds < within(2.0)


def _leave_at_once(rank: int) -> None:
    for _ in range(3):
        ncd.all_reduce(torch.ones(3_000_000))


def test_a_rank_may_leave_right_after_its_last_call() -> None:
    for _ in range(5):
        ranks.run(3, _leave_at_once, timeout=20)


# -- fork ------------------------------------------------------------------------------------------------------------


def _fork(rank: int) -> Any:
    _use(rank)
    in_flight = ncd.all_reduce(torch.ones(10), async_op=True)
    pid = os.fork()
    if pid == 0:
        os._exit(7 if not _ours() and not _made() else 1)
    code = _ended(pid)
    assert in_flight is not None
    in_flight.wait()
    return code, _use(rank), _use(rank)


def _ended(pid: int) -> int | None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def test_a_forked_child_ends_and_the_parents_lanes_still_work() -> None:
    for code, *totals in ranks.run(2, _fork, timeout=30):
        assert code == 7
        assert totals == [2.0, 2.0]


# -- works -----------------------------------------------------------------------------------------------------------


def _works(rank: int) -> Any:
    tensor = torch.ones(1000)
    ncd.all_reduce(tensor.clone())
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    work = ncd.all_reduce(tensor, async_op=True, codec="raw")
    assert work is not None
    early = work.is_completed() or rank == 1
    short = faults.error_of(lambda: work.wait(timedelta(milliseconds=50)))[0] if rank == 0 else None
    chained = work.get_future().then(lambda future: float(future.value()[0][0]) + 1.0)
    twice = work.wait(), work.wait()
    late = work.get_future().then(lambda future: future.value()[0] is tensor)
    done = work.is_completed(), work.is_success(), work.exception()
    bad = ncd.all_reduce(torch.ones(5 + rank), async_op=True)
    assert bad is not None
    future = bad.get_future()
    seen = future.then(lambda failed: str(faults.error_of(failed.value)[0]))
    errors = [str(faults.error_of(what)[0]) for what in (bad.wait, bad.wait, future.wait, bad.result, seen.wait)]
    ncd.all_reduce(tensor, codec="raw")
    state = bad.is_completed(), bad.is_success(), str(bad.exception())
    return early, str(short), chained.wait(), twice, late.wait(), done, errors, seen.wait(), state, tensor[0].item()


def test_a_work_can_be_waited_for_twice_chained_and_asked_for_its_error() -> None:
    outcomes = ranks.run(2, _works, timeout=20)
    for rank, (early, short, chained, twice, late, done, errors, seen, state, total) in enumerate(outcomes):
        assert early == (rank == 1)
        assert rank == 1 or short == "all_reduce: not done after 0.05 s, the timeout given to wait()."
        assert chained == 3.0
        assert twice == (True, True)
        assert late is True
        assert done == (True, True, None)
        assert "ranks disagree on a collective" in errors[0]
        assert errors[:4] == [errors[0]] * 4
        assert errors[4] == "None", "its callback did not raise"
        assert seen == errors[0]
        assert state == (True, False, errors[0])
        assert total == 4.0
