"""Purposes of a group share its connections: their calls stay apart, and a failure of one leaves the others in step."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from patience import within
from torch.distributed import distributed_c10d as c10d

from narrowcast import codec as as_codec
from narrowcast import distributed as ncd
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.protocols import two_stage
from narrowcast.distributed.transport import agreement
from narrowcast.distributed.transport.agreement import Call, Header
from narrowcast.distributed.transport.gloo import _HEADERS, GlooWire, tags_of_messages, tags_of_purpose
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.errors import CollectiveError

pytestmark = pytest.mark.timeout(60)

PURPOSES = ["collectives", "gradients", "parameters", "mesh", "other"]
CPU = torch.device("cpu")


def _group(purpose: str) -> Group:
    return group_for(c10d._get_default_group(), CPU, purpose)


def _sum(purpose: str, x: torch.Tensor, codec: str = "raw") -> torch.Tensor:
    call = Call("sum", as_codec(codec), f"numel={x.numel()}")
    Collective(_group(purpose), call, lambda collective: two_stage.all_reduce(collective, x, 1)).run()
    return x


def test_tags_of_purposes_are_apart_and_fit_gloo() -> None:
    firsts = [tags_of_purpose(purpose) for purpose in PURPOSES]
    assert len({first // 4 for first in firsts}) == len(PURPOSES)
    assert all(8 <= first < 2**31 - 4 for first in firsts)
    assert tags_of_messages((1 << 30) - 9) + 1 < 2**31


def _sockets() -> int:
    """Not all descriptors: the store is a file, which threads open for a moment."""
    dist.barrier()
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return found


def _side_by_side(rank: int) -> Any:
    world = dist.get_world_size()
    _sum("collectives", torch.ones(10))
    before = _sockets()
    found: dict[str, list[float]] = {}

    def calls(purpose: str, base: int) -> None:
        sizes = [3, 400_000, 50, 70_000] * 3
        found[purpose] = [float(_sum(purpose, torch.full((n,), float(base + i)))[-1]) for i, n in enumerate(sizes)]

    order = PURPOSES if rank % 2 else PURPOSES[::-1]  # ranks come to them in another order
    threads = [threading.Thread(target=calls, args=(purpose, 100 * len(purpose))) for purpose in order]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    right = {p: [float(world * (100 * len(p) + i)) for i in range(12)] for p in PURPOSES}
    return found == right, _sockets() - before


def test_purposes_in_any_order_and_at_once_neither_mix_nor_open_connections() -> None:
    assert ranks.run(4, _side_by_side, timeout=40) == [(True, 0)] * 4


def _header(number: int, rank: int) -> Header:
    return Header(Call("x", as_codec("raw"), ""), number, rank, 3)


@pytest.mark.parametrize(
    ("numbers", "behind"),
    [
        ((5, 5, 5), []),
        ((-5, 5, -5), []),
        ((-5, 6, -5), [0, 2]),
        ((-5, 6, 6), [0]),
        ((5, 6, -5), []),
        ((5, 6, 6), []),
        ((-6, -5, 7), [1]),
    ],
)
def test_who_repeats_a_call_that_others_have_done_with_is_overtaken(
    numbers: tuple[int, int, int], behind: list[int]
) -> None:
    table = torch.stack([_header(number, rank).data for rank, number in enumerate(numbers)]).numpy()
    assert agreement.overtaken(table) == behind
    assert agreement.fit(table) == (len(set(map(abs, numbers))) == 1)


def _fail_beside(rank: int) -> Any:
    """While an all_reduce is on its way, in which rank 0 has all headers and rank 1 not, another purpose fails."""
    assert float(_sum("collectives", torch.ones(10))[0]) == 3.0
    dist.barrier()
    if rank == 2:
        plain = GlooWire._send

        def late(self: GlooWire, row: torch.Tensor, peer: int, kind: int) -> Any:
            if kind == _HEADERS and peer == 1:
                GlooWire._send = plain  # type: ignore[method-assign]
                time.sleep(1.0)
            return plain(self, row, peer, kind)

        GlooWire._send = late  # type: ignore[method-assign]
    if rank == 0:
        threading.Timer(0.4, lambda: _group("other").refuse("something", RuntimeError("boom"))).start()
    first, seconds = faults.error_of(lambda: ncd.all_reduce(torch.ones(3_000_000), codec="raw"))
    later = [torch.full((1000,), float(rank + i)) for i in range(3)]
    for x in later:
        ncd.all_reduce(x, codec="raw")
    other = faults.error_of(lambda: _sum("other", torch.ones(5)))[0] if rank else None
    after = float(_sum("other", torch.ones(5))[0])
    return type(first), str(first), seconds, [float(x[0]) for x in later], str(other), after


def test_a_call_that_some_ranks_gave_up_with_another_is_given_up_by_all_and_the_next_ones_are_in_step() -> None:
    for rank, (kind, text, seconds, later, other, after) in enumerate(ranks.run(3, _fail_beside, timeout=40)):
        assert kind is CollectiveError
        assert "boom" in text
        assert "all_reduce (after something)" in text
        assert seconds < within(5.0)
        assert later == [3.0, 6.0, 9.0]
        assert rank == 0 or "boom" in other
        assert after == 3.0
