"""The wire alone: connections that break where gloo tells nobody, and peers that leave when they are done."""

from __future__ import annotations

import contextlib
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
from torch.distributed import distributed_c10d as c10d

from narrowcast import codec as as_codec
from narrowcast.distributed.transport.agreement import Call, Header
from narrowcast.distributed.transport.gloo import _HEADERS, GlooWire
from narrowcast.distributed.transport.gloo_connections import Gloo
from narrowcast.distributed.transport.gloo_messages import GRACE_SECONDS, RARE_GLANCE_SECONDS

pytestmark = pytest.mark.timeout(60)

SOON = 2.0
assert RARE_GLANCE_SECONDS + GRACE_SECONDS < SOON

ROW = torch.ones(1000, dtype=torch.uint8)
NONE = ROW[:0]


def _wire(rank: int) -> GlooWire:
    limit = timedelta(seconds=20)
    store = dist.PrefixStore("wire", c10d._get_default_store())
    return GlooWire(Gloo(store, rank, range(dist.get_world_size()), limit, limit))


def _write_to_the_dead(rank: int, what: str) -> Any:
    wire = _wire(rank)
    header = Header(Call("test", as_codec("raw"), ""), 1, rank, 2)
    wire._headers = wire._expect_headers()
    wire.expect([torch.empty_like(ROW) for _ in range(2)])
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:  # has sent its header, and waits for that of the other, and for a row
        wire._send(header.data, 0, _HEADERS).wait()
        dist.barrier()
        time.sleep(60)
    dist.barrier()
    with contextlib.ExitStack() as held:
        held.enter_context(faults.gloo_held())
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(0.2)
        # Now a write fails before gloo's thread, which goes on then, can notice that the peer is gone.
        if what == "header":
            wire.agree(header, lambda peer: None, [NONE] * 2, meanwhile=held.close)
        else:
            wire.send(ROW, [1])
    return faults.blamed(wire.flush)


@pytest.mark.parametrize("what", ["header", "row"])
def test_a_short_message_to_a_rank_that_is_gone_unnoticed_raises_soon(what: str) -> None:
    outcome = ranks.outcomes_of(2, _write_to_the_dead, what, timeout=15)[0]
    assert outcome.error is None, outcome.trace
    peer, kind, seconds = outcome.value
    assert (peer, kind) == (1, "gone")
    assert seconds < within(SOON)


def _leave_early(rank: int) -> int:
    """Rank 1 has its row and leaves, while that of rank 2, which asks for it late, is on its way before it."""
    wire = _wire(rank)
    if rank == 0:
        wire.send(ROW, [2])
        wire.send(ROW, [1])
        wire.flush()
        return 0
    if rank == 2:
        time.sleep(RARE_GLANCE_SECONDS + GRACE_SECONDS + 1)
    rows = [torch.zeros_like(ROW) if peer == 0 else NONE for peer in range(3)]
    list(wire.expect(rows)())
    if rank == 1:
        wire.close()
    return int(rows[0].sum())


def test_a_peer_that_is_done_may_leave_while_others_are_not() -> None:
    assert ranks.run(3, _leave_early, timeout=20) == [0, 1000, 1000]
