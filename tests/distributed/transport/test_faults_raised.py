"""A rank that fails in a collective: it raises its own error, the others one that names it, and the next call works.

And a rank that holds a NaN: every rank sees it, in its block and nowhere else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from patience import within
from torch import Tensor

import cases
import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast.errors import CollectiveError

pytestmark = pytest.mark.timeout(60)

SOON = 2.0


def _fail_and_go_on(rank: int, op: str, place: str, culprit: int, async_op: bool) -> Any:
    faults.call(op, rank)
    dist.barrier()
    if rank == culprit:
        faults.at(place, faults.run_out_of_memory)

    def attempt() -> None:
        work = faults.call(op, rank, async_op=async_op)
        if async_op:
            work.wait()

    failed = faults.error_of(attempt)
    tensor = faults.data(rank)
    ncd.all_reduce(tensor, codec="raw")
    return failed, tensor


@pytest.mark.parametrize(
    ("world", "op", "place", "async_op"),
    [
        (2, "all_reduce", "encoding", False),
        (3, "all_reduce", "encoding", True),
        (4, "all_reduce", "stage one", False),
        (3, "all_reduce", "between stages", False),
        (4, "all_reduce", "between stages", True),
        (3, "all_reduce", "stage two", False),
        (3, "all_gather", "encoding", False),
        (3, "all_to_all_single", "encoding", False),
        (3, "reduce_scatter_tensor", "encoding", False),
        (3, "broadcast", "encoding", False),
    ],
)
def test_all_ranks_raise_and_the_next_collective_works(world: int, op: str, place: str, async_op: bool) -> None:
    outcomes = ranks.run(world, _fail_and_go_on, op, place, 0, async_op, timeout=20)
    total = torch.stack([faults.data(rank) for rank in range(world)]).sum(0)
    for rank, ((error, seconds), tensor) in enumerate(outcomes):
        if rank == 0:
            assert type(error) is MemoryError
            assert str(error) == "no room left for codes"
        else:
            assert type(error) is CollectiveError
            assert str(error).startswith(f"{op}: rank 0 failed in it: MemoryError: no room left for codes.")
        assert seconds < within(SOON)
        assert torch.allclose(tensor, total, atol=1e-5)


def _finish_before_the_others(rank: int) -> Any:
    """Rank 0 fails when all its rows are sent: the others may finish, and repeat their next call on a new wire."""
    faults.call("all_reduce", rank)
    dist.barrier()
    if rank == 0:
        faults.at("decoding", faults.run_out_of_memory)
    error, _ = faults.error_of(lambda: faults.call("all_reduce", rank, numel=300))
    totals = []
    for _ in range(3):
        tensor = torch.ones(7)
        ncd.all_reduce(tensor, codec="raw")
        totals.append(tensor[0].item())
    return type(error), totals


def test_ranks_that_had_finished_the_failed_call_are_not_out_of_step() -> None:
    for _ in range(3):
        first, *others = ranks.run(3, _finish_before_the_others, timeout=20)
        assert first == (MemoryError, [3.0] * 3)
        for error, totals in others:
            assert error in (type(None), CollectiveError)
            assert totals == [3.0] * 3


def _interrupted(rank: int, async_op: bool) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored
    ncd.all_reduce(torch.ones(10))
    dist.barrier()
    if rank == 1:
        time.sleep(2.0)  # keeps rank 0 waiting
        return faults.error_of(lambda: ncd.all_reduce(torch.ones(10)))
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    def attempt() -> None:
        work = ncd.all_reduce(torch.ones(10), async_op=async_op)
        if async_op:
            assert work is not None
            work.wait()

    return faults.error_of(attempt)


def test_an_interrupt_in_wait_is_prompt() -> None:
    (error, seconds), (other, _) = ranks.run(2, _interrupted, True, timeout=20)
    assert type(error) is KeyboardInterrupt
    assert seconds < within(0.9, most=1.9), "it came before the other rank did"
    assert other is None or "rank 0" in str(other)


def test_an_interrupt_in_a_synchronous_collective_ends_it_on_all_ranks() -> None:
    (error, seconds), (other, seconds_other) = ranks.run(2, _interrupted, False, timeout=20)
    assert type(error) is KeyboardInterrupt
    assert seconds < within(2.0 + SOON), "as soon as its wait ends"
    assert type(other) is CollectiveError
    assert "rank 0 failed in it: KeyboardInterrupt" in str(other)
    assert seconds_other < within(SOON)


# -- non-finite values ------------------------------------------------------------------------------------------------

NUMEL = 700
HIT = 130
WORLD = 3


def _values(rank: int) -> Tensor:
    return cases.mixed(NUMEL, seed=rank).clamp(-1e6, 1e6)


def _reduce_with(rank: int) -> dict[str, list[Tensor]]:
    found = {}
    for name, codec in cases.CODECS.items():
        results = []
        for value in (None, float("nan"), float("inf"), float("-inf")):
            tensor = _values(rank)
            if rank == 1 and value is not None:
                tensor[HIT] = value
            ncd.all_reduce(tensor, codec=codec, seed=5 if codec.stochastic else None)
            results.append(tensor)
        found[name] = results
    return found


@pytest.fixture(scope="module")
def reductions() -> list[dict[str, list[Tensor]]]:
    return ranks.run(WORLD, _reduce_with, timeout=60)


def _hit_block(codec: nc.Codec) -> Tensor:
    """Which elements share a block with the one that was hit: blocks start with the part that a rank owns."""
    part = -(-NUMEL // (WORLD * 128)) * 128
    start = HIT // part * part
    end = min(NUMEL, start + part)
    size = cases.block_size(codec, end - start)
    first = start + (HIT - start) // size * size
    hit = torch.zeros(NUMEL, dtype=torch.bool)
    hit[first : min(end, first + size)] = True
    return hit


@pytest.mark.parametrize("name", cases.CODECS)
def test_a_value_that_is_not_finite_spoils_its_block_on_every_rank_and_nothing_else(
    name: str, reductions: list[dict[str, list[Tensor]]]
) -> None:
    hit = _hit_block(cases.CODECS[name])
    plain, *spoilt = reductions[0][name]
    for tensor, others in zip(spoilt, zip(*(of_rank[name][1:] for of_rank in reductions), strict=True), strict=True):
        assert all(cases.same_bits(tensor, other) for other in others)
        assert not tensor[hit].isfinite().any()
        assert cases.same_bits(tensor[~hit], plain[~hit])
