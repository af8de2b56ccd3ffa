"""A rank that is stopped: the others raise at the group's timeout, and all go on together once it wakes up."""

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
from narrowcast.distributed.transport import group as peers
from narrowcast.errors import CollectiveError

pytestmark = pytest.mark.timeout(60)

LIMIT = float(round(within(2.0, most=5.0, idle=3.0)))  # in which a call must go well, and so must what a test scripts
OVER = 1.1 * LIMIT + 0.15  # the tests' own allowance for a loaded machine


def _wake(processes: list[Any], victim: int, after: float) -> None:
    """Wait until the victim has stopped itself, and send it on some seconds later."""
    pid = processes[victim].pid
    faults.wait_until_stopped(pid)
    time.sleep(after)
    os.kill(pid, signal.SIGCONT)


def _total(world: int, numel: int = faults.NUMEL) -> torch.Tensor:
    return torch.stack([faults.data(rank, numel) for rank in range(world)]).sum(0)


def _right(rank: int, world: int, group: Any = None) -> bool:
    """Whether an all_reduce of all ranks ends with the right numbers."""
    tensor = faults.data(rank)
    ncd.all_reduce(tensor, group=group, codec="raw")
    return torch.allclose(tensor, _total(world), atol=1e-5)


def _stop_and_go_on(rank: int, op: str, place: str, victim: int, calls: int) -> Any:
    world = dist.get_world_size()
    assert _right(rank, world)
    dist.barrier()
    if rank == victim:
        if place == "before":
            faults.stop()
        else:
            faults.at(place, faults.stop)
    errors = [faults.error_of(lambda: faults.call(op, rank, numel=4_000_000)) for _ in range(calls)]
    return errors, _right(rank, world), _right(rank, world)


def _check(outcomes: list[ranks.Outcome], op: str, victim: int) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.trace
        assert outcome.exitcode == 0
        errors, *right = outcome.value
        assert all(right)
        for n, (error, seconds) in enumerate(errors):
            assert type(error) is CollectiveError, error
            assert str(error).startswith(op)
            assert n > 0 or f"rank {victim} did not answer" in str(error)
            assert rank == victim or 0.8 * LIMIT < seconds < within(OVER)


@pytest.mark.parametrize(
    ("world", "op", "place"),
    [
        (2, "all_reduce", "between stages"),
        (4, "all_reduce", "encoding"),
        (4, "all_reduce", "stage two"),
        (3, "all_gather", "after headers"),
    ],
)
def test_others_raise_at_the_timeout_and_all_go_on_after_it(world: int, op: str, place: str) -> None:
    outcomes = ranks.outcomes_of(
        world,
        _stop_and_go_on,
        op,
        place,
        world - 1,
        1,
        timeout=20,
        group_timeout=LIMIT,
        meanwhile=lambda processes: _wake(processes, world - 1, 1.3 * LIMIT),
    )
    _check(outcomes, op, world - 1)


def _wait_in_a_row(rank: int, first: int) -> Any:
    """Rank 1 waits for rank 0, which waits for rank 2; `first` is the one whose time is up first."""
    ncd.all_reduce(torch.ones(1000))
    dist.barrier()
    if rank == 2:
        (made,) = (peer for of_group in peers._known.values() for peer in of_group.values())
        made._wire.gloo.targets.reverse()  # type: ignore[union-attr]
        faults.at("a header", faults.stop)  # rank 1 has it, rank 0 has not
    elif rank != first:
        faults.at("a header", lambda: time.sleep(0.02))
    elif rank == 0:  # gloo closes its connections before it can say why
        faults.at("failing", lambda: time.sleep(0.05))
    error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(1000)))
    return str(error), _right(rank, 3)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_is_not_blamed_for_waiting_itself(first: int) -> None:
    outcomes = ranks.outcomes_of(
        3,
        _wait_in_a_row,
        first,
        timeout=20,
        group_timeout=2 * LIMIT,
        meanwhile=lambda processes: _wake(processes, 2, 2.3 * LIMIT),
    )
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        error, right = outcome.value
        assert f"rank 2 did not answer rank 0 within {2 * LIMIT:g} s" in error
        assert right


