"""The conformance suite of `Wire`: every implementation runs it, on real ranks.

A new implementation is one more line in `WIRES`. Those that need a GPU run on one: several ranks share it, over NCCL as
hosts of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from patience import within
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from narrowcast import codec as as_codec
from narrowcast.distributed.transport.agreement import Call, Header
from narrowcast.distributed.transport.gloo import EAGER, SHORT, GlooWire
from narrowcast.distributed.transport.gloo_connections import Gloo
from narrowcast.distributed.transport.nccl import NcclWire
from narrowcast.distributed.transport.staged import StagedWire
from narrowcast.distributed.transport.wire import Wire
from narrowcast.errors import MismatchError

pytestmark = pytest.mark.timeout(120)
SOON = 3.0
"""Seconds in which a break is noticed, on a busy machine too; a wait in gloo would take `LIMIT`."""
LIMIT = 20.0

Made = tuple[Wire, torch.device]


def _store() -> dist.Store:
    return dist.PrefixStore("wire", c10d._get_default_store())


def _gloo(rank: int, limit: float = LIMIT) -> Made:
    seconds = timedelta(seconds=limit)
    return GlooWire(Gloo(_store(), rank, range(dist.get_world_size()), seconds, seconds)), torch.device("cpu")


class _Pageable(StagedWire):
    """The staged wire without a GPU: the same copies, in memory that is not pinned."""

    def _pinned(self, name: str, nbytes: int) -> Tensor:
        return self._buffers.take(name, nbytes, torch.device("cpu"))


def _staged_here(rank: int, limit: float = LIMIT) -> Made:
    host, cpu = _gloo(rank, limit)
    assert isinstance(host, GlooWire)
    return _Pageable(host), cpu


def _staged(rank: int, limit: float = LIMIT) -> Made:
    host, device = _gloo(rank, limit)[0], torch.device("cuda", 0)
    assert isinstance(host, GlooWire)
    return StagedWire(host), device


def _nccl(rank: int, limit: float = LIMIT) -> Made:
    alone = {"HOSTID": f"host{rank}", "P2P_DISABLE": "1", "SHM_DISABLE": "1", "IB_DISABLE": "1", "NET": "Socket"}
    alone |= {"SOCKET_IFNAME": "lo", "CUMEM_ENABLE": "0"}
    os.environ.update({f"NCCL_{name}": value for name, value in alone.items()})
    torch.cuda.set_device(0)
    control = _gloo(rank, limit)[0]
    assert isinstance(control, GlooWire)
    device = torch.device("cuda", 0)
    return NcclWire(control, dist.PrefixStore("rows", _store()), device), device


_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIRES = [
    pytest.param(_gloo, id="gloo"),
    pytest.param(_staged_here, id="staged, without a GPU"),
    pytest.param(_staged, id="staged", marks=_gpu),
    pytest.param(_nccl, id="nccl", marks=_gpu),
]
on_every_wire = pytest.mark.parametrize("make", WIRES)


def header(number: int, words: str = "") -> Header:
    return Header(Call("test", as_codec("raw"), words), number, dist.get_rank(), dist.get_world_size())


def row_of(sender: int, receiver: int, number: int, nbytes: int, device: torch.device) -> Tensor:
    """Bytes that no other row has."""
    seed = (sender * 16 + receiver) * 1000 + number
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)


def agree(wire: Wire, number: int, device: torch.device, words: str = "") -> None:
    nothing = [torch.empty(0, dtype=torch.uint8, device=device)] * wire.size
    wire.agree(header(number, words), lambda peer: None, nothing)


def others(wire: Wire) -> list[int]:
    return [(wire.rank + i) % wire.size for i in range(1, wire.size)]


def swap(wire: Wire, device: torch.device, sizes: Callable[[int, int], int], number: int, stage: int = 0) -> None:
    """Exchange a row with every peer, and check every byte of those that come."""
    rows = [torch.zeros(sizes(p, wire.rank) if p != wire.rank else 0, dtype=torch.uint8).to(device) for p in _all(wire)]
    arrivals = wire.expect(rows, stage)
    sent = [row_of(wire.rank, peer, number, sizes(wire.rank, peer), device) for peer in others(wire)]
    for peer, row in zip(others(wire), sent, strict=True):
        wire.send(row, [peer], stage)
    assert sorted(arrivals()) == sorted(others(wire))
    for peer in others(wire):
        assert torch.equal(rows[peer], row_of(peer, wire.rank, number, sizes(peer, wire.rank), device)), (peer, number)
    wire.flush()


def _all(wire: Wire) -> range:
    return range(wire.size)


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(rank: int, make: Any) -> None:
    wire, device = make(rank)
    assert (wire.rank, wire.size) == (rank, 3)
    assert wire.turns > 0 < wire.chunks
    number = 0
    for nbytes in (1, 16, SHORT - 1, SHORT, SHORT + 1, EAGER, EAGER + 1, 1 << 20):
        number += 1
        agree(wire, number, device)
        assert wire.agreed
        swap(wire, device, lambda a, b, n=nbytes: n, number)  # type: ignore[misc]
    for sizes in (lambda a, b: 1000 * a + b, lambda a, b: 40_000 * ((a + b) % 2), lambda a, b: 0):  # some of no bytes
        number += 1
        agree(wire, number, device)
        swap(wire, device, sizes, number)
    for again in range(50):  # reuse: the wire of one collective serves the next
        number += 1
        agree(wire, number, device)
        swap(wire, device, lambda a, b, n=again: 3000 + n, number)  # type: ignore[misc]
    wire.trim()
    wire.retire()


@on_every_wire
def test_rows_of_any_size_arrive_whole_at_whom_they_were_sent_to_and_the_wire_serves_again(make: Any) -> None:
    ranks.run(3, _rows, make, timeout=90)


def _in_order(rank: int, make: Any) -> None:
    wire, device = make(rank)
    agree(wire, 1, device)
    count, nbytes = 12, 20_000
    inbox = torch.zeros(2, count, wire.size, nbytes, dtype=torch.uint8).to(device)
    memory = torch.zeros(wire.turns, nbytes, dtype=torch.uint8).to(device)
    turn = 0
    pending = []
    for i in range(count):  # two stages at once, each in its own order; memory is used again after `turns` rows
        for stage in range(2):
            rows = [row[:0] if peer == rank else row for peer, row in enumerate(inbox[stage, i])]
            pending.append(wire.expect(rows, stage))
        for stage in range(2):
            for peer in others(wire):
                turn += 1
                memory[turn % wire.turns] = row_of(rank, peer, 2 * i + stage, nbytes, device)
                wire.send(memory[turn % wire.turns], [peer], stage)
        if i:
            for arrivals in pending[2 * i - 2 : 2 * i]:
                list(arrivals())
    for arrivals in pending[-2:]:
        list(arrivals())
    wire.flush()
    for i in range(count):
        for stage in range(2):
            for peer in others(wire):
                assert torch.equal(inbox[stage, i, peer], row_of(peer, rank, 2 * i + stage, nbytes, device))


@pytest.mark.parametrize("make", WIRES[:3])  # over NCCL one chunk is under way at a time (`chunks` is 1)
def test_rows_of_a_stage_arrive_in_order_though_their_memory_is_used_again(make: Any) -> None:
    ranks.run(3, _in_order, make, timeout=90)


def _along(rank: int, make: Any) -> None:
    wire, device = make(rank)
    called: list[int] = []
    for number, nbytes in enumerate((1, 5000, 100_000, EAGER), 1):
        size = min(nbytes, wire.eager)
        rows = [torch.zeros(size, dtype=torch.uint8).to(device) for _ in _all(wire)]
        mine = {peer: row_of(rank, peer, number, size, device) for peer in others(wire)}
        called.clear()
        wire.agree(
            header(number), lambda peer, m=mine: m[peer] if len(m[peer]) else None, rows, lambda: called.append(1)
        )  # type: ignore[misc]
        assert called == [1]
        for peer in others(wire):
            assert torch.equal(rows[peer], row_of(peer, rank, number, size, device))
        wire.flush()


@on_every_wire
def test_a_small_row_travels_with_the_header(make: Any) -> None:
    ranks.run(2, _along, make, timeout=60)


def _early_and_late(rank: int, make: Any) -> None:
    wire, device = make(rank)
    for number in range(1, 5):
        if number % 3 == rank:
            time.sleep(0.5)
        agree(wire, number, device)
        if (number + 1) % 3 == rank:
            time.sleep(0.5)
        swap(wire, device, lambda a, b: 100_000, number)


@on_every_wire
def test_peers_may_be_early_or_late(make: Any) -> None:
    ranks.run(3, _early_and_late, make, timeout=60)


# -- agreement --------------------------------------------------------------------------------------------------------


def _disagree(rank: int, make: Any) -> str:
    wire, device = make(rank)
    agree(wire, 1, device, "alike")
    with pytest.raises(MismatchError) as caught:
        agree(wire, 2, device, "other" if rank == 1 else "same")
    assert not wire.agreed
    agree(wire, 3, device, "alike again")
    swap(wire, device, lambda a, b: 30_000, 3)
    return str(caught.value)


@on_every_wire
def test_ranks_that_disagree_read_the_same_and_the_wire_stays_open(make: Any) -> None:
    first, *rest = ranks.run(3, _disagree, make, timeout=60)
    assert rest == [first] * 2
    assert "rank 1 called" in first


# -- failures ---------------------------------------------------------------------------------------------------------


def _waits(wire: Wire, device: torch.device, what: str) -> Callable[[], object]:
    if what == "header":
        return lambda: agree(wire, 2, device)
    rows = [torch.zeros(50_000 if peer == 0 else 0, dtype=torch.uint8).to(device) for peer in _all(wire)]
    return lambda: list(wire.expect(rows)())  # a break that is known already may be told at once


def _close(rank: int, make: Any, what: str) -> Any:
    wire, device = make(rank)
    agree(wire, 1, device)
    if rank == 0:
        time.sleep(0.3)
        wire.close(b"the reason")
        return None
    found = faults.blamed(_waits(wire, device, what))
    return found, wire.last_words(0)


@pytest.mark.parametrize("what", ["header", "row"])
@pytest.mark.parametrize("make", WIRES[:3])  # what NCCL waits for ends with its own watchdog
def test_closing_ends_the_waits_of_all_peers_and_tells_them_why(make: Any, what: str) -> None:
    for (peer, kind, seconds), words in ranks.run(3, _close, make, what, timeout=60)[1:]:
        assert (peer, kind, words) == (0, "gone", b"the reason")
        assert seconds < within(SOON)


def _die(rank: int, make: Any, what: str) -> Any:
    wire, device = make(rank)
    agree(wire, 1, device)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return faults.blamed(_waits(wire, device, what))


@pytest.mark.parametrize("what", ["header", "row"])
@pytest.mark.parametrize("make", WIRES[:3])
def test_a_rank_that_dies_is_named_soon(make: Any, what: str) -> None:
    for outcome in ranks.outcomes_of(3, _die, make, what, timeout=60)[1:]:
        assert outcome.error is None, outcome.trace
        peer, kind, seconds = outcome.value
        assert (peer, kind) == (0, "gone")
        assert seconds < within(SOON)


def _silent(rank: int, make: Any, what: str) -> Any:
    wire, device = make(rank, 2.0)
    agree(wire, 1, device)
    if rank == 0:
        time.sleep(6.0)
        return None
    return faults.blamed(_waits(wire, device, what))


@pytest.mark.parametrize("what", ["header", "row"])
@pytest.mark.parametrize("make", WIRES[:3])
def test_a_rank_that_says_nothing_is_late_when_the_time_is_over(make: Any, what: str) -> None:
    kinds = []
    for peer, kind, seconds in ranks.run(3, _silent, make, what, timeout=60)[1:]:
        assert 1.5 < seconds < within(2.0 + SOON)
        kinds.append((peer, kind))
    # When one's time is over gloo breaks all its connections: the other may see that first.
    assert (0, "late") in kinds
