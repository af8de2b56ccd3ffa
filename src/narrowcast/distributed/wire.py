"""Bytes between ranks: a private gloo copy of a process group.

A `Wire` belongs to one lane and is used by one thread at a time. It does three things:

- `agree`: a header to and from every peer, all at once, and the verdict on them. A row of up to `EAGER` bytes rides
  along with it, so that a small tensor needs one trip where a large one needs two. Receives have room for both; gloo
  lets a message be shorter than its receive, and aborts the process on one that is longer, which is why sizes are
  agreed on first.
- `rounds`: a row to and from every peer, one peer at a time: in round i a rank sends to rank+i and receives from
  rank-i, so every link carries one stream each way. bench/wire.py holds this against gloo's own all_to_all, where all
  streams collide at the receivers. What comes next is encoded while a round is on the wire, and what came is decoded
  while the next one is.
- `close`: breaks the connections, so that every peer that waits for this rank learns of a failure at once.

Every wait is bounded by the group's timeout. What goes wrong is a `WireError` that names the peer.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed import agreement

EAGER = 32 * 1024
"""Rows of up to so many bytes travel with the header (bench/wire.py, table of small tensors)."""

_HEADERS, _ROWS, _NEVER_SENT = 0, 1, 2


class WireError(Exception):
    """A message did not go through. Never leaves this package: the lane says what it means for the collective."""

    def __init__(self, peer: int, reason: str, late: bool) -> None:
        super().__init__(reason)
        self.peer = peer
        self.late = late


class Wire(Protocol):
    """A connection of every rank of a group with every other."""

    rank: int
    size: int
    turns: int
    """How many outgoing rows must be kept apart."""
    eager: int
    """Rows of up to so many bytes travel with the header."""

    def agree(
        self, header: Tensor, eager: Callable[[int], Tensor | None], meanwhile: Callable[[], None]
    ) -> Sequence[Tensor]:
        """Compare headers with every rank, and raise `MismatchError` where they do not fit together.

        `eager(peer)` is the row that rides along to that peer, or None; `meanwhile` is called while headers are on
        their way. Returns, by rank, the room in which a row may have come along.
        """

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], incoming: Sequence[Tensor], arrived: Callable[[int], None]
    ) -> None:
        """Exchange rows with every peer; rows of no bytes are not sent.

        `outgoing(peer, turn)` is called once per peer; what it returned for a turn may be overwritten `turns` later.
        `incoming[peer]` is where that peer's row goes, and `arrived(peer)` is called once it is there. `arrived` is
        called for this rank itself too, while the first round is on the wire.
        """

    def close(self) -> None:
        """Break every connection, so that peers which wait for this rank learn of it."""

    def leak(self) -> None:
        """Make sure that nothing is ever closed: in a forked child, the threads that would do it do not exist."""


class HostWire:
    """A wire for rows in host memory."""

    turns = 2  # one row on the wire, one being encoded
    eager = EAGER

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self.rank = rank
        self.size = size = len(ranks)
        self.timeout = timeout
        self._ranks = ranks
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._width = agreement.header_bytes(len(ranks)) + EAGER
        self._slots = torch.empty(2, size, self._width, dtype=torch.uint8)

    def agree(
        self, header: Tensor, eager: Callable[[int], Tensor | None], meanwhile: Callable[[], None]
    ) -> Sequence[Tensor]:
        length = header.numel()
        outgoing, incoming = self._slots
        outgoing[:, :length] = header
        receives = [self._receive(incoming[peer], peer, _HEADERS) for peer in self._others(-1)]
        sends = []
        for peer in self._others(1):
            row = eager(peer)
            total = length
            if row is not None:
                total += row.numel()
                outgoing[peer, length:total] = row
            sends.append(self._send(outgoing[peer, :total], peer, _HEADERS))
        meanwhile()
        for work in (*receives, *sends):
            work.wait()
        incoming[self.rank, :length] = header
        agreement.check([bytes(slot[:length].numpy()) for slot in incoming], self._ranks)
        return [slot[length:] for slot in incoming]

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], incoming: Sequence[Tensor], arrived: Callable[[int], None]
    ) -> None:
        receives = {
            peer: self._receive(incoming[peer], peer, _ROWS) for peer in self._others(-1) if len(incoming[peer])
        }
        came = self.rank
        row = outgoing((self.rank + 1) % self.size, 0) if self.size > 1 else None
        for i in range(1, self.size):
            to, source = (self.rank + i) % self.size, (self.rank - i) % self.size
            send = self._send(row, to, _ROWS) if row is not None and len(row) else None
            row = outgoing((to + 1) % self.size, i) if i + 1 < self.size else None
            arrived(came)
            if source in receives:
                receives[source].wait()
            if send is not None:
                send.wait()
            came = source
        arrived(came)

    def close(self) -> None:
        # A wait that runs into its time limit is how gloo lets go of all of a context's connections.
        if self.size > 1:
            probe = self._receive(torch.empty(1, dtype=torch.uint8), (self.rank + 1) % self.size, _NEVER_SENT)
            with contextlib.suppress(WireError):
                probe.wait(timedelta(milliseconds=1))

    def leak(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _others(self, direction: int) -> list[int]:
        return [(self.rank + direction * i) % self.size for i in range(1, self.size)]

    def _send(self, row: Tensor, peer: int, tag: int) -> _Pending:
        return _Pending(lambda: self._group.send([row], peer, tag), peer, self.timeout)

    def _receive(self, row: Tensor, peer: int, tag: int) -> _Pending:
        return _Pending(lambda: self._group.recv([row], peer, tag), peer, self.timeout)


class _Pending:
    """A message on its way."""

    def __init__(self, start: Callable[[], dist.Work], peer: int, timeout: timedelta) -> None:
        self.peer = peer
        self.timeout = timeout
        try:
            self._work = start()
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self, timeout: timedelta | None = None) -> None:
        try:
            self._work.wait(timeout or self.timeout)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> WireError:
        reason = str(error).split("] ", 1)[-1].split("\n")[0]
        return WireError(self.peer, reason, late="Timed out" in reason)
