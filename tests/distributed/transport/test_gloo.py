"""What the code leans on in torch's gloo, a test for each behaviour that gloo_messages.py lists, by its number.

A torch whose gloo behaves differently fails here. The list then says which code has to change.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

pytestmark = pytest.mark.timeout(60)
LIMIT = timedelta(seconds=3)
LONG = 256 << 20
"""Bytes that take gloo a while."""


def _group(rank: int) -> Any:
    store = dist.PrefixStore("facts", c10d._get_default_store())
    return dist.ProcessGroupGloo(store, rank, dist.get_world_size(), timedelta(seconds=20))


def _row(nbytes: int, value: int = 0) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def _waited(work: Any, limit: timedelta = LIMIT) -> tuple[str, float]:
    """What a wait raised, in small letters, and after how many seconds."""
    start = time.monotonic()
    try:
        work.wait(limit)
    except RuntimeError as error:
        return str(error).lower(), time.monotonic() - start
    return "", time.monotonic() - start


def _speaks_of_time(words: str) -> bool:
    return "imed out" in words or "timeout" in words


def _shorter(rank: int) -> list[int]:
    group, row = _group(rank), _row(1000)
    if rank == 0:
        group.send([_row(10, 7)], 1, 0).wait()
        dist.barrier()
        return []
    group.recv([row], 0, 0).wait()
    dist.barrier()
    return [int(row[9]), int(row[10])]


def test_1_a_message_may_be_shorter_than_its_receive() -> None:
    assert ranks.run(2, _shorter)[1] == [7, 0]


def _ordered(rank: int) -> list[int]:
    group = _group(rank)
    if rank == 0:
        works = [group.send([_row(5000, value)], 1, 3) for value in (1, 2, 3)]
        works.append(group.send([_row(5000, 9)], 1, 4))
        dist.barrier()
        for work in works:
            work.wait()
        dist.barrier()
        return []
    dist.barrier()
    rows = [_row(5000) for _ in range(4)]
    group.recv([rows[3]], 0, 4).wait()  # the last one sent, first
    for row in rows[:3]:
        group.recv([row], 0, 3).wait()
    dist.barrier()
    return [int(row[0]) for row in rows]


def test_2_messages_of_a_tag_come_in_order_and_do_not_wait_for_those_of_another() -> None:
    assert ranks.run(2, _ordered)[1] == [1, 2, 3, 9]


def _unasked(rank: int) -> Any:
    group, row = _group(rank), _row(2000)
    dist.barrier()
    if rank == 0:
        start = time.monotonic()
        group.send([_row(2000, 5)], 1, 0).wait(timedelta(seconds=20))
        return time.monotonic() - start
    time.sleep(1.0)
    group.recv([row], 0, 0).wait()
    return int(row[0])


def test_3_a_send_ends_when_its_receive_is_posted() -> None:
    seconds, value = ranks.run(2, _unasked)
    assert seconds > 0.5
    assert value == 5


def _out_of_time(rank: int) -> Any:
    group = _group(rank)
    dist.barrier()
    if rank == 0:
        first = _waited(group.recv([_row(10)], 1, 0), timedelta(seconds=0.5))
        dist.barrier()
        return first
    second = _waited(group.recv([_row(10)], 2, 0)) if rank == 1 else None
    third = _waited(group.recv([_row(10)], 0, 0)) if rank == 2 else None
    dist.barrier()
    return second or third


def test_4_a_wait_whose_time_is_over_says_so_and_breaks_the_connections() -> None:
    first, _, third = ranks.run(3, _out_of_time)
    assert _speaks_of_time(first[0])
    assert third[0], "it lost its connection to rank 0, and is told"
    assert third[1] < LIMIT.total_seconds()
    assert not _speaks_of_time(third[0])


def _leave(rank: int) -> Any:
    group = _group(rank)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        time.sleep(60)
    work = group.recv([_row(1000)], 1, 0)
    os.kill(pids[1], signal.SIGKILL)
    found = _waited(work)
    try:
        group.recv([_row(10)], 1, 0)
        started = ""
    except RuntimeError as error:
        started = str(error)
    return found, started


def test_5_and_6_a_receive_ends_with_its_connection_and_none_can_be_started_then() -> None:
    outcome = ranks.outcomes_of(2, _leave, timeout=30)[0]
    assert outcome.error is None, outcome.trace
    (words, seconds), started = outcome.value
    assert words
    assert not _speaks_of_time(words)
    assert seconds < LIMIT.total_seconds()
    assert started, "a receive was started on a broken connection"


def _forgotten(rank: int, what: str) -> Any:
    """Rank 1 stops when a message has begun, and is killed then."""
    group, row = _group(rank), _row(LONG, rank)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        if what == "send":
            group.recv([row], 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)  # sockets fill up
        dist.barrier()
        group.send([row], 0, 0)
        time.sleep(60)
    if what == "send":
        faults.wait_until_stopped(pids[1])
        work = group.send([row], 1, 0)
        time.sleep(0.5)
    else:
        work = group.recv([row], 1, 0)
        dist.barrier()
        while not row[0]:
            time.sleep(0.001)
        os.kill(pids[1], signal.SIGSTOP)
        faults.wait_until_stopped(pids[1])
    os.kill(pids[1], signal.SIGKILL)
    return _waited(work)


@pytest.mark.parametrize("what", ["send", "receive"])
def test_7_a_message_that_had_begun_is_forgotten_and_its_wait_ends_with_the_time_limit(what: str) -> None:
    outcome = ranks.outcomes_of(2, _forgotten, what, timeout=30)[0]
    assert outcome.error is None, outcome.trace
    words, seconds = outcome.value
    assert _speaks_of_time(words), words
    assert LIMIT.total_seconds() - 0.1 < seconds < LIMIT.total_seconds() + 3
