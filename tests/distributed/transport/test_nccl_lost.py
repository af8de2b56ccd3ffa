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
