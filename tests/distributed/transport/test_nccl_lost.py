"""Calls that are lost on the stream, over NCCL: nobody goes on as if they had gone well, and all ranks find together.

The real NCCL wire, over a stand-in for NCCL's group. What the guard does when a peer has given up is done by hand.
"""

from __future__ import annotations

import time
from typing import Any

import faults
import nccl_stand_in
import pytest
import ranks
import torch
import torch.distributed as dist

from narrowcast import distributed as ncd
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.nccl import NcclWire
from narrowcast.distributed.transport.wire import WireError
from narrowcast.errors import CollectiveError

pytestmark = pytest.mark.timeout(60)


def _right() -> bool:
    x = torch.full((300,), float(dist.get_rank() + 1))
    ncd.all_reduce(x, codec="raw")
    return float(x[7]) == sum(range(1, dist.get_world_size() + 1))


def _lose(calls: int) -> NcclWire:
    """Make calls whose rows never arrive, as a stream does; then notice that rank 1 has given one up."""
    wire = group_for(dist.group.WORLD, torch.device("cpu"))._wire
    assert isinstance(wire, NcclWire)
    plain, NcclWire._add_up = NcclWire._add_up, lambda self, tensor: None  # type: ignore[method-assign]
    for _ in range(calls):
        ncd.all_reduce(torch.ones(300), codec="raw")
    NcclWire._add_up = plain  # type: ignore[method-assign]
    while wire.trouble is None:
        try:
            wire.control.gloo.look(1)
            time.sleep(0.05)
        except WireError as error:
            wire.trouble = error
    return wire


def _lost(rank: int, calls: int, told: bool) -> tuple[list[Any], list[bool]]:
    """What each of this rank's next calls comes to, after rank 1 refused one that the others had given their stream."""
    nccl_stand_in.use()
    group_for(dist.group.WORLD, torch.device("cpu")).nccl = True  # as which the wire alone does not make it known
    assert _right()
    assert _right()
    errors: list[Any] = []
    if rank == 1:
        errors.append(faults.error_of(lambda: ncd.all_reduce(torch.ones(300, dtype=torch.int64), codec="raw"))[0])
    else:
        wire = _lose(calls)
        if told:
            errors.append(wire.lost("all_reduce"))
    results = []
    for _ in range(calls + 3 + (calls - 1 if rank == 1 else 0)):  # all ranks make as many calls
        error, _ = faults.error_of(lambda: results.append(_right()))
        errors.append(error)
    return errors, results


@pytest.mark.parametrize(("calls", "told"), [(1, True), (1, False), (2, False), (3, True)])
def test_what_a_stream_has_lost_raises_and_all_ranks_meet_again(calls: int, told: bool) -> None:
    outcomes = ranks.run(3, _lost, calls, told, timeout=50, group_timeout=15)
    for rank, (errors, results) in enumerate(outcomes):
        assert all(results), (rank, results)  # what did not raise is right
        assert isinstance(errors[0], (CollectiveError, TypeError)), (rank, errors)
        assert errors[-1] is None, (rank, errors)  # and in the end it goes on
    for rank in (0, 2):
        assert any(isinstance(error, CollectiveError) for error in outcomes[rank][0])
    if (calls, told) == (1, True):
        assert [len([e for e in errors if e is not None]) for errors, _ in outcomes] == [1, 1, 1]


def _lost_before_the_guard_looks(rank: int) -> tuple[Any, list[Any]]:
    """The next call is the first to notice, as its arguments are new and ranks compare them."""
    nccl_stand_in.use()
    group = group_for(dist.group.WORLD, torch.device("cpu"))
    group.nccl = True
    assert _right()
    told = None
    if rank == 1:
        told = faults.error_of(lambda: ncd.all_reduce(torch.ones(300, dtype=torch.int64), codec="raw"))[0]
    else:
        wire = group._wire
        assert isinstance(wire, NcclWire)
        plain, NcclWire._add_up = NcclWire._add_up, lambda self, tensor: None  # type: ignore[method-assign]
        ncd.all_reduce(torch.ones(300), codec="raw")
        NcclWire._add_up = plain  # type: ignore[method-assign]
        wire._guard.unfinished = lambda: True  # type: ignore[method-assign]
    errors = [faults.error_of(lambda: ncd.all_reduce(torch.ones(301), codec="raw"))[0]]
    if rank != 1:
        told = wire.lost("all_reduce")  # as the `wait` of the first call finds it
    errors.append(None if _right() else "wrong")
    return told, errors


def test_calls_that_end_with_the_connections_raise_though_the_guard_has_not_looked() -> None:
    outcomes = ranks.run(3, _lost_before_the_guard_looks, timeout=50, group_timeout=15)
    for rank, (told, (next_one, after_it)) in enumerate(outcomes):
        assert isinstance(told, TypeError if rank == 1 else CollectiveError), (rank, told)
        assert isinstance(next_one, CollectiveError), (rank, next_one)  # on all ranks, so that they meet again
        assert after_it is None, (rank, after_it)
    assert all("rank 1 failed in it" in str(told) for told, _ in (outcomes[0], outcomes[2]))


def _own_earlier_call(rank: int) -> Any:
    """A rank that gives a call up ends what it has under way itself."""
    nccl_stand_in.use()
    group = group_for(dist.group.WORLD, torch.device("cpu"))
    group.nccl = True
    assert _right()
    wire = group._wire
    assert isinstance(wire, NcclWire)
    assert wire.lost("all_reduce") is None
    wire._guard.unfinished = lambda: rank == 1  # type: ignore[method-assign]
    dtype = torch.int64 if rank == 1 else torch.float32
    error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(301, dtype=dtype), codec="raw"))
    assert error is not None
    return wire.lost("all_reduce")


def test_what_a_rank_has_under_way_when_it_gives_up_another_call_is_lost_to_itself_too() -> None:
    first, second = ranks.run(2, _own_earlier_call, timeout=50, group_timeout=15)
    assert first is None  # its stream was through
    assert isinstance(second, CollectiveError)
    assert "rank 1 failed in it" in str(second)
