"""Rows that leave while ranks agree: they arrive whole, and where ranks disagree nothing of them stays behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from test_wire_contract import _gloo as make_gloo
from test_wire_contract import agree, header, others, row_of, swap

from narrowcast import distributed as ncd
from narrowcast.distributed.transport.gloo import IN_ADVANCE_BYTES, GlooWire
from narrowcast.distributed.transport.gloo_connections import Gloo
from narrowcast.distributed.transport.wire import IN_ADVANCE
from narrowcast.errors import MismatchError

pytestmark = pytest.mark.timeout(120)
CPU = torch.device("cpu")
ALONG, ALONE, SEVERAL = 50_000, 1_000_000, 3_500_000
"""Elements of all_reduces: rows ride along; one chunk goes in advance; the first rides along, the second in advance."""


# -- the wire ---------------------------------------------------------------------------------------------------------


def _exchange_in_advance(wire: Any, number: int, nbytes: int, words: str = "") -> list[torch.Tensor]:
    rows = [torch.zeros(wire.in_advance, dtype=torch.uint8) for _ in range(wire.size)]
    expected = []
    mine = {peer: row_of(wire.rank, peer, number, nbytes, CPU) for peer in others(wire)}

    def leave() -> None:
        expected.append(wire.expect(rows, IN_ADVANCE))
        for peer, row in mine.items():
            wire.send(row, [peer], IN_ADVANCE)

    nothing = [torch.empty(0, dtype=torch.uint8)] * wire.size
    wire.agree(header(number, words), lambda peer: None, nothing, leave, in_advance=True)
    assert sorted(expected[0]()) == sorted(others(wire))
    wire.flush()
    return [row[:nbytes] for row in rows]


def _rows(rank: int) -> None:
    wire, _ = make_gloo(rank)
    assert wire.in_advance == 0, "before ranks have agreed once"
    agree(wire, 1, CPU)
    assert wire.in_advance == IN_ADVANCE_BYTES
    for number, nbytes in enumerate((1, 20_000, 300_000, IN_ADVANCE_BYTES), 2):
        found = _exchange_in_advance(wire, number, nbytes)
        for peer in others(wire):
            assert torch.equal(found[peer], row_of(peer, rank, number, nbytes, CPU))
    agree(wire, 6, CPU)
    swap(wire, CPU, lambda a, b: 30_000, 6)


def test_rows_of_any_size_arrive_whole() -> None:
    ranks.run(3, _rows, timeout=60)


def _disagree(rank: int, early: tuple[int, ...], other: int) -> list[str]:
    """The ranks of `early` send rows in advance, each of another size; `other` makes another call than the rest."""
    wire, _ = make_gloo(rank)
    agree(wire, 1, CPU)
    texts, number = [], 1
    for again in range(3):
        number += 1
        words = "other" if rank == other else "same"
        nbytes = 100_000 * (1 + rank) + again

        def call(number: int = number, words: str = words, nbytes: int = nbytes) -> None:
            if rank in early:
                _exchange_in_advance(wire, number, nbytes, words)
            else:
                agree(wire, number, CPU, words)

        with pytest.raises(MismatchError) as caught:
            call()
        assert not wire.agreed
        assert not wire._going._messages, "everything has left"
        texts.append(str(caught.value))
    number += 1
    found = _exchange_in_advance(wire, number, 200_000)  # nothing of before is in these
    for peer in others(wire):
        assert torch.equal(found[peer], row_of(peer, rank, number, 200_000, CPU))
    return texts


@pytest.mark.parametrize("early", [(), (0,), (1,), (0, 1), (0, 2), (0, 1, 2)])
def test_rows_of_ranks_that_disagree_are_taken_off_the_connections(early: tuple[int, ...]) -> None:
    first, *rest = ranks.run(3, _disagree, early, 1, timeout=60)
    assert rest == [first] * 2
    assert all("rank 1 called" in text for text in first)


# -- collectives ------------------------------------------------------------------------------------------------------


def _all_reduce(numel: int, codec: str, op: Any = dist.ReduceOp.SUM) -> Callable[[int, bool], Any]:
    def call(rank: int, async_op: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
        tensor = torch.full((numel,), 2.0 * (rank + 1))
        total = torch.full((numel,), 2.0 * sum(range(1, dist.get_world_size() + 1)))
        if op == dist.ReduceOp.AVG:
            total /= dist.get_world_size()
        return ncd.all_reduce(tensor, op, async_op=async_op, codec=codec), tensor, total

    return call


def _scattered(rank: int, async_op: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
    world = dist.get_world_size()
    output, given = torch.zeros(300_000), torch.full((300_000 * world,), float(rank))
    work = ncd.reduce_scatter_tensor(output, given, async_op=async_op, codec="raw")
    return work, output, torch.full((300_000,), float(sum(range(world))))


def _broadcast(rank: int, async_op: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
    tensor = torch.full((400_000,), 1.0 + rank)
    return ncd.broadcast(tensor, 0, async_op=async_op, codec="raw"), tensor, torch.ones(400_000)


CALLS = [
    *(_all_reduce(numel, "int8") for numel in (1, ALONG, ALONE, ALONE + 128, SEVERAL)),
    *(_all_reduce(SEVERAL, codec) for codec in ("int4", "raw", "int8:block=64")),
    _all_reduce(ALONE, "int8", dist.ReduceOp.AVG),
    _scattered,
    _broadcast,
]


def _hostile(rank: int, seed: int, async_op: bool) -> list[str]:
    """Rounds of four calls; in some, ranks make different ones. What each rank does, all of them can tell."""
    world, draw = dist.get_world_size(), random.Random(seed)
    faults.call("all_reduce", rank)  # from here on rows may leave in advance
    texts = []
    for _ in range(12):
        picks = []
        for _ in range(4):
            alike = draw.random() < 0.4
            every = (
                [draw.randrange(len(CALLS))] * world if alike else [draw.randrange(len(CALLS)) for _ in range(world)]
            )
            picks.append(every)
        started: list[tuple[list[int], Any]] = []
        for every in picks:
            started.append((every, faults_of(lambda every=every: CALLS[every[rank]](rank, async_op))))  # type: ignore[misc]
        for every, (result, error) in started:
            if error is None and async_op:
                _, error = faults_of(result[0].wait)
            if len(set(every)) == 1:
                assert error is None, error
                # Equal elements are on the grid, but for the scale's own rounding: 2^-8 twice is 0.8%. A row that is
                # another call's, or missing, would be an error of a tenth and more.
                torch.testing.assert_close(result[1], result[2], rtol=0.01, atol=0.0)
            else:
                assert type(error) is MismatchError, (every, error)
                texts.append(str(error))
    return texts


def faults_of(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:
        return None, error


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_calls_that_differ_raise_the_same_everywhere_and_those_between_them_are_right(
    world: int, async_op: bool
) -> None:
    first, *rest = ranks.run(world, _hostile, 7 * world, async_op, timeout=100)
    assert len(first) > 10
    assert rest == [first] * (world - 1)


def _rows_before_agreement(rank: int, numel: int) -> tuple[int, int, int]:
    """Messages of a call in which no row may leave in advance, of one in which it may, and how many rows then did."""
    counts = [0]
    early = [0]
    plain, plain_send = Gloo.send, GlooWire.send

    def counted(self: Gloo, *args: Any, **options: Any) -> Any:
        counts[0] += 1
        return plain(self, *args, **options)

    def noted(self: GlooWire, row: torch.Tensor, peers: Any, stage: int = 0) -> None:
        early[0] += stage == IN_ADVANCE
        plain_send(self, row, peers, stage)

    Gloo.send, GlooWire.send = counted, noted  # type: ignore[method-assign]
    faults.call("all_reduce", rank, numel=numel)
    first = counts[0]
    assert early == [0]
    faults.call("all_reduce", rank, numel=numel)
    return first, counts[0] - first, early[0]


@pytest.mark.parametrize(("numel", "early"), [(ALONG, 0), (ALONE, 2), (SEVERAL, 2)])
def test_rows_in_advance_are_no_more_messages(numel: int, early: int) -> None:
    for first, second, left in ranks.run(3, _rows_before_agreement, numel, timeout=60):
        assert first == second
        assert left == early
