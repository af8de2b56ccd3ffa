"""A rank that is killed: every other rank raises soon, says in which operation and whose fault, and goes on living."""

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
from patience import within

from narrowcast import distributed as ncd
from narrowcast.distributed.transport.gloo import IN_ADVANCE_BYTES
from narrowcast.distributed.transport.gloo_connections import _Addresses
from narrowcast.errors import CollectiveError

pytestmark = pytest.mark.timeout(60)

SOON = 2.0
AT_ONCE = 0.5


def _survive(rank: int, op: str, place: str, victim: int, numel: int, async_op: bool) -> Any:
    """One call that goes well, one in which the victim dies, and two more."""

    def attempt() -> None:
        work = faults.call(op, rank, numel=numel, async_op=async_op)
        if async_op:
            work.wait()

    attempt()
    dist.barrier()
    if rank == victim:
        faults.at(place, faults.die)
    first, again, other = (faults.error_of(what) for what in (attempt, attempt, lambda: ncd.all_reduce(torch.ones(1))))
    return first, again, other


def _check_survivors(outcomes: list[ranks.Outcome], op: str, victim: int, first_rank: int = 0) -> None:
    for rank, outcome in enumerate(outcomes, first_rank):
        if rank == victim:
            assert outcome.exitcode == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.trace
        assert outcome.exitcode == 0
        (first, seconds), (again, seconds_again), (other, seconds_other) = outcome.value
        assert type(first) is CollectiveError, first
        assert str(first).startswith(f"{op}: rank {victim} is gone"), (rank, str(first))
        assert seconds < within(SOON)
        for later, name, took in ((again, op, seconds_again), (other, "all_reduce", seconds_other)):
            assert type(later) is CollectiveError
            assert str(later).startswith((f"{name}: ", f"{name} (after {op}): "))
            assert f"rank {victim} is gone" in str(later)
            assert took < within(AT_ONCE)


def _kill(world: int, op: str, place: str, victim: int, *, numel: int = faults.NUMEL, **options: Any) -> None:
    async_op = options.pop("async_op", False)
    start = time.monotonic()
    outcomes = ranks.outcomes_of(world, _survive, op, place, victim, numel, async_op, timeout=8, **options)
    assert time.monotonic() - start < within(10), "processes take long to exit"
    _check_survivors(outcomes, op, victim)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("place", ["encoding", "after headers", "stage one", "between stages", "stage two"])
def test_all_reduce_survivors_raise_and_name_the_dead_rank(world: int, place: str) -> None:
    _kill(world, "all_reduce", place, victim=world - 1)


@pytest.mark.parametrize(
    ("op", "place"),
    [
        ("all_gather", "encoding"),
        ("all_gather", "after headers"),
        ("all_to_all_single", "encoding"),
        ("all_to_all_single", "after headers"),
        ("reduce_scatter_tensor", "encoding"),
        ("broadcast", "encoding"),
        ("broadcast", "after headers"),
    ],
)
def test_survivors_of_other_collectives_raise(op: str, place: str) -> None:
    _kill(3, op, place, victim=0)


def test_survivors_of_a_reduce_scatter_raise_where_its_rows_are_too_long_to_leave_in_advance() -> None:
    _kill(3, "reduce_scatter_tensor", "after headers", victim=0, numel=4 * IN_ADVANCE_BYTES)


def test_rows_that_left_in_advance_may_do_and_then_the_next_call_raises() -> None:
    outcomes = ranks.outcomes_of(
        3, _survive, "reduce_scatter_tensor", "after headers", 0, faults.NUMEL, False, timeout=8
    )
    for outcome in outcomes[1:]:
        assert outcome.error is None, outcome.trace
        (first, _), (later, seconds), _ = outcome.value
        assert first is None or "rank 0 is gone" in str(first), "it has a row of every rank"
        assert "rank 0 is gone" in str(later)
        assert seconds < within(SOON)


def test_a_broadcast_fails_where_a_piece_is_missing_and_the_source_raises_in_its_next_call_at_the_latest() -> None:
    outcomes = ranks.outcomes_of(3, _survive, "broadcast", "passing on", 1, faults.NUMEL, False, timeout=8)
    _check_survivors(outcomes[1:], "broadcast", victim=1, first_rank=1)
    (first, _), (later, seconds), _ = outcomes[0].value
    assert first is None or "rank 1 is gone" in str(first), "the source has every piece, and may be done before"
    assert "rank 1 is gone" in str(later)
    assert seconds < within(SOON)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("place", ["encoding", "between stages", "stage two"])
def test_survivors_name_the_dead_rank_that_hosted_the_store(world: int, place: str) -> None:
    _kill(world, "all_reduce", place, victim=0, tcp=True)


def _stop_half_way(rank: int, place: str) -> Any:
    faults.call("all_reduce", rank)
    dist.barrier()
    if rank == 1:
        faults.at(place, faults.stop)
    error, _ = faults.error_of(lambda: faults.call("all_reduce", rank, numel=60_000_000))
    return error, time.monotonic()