@pytest.mark.parametrize(("world", "place"), [(2, "before"), (3, "between stages")])
def test_the_same_holds_where_the_stopped_rank_hosts_the_store(world: int, place: str) -> None:
    outcomes = ranks.outcomes_of(
        world,
        _stop_and_go_on,
        "all_reduce",
        place,
        0,
        1,
        timeout=20,
        group_timeout=LIMIT,
        tcp=True,
        meanwhile=lambda processes: _wake(processes, 0, 1.3 * LIMIT),
    )
    _check(outcomes, "all_reduce", 0)


@pytest.mark.parametrize("tcp", [False, True])
def test_calls_made_while_the_rank_is_still_stopped_raise_at_the_timeout_too(tcp: bool) -> None:
    outcomes = ranks.outcomes_of(
        3,
        _stop_and_go_on,
        "all_reduce",
        "before",
        0,
        2,
        timeout=25,
        group_timeout=LIMIT,
        tcp=tcp,
        meanwhile=lambda processes: _wake(processes, 0, 2.4 * LIMIT),
    )
    _check(outcomes, "all_reduce", 0)


def _first_call(rank: int, victim: int) -> Any:
    if rank == victim:
        faults.stop()
    return faults.error_of(lambda: faults.call("all_reduce", rank)), _right(rank, 2)


@pytest.mark.parametrize(("victim", "tcp"), [(1, False), (0, True)])
def test_a_rank_that_does_not_come_to_the_first_collective_may_come_to_the_next(victim: int, tcp: bool) -> None:
    outcomes = ranks.outcomes_of(
        2,
        _first_call,
        victim,
        timeout=20,
        group_timeout=LIMIT,
        tcp=tcp,
        meanwhile=lambda processes: _wake(processes, victim, 1.3 * LIMIT),
    )
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        (error, seconds), right = outcome.value
        assert type(error) is CollectiveError
        reason = "the store of the group does not answer" if tcp else f"rank {victim} did not come"
        assert reason in str(error)
        assert seconds < within(OVER)
        assert right


def _stop_and_fail() -> None:
    faults.stop()
    faults.run_out_of_memory()


def _a_call_apart(rank: int) -> Any:
    """Rank 2 stops, then fails in a broadcast that the others finish; what they give up is the call after it."""
    assert _right(rank, 3)
    dist.barrier()
    if rank == 2:
        faults.at("decoding", _stop_and_fail)
    tensor = torch.full((10,), float(rank + 1))
    first, _ = faults.error_of(lambda: ncd.broadcast(tensor, src=0, codec="raw"))
    second, seconds = faults.error_of(lambda: faults.call("all_reduce", rank))
    return type(first), tensor[0].item(), second, seconds, _right(rank, 3), _right(rank, 3)


def test_ranks_that_were_a_call_apart_when_it_failed_are_in_step_again() -> None:
    outcomes = ranks.run(
        3, _a_call_apart, timeout=20, group_timeout=LIMIT, meanwhile=lambda processes: _wake(processes, 2, 1.3 * LIMIT)
    )
    for rank, (first, value, second, seconds, *right) in enumerate(outcomes):
        assert (first, value) == ((MemoryError, 3.0) if rank == 2 else (type(None), 1.0))
        assert type(second) is CollectiveError
        assert "rank 2 did not answer" in str(second)
        assert seconds < within(OVER)
        assert right == [True, True]


def _go_on_without(rank: int) -> Any:
    assert _right(rank, 3)
    dist.barrier()
    if rank == 2:
        faults.stop()
        return faults.error_of(lambda: faults.call("all_reduce", rank)), True
    failed = faults.error_of(lambda: faults.call("all_reduce", rank))
    pair = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=LIMIT))
    return failed, _right(rank, 2, pair)


def test_a_new_group_of_the_others_works_while_the_rank_is_stopped() -> None:
    stopped_until = []

    def meanwhile(processes: list[Any]) -> None:
        deadline = time.monotonic() + within(15, most=40.0)
        while any(process.is_alive() for process in processes[:2]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stopped_until.append(faults.is_stopped(processes[2].pid))
        os.kill(processes[2].pid, signal.SIGCONT)

    outcomes = ranks.outcomes_of(3, _go_on_without, timeout=20, group_timeout=LIMIT, meanwhile=meanwhile)
    assert stopped_until == [True]
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        (error, seconds), right = outcome.value
        assert type(error) is CollectiveError
        assert seconds < within(OVER)
        assert right
