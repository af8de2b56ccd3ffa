"""What ranks compare over NCCL, and how often: the real wire, over a stand-in for NCCL's group."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import faults
import nccl_stand_in
import pytest
import ranks
import torch
import torch.distributed as dist

from narrowcast import distributed as ncd
from narrowcast.distributed.transport import nccl
from narrowcast.distributed.transport.gloo import GlooWire
from narrowcast.errors import CollectiveError, MismatchError

pytestmark = pytest.mark.timeout(60)


def _counted() -> list[int]:
    """How many times this rank compares headers from now on."""
    compared, plain = [0], GlooWire.agree

    def agree(self: GlooWire, *args: Any, **options: Any) -> None:
        compared[0] += 1
        plain(self, *args, **options)

    GlooWire.agree = agree  # type: ignore[method-assign]
    return compared


def _exchange(counts: list[list[int]], rank: int) -> None:
    """Send `counts[rank][peer]` elements to each peer."""
    sent, expected = counts[rank], [row[rank] for row in counts]
    source = torch.cat([torch.full((count,), 10.0 * rank + peer) for peer, count in enumerate(sent)])
    output = torch.empty(sum(expected))
    ncd.all_to_all_single(output, source, expected, sent, codec="raw")
    right = torch.cat([torch.full((count,), 10.0 * peer + rank) for peer, count in enumerate(expected)])
    assert torch.equal(output, right)


def _changing_counts(rank: int) -> None:
    nccl_stand_in.use()
    world = dist.get_world_size()
    counts = [[3 + peer for peer in range(world)] for _ in range(world)]
    for turn in range(6):
        _exchange(counts, rank)
        counts[1][2] = 100 * (turn % 3)  # nothing else changes: the other ranks cannot see it


@pytest.mark.parametrize("world", [3, 5])
def test_counts_that_change_between_two_ranks_only_keep_nobody_waiting(world: int) -> None:
    ranks.run(world, _changing_counts, timeout=30, group_timeout=10)


def _wrong_counts(rank: int) -> str:
    nccl_stand_in.use()
    counts = [[4] * 3 for _ in range(3)]
    _exchange(counts, rank)
    wrong = [4, 4, 4] if rank != 2 else [4, 5, 4]
    error, _ = faults.error_of(
        lambda: ncd.all_to_all_single(torch.empty(sum(wrong)), torch.empty(12), wrong, [4, 4, 4], codec="raw")
    )
    assert type(error) is MismatchError
    _exchange(counts, rank)
    return str(error)


def test_counts_that_do_not_fit_are_told_on_every_rank_though_ones_that_did_came_before() -> None:
    first, *rest = ranks.run(3, _wrong_counts, timeout=30, group_timeout=10)
    assert rest == [first] * 2
    assert "rank 1 sends 4 elements to rank 2, which expects 5" in first


def _known(rank: int) -> list[int]:
    """How often headers are compared in each of these, each made three times in a row."""
    nccl_stand_in.use()
    compared, found = _counted(), []
    x, parts = torch.ones(6), [torch.ones(numel) for numel in (1, 2, 3)]
    calls: list[Any] = [
        lambda: ncd.all_reduce(x, codec="raw"),
        lambda: ncd.all_gather([part.clone() for part in parts], parts[rank], codec="raw"),
        lambda: ncd.all_gather_into_tensor(torch.empty(18), x, codec="raw"),
        lambda: ncd.reduce_scatter(torch.empty(rank + 1), parts, codec="raw"),
        lambda: ncd.reduce_scatter_tensor(torch.empty(2), x, codec="raw"),
        lambda: ncd.all_to_all_single(torch.empty(6), x, codec="raw"),
        lambda: ncd.all_to_all_single(torch.empty(6), x, [2, 2, 2], codec="raw"),
        lambda: ncd.all_to_all([torch.empty(2)] * 3, list(x.view(3, 2)), codec="raw"),
    ]
    for call in calls:
        before = compared[0]
        for _ in range(3):
            call()
        found.append(compared[0] - before)
    return found


def test_calls_alike_are_compared_once_and_those_with_counts_of_their_own_always() -> None:
    assert ranks.run(3, _known, timeout=30) == [[1] * 6 + [3] * 2] * 3


def _many(rank: int) -> list[int]:
    nccl_stand_in.use()
    nccl.REMEMBERED = 8
    compared, found = _counted(), []
    for sizes in (range(1, 9), range(1, 9), range(9, 12), range(4, 9), range(1, 4)):
        before = compared[0]
        for numel in sizes:
            ncd.all_reduce(torch.ones(numel), codec="raw")
        found.append(compared[0] - before)
    return found


def test_what_is_agreed_on_is_forgotten_when_much_else_came_since_on_all_ranks_alike() -> None:
    # The last three: 1, 2 and 3 were forgotten for 9, 10 and 11, and 4 to 8 were used since.
    assert ranks.run(2, _many, timeout=30) == [[8, 0, 3, 0, 3]] * 2


def _nobody_comes(rank: int, how: str) -> tuple[str, float]:
    """Rank 1 connects over gloo, and never comes to NCCL's communicator."""
    nccl_stand_in.use()
    if rank == 1:
        if how == "killed":
            nccl_stand_in.StandIn.alltoall = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        else:
            nccl_stand_in.StandIn.alltoall = lambda *given: time.sleep(1000.0)  # type: ignore[assignment]
    error, seconds = faults.error_of(lambda: ncd.all_reduce(torch.ones(8)))
    assert type(error) is CollectiveError
    return str(error), seconds


def test_a_rank_that_does_not_come_to_nccl_is_not_waited_for_longer_than_the_timeout() -> None:
    for told, seconds in ranks.run(3, _nobody_comes, "stopped", timeout=50, group_timeout=3):
        assert "no connection within 3 s" in told
        assert "NCCL made no connections, though gloo did" in told
        assert seconds >= 2.5


def test_a_rank_that_dies_before_it_comes_to_nccl_is_named_long_before_the_timeout() -> None:
    outcomes = ranks.outcomes_of(3, _nobody_comes, "killed", timeout=40, group_timeout=500)
    for rank in (0, 2):  # it may die while the others still connect over gloo, which does not say who it was
        assert re.search(r"rank 1 is gone|nothing of ranks? (\d, )*1", outcomes[rank].value[0]), outcomes[rank]


def _meeting_raises(rank: int) -> str:
    nccl_stand_in.use()
    plain = nccl_stand_in.StandIn.alltoall
    if rank == 1:
        nccl_stand_in.StandIn.alltoall = lambda *given: {}["no network"]  # type: ignore[assignment,return-value]
    error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(8)))
    nccl_stand_in.StandIn.alltoall = plain  # type: ignore[method-assign]
    x = torch.ones(8)
    ncd.all_reduce(x)
    assert float(x[0]) == 2.0
    return f"{type(error).__name__}: {error}"


def test_what_goes_wrong_in_nccls_meeting_is_told_on_every_rank_and_the_next_call_goes_on() -> None:
    first, second = ranks.run(2, _meeting_raises, timeout=40, group_timeout=30)
    assert second == "KeyError: 'no network'"
    assert "rank 1 failed in it: KeyError: 'no network'" in first