@pytest.mark.parametrize("place", ["stage one", "between stages"])
def test_survivors_raise_soon_where_a_row_is_half_way_through_when_the_rank_dies(place: str) -> None:
    # Rows of 20 MB, of which a stopped rank takes no more than its sockets hold. gloo alone would wait until the
    # timeout of the group for the rest to go out, though the connection is gone.
    killed_at = []

    def meanwhile(processes: list[Any]) -> None:
        faults.wait_until_stopped(processes[1].pid)
        time.sleep(1.0)
        killed_at.append(time.monotonic())
        os.kill(processes[1].pid, signal.SIGKILL)

    outcomes = ranks.outcomes_of(3, _stop_half_way, place, timeout=25, group_timeout=60, meanwhile=meanwhile)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome.trace
        error, raised_at = outcome.value
        assert type(error) is CollectiveError
        assert str(error).startswith("all_reduce: rank 1 is gone")
        assert raised_at - killed_at[0] < within(SOON)


@pytest.mark.parametrize("place", ["encoding", "stage two"])
def test_an_asynchronous_survivor_raises_from_wait(place: str) -> None:
    _kill(4, "all_reduce", place, victim=1, async_op=True)


@pytest.mark.parametrize("place", ["encoding", "between stages"])
def test_survivors_of_a_small_tensor_that_travels_with_its_header_raise(place: str) -> None:
    _kill(3, "all_reduce", place, victim=2, numel=3000)


def _finish_before_noticing(rank: int) -> Any:
    good, tensor = faults.data(rank), faults.data(rank)
    ncd.all_reduce(good)
    dist.barrier()
    if rank == 2:
        faults.at("decoding", faults.die)
    error, seconds = faults.error_of(lambda: ncd.all_reduce(tensor))
    right = torch.equal(tensor, good)
    return error, right, seconds, *faults.error_of(lambda: ncd.all_reduce(torch.ones(1)))


def test_a_rank_that_got_all_rows_may_finish_and_raises_in_its_next_call() -> None:
    outcomes = ranks.outcomes_of(3, _finish_before_noticing, timeout=8)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.trace
        error, right, seconds, later, seconds_later = outcome.value
        assert right if error is None else "rank 2 is gone" in str(error)
        assert type(later) is CollectiveError
        assert "rank 2 is gone" in str(later)
        assert max(seconds, seconds_later) < within(SOON)


def _message(rank: int, sender_dies: bool) -> Any:
    tensor = torch.ones(20_000_000)  # more than sockets hold: a send ends when all of it is on its way

    def attempt() -> None:
        ncd.send(tensor, 1) if rank == 0 else ncd.recv(tensor, 0)

    attempt()
    dist.barrier()
    if rank == (0 if sender_dies else 1):
        faults.at("encoding" if sender_dies else "after headers", faults.die)
    return faults.error_of(attempt), faults.error_of(attempt)


@pytest.mark.parametrize("sender_dies", [True, False])
def test_a_message_whose_other_end_dies_raises(sender_dies: bool) -> None:
    outcomes = ranks.outcomes_of(2, _message, sender_dies, timeout=8)
    name, victim = ("recv", 0) if sender_dies else ("send", 1)
    (first, seconds), (again, seconds_again) = outcomes[1 - victim].value
    for error in (first, again):
        assert type(error) is CollectiveError
        assert str(error).startswith(f"{name}: rank {victim} is gone")
    assert seconds < within(SOON)
    assert seconds_again < within(AT_ONCE)


def _connecting(rank: int, broken: bool) -> tuple[str, float]:
    """Rank 1 comes to the meeting, and dies before it connects to anybody."""
    if rank == 1:
        _Addresses.set = lambda *given: faults.die()  # type: ignore[assignment,method-assign]
    if rank == 0 and broken:
        _Addresses.wait = _breaks  # type: ignore[method-assign]
    error, seconds = faults.error_of(lambda: ncd.all_reduce(torch.ones(8)))
    assert type(error) is CollectiveError, error
    return str(error), seconds


def _breaks(self: _Addresses, keys: list[str], timeout: timedelta) -> None:
    time.sleep(0.2)
    raise RuntimeError("Connection closed by peer")


def test_a_rank_that_dies_before_it_connects_is_named_at_the_timeout() -> None:
    """gloo itself waits five times as long, and does not say for whom."""
    outcomes = ranks.outcomes_of(3, _connecting, False, timeout=30, group_timeout=10)
    for rank in (0, 2):
        told, seconds = outcomes[rank].value
        assert "not within 10 s, the timeout, and nothing of rank 1 since" in told
        assert outcomes[rank].exitcode == 0
        assert 9.9 < seconds < within(11.5)


def test_a_connection_that_breaks_while_ranks_connect_ends_it_for_all_and_names_who_says_nothing() -> None:
    outcomes = ranks.outcomes_of(3, _connecting, True, timeout=30, group_timeout=200)
    for rank in (0, 2):
        told, seconds = outcomes[rank].value
        assert "as rank 0 saw: Connection closed by peer, and nothing of rank 1 since" in told
        assert outcomes[rank].exitcode == 0
        assert seconds < within(SOON)
