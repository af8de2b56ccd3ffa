"""Rows between ranks, once: the agreement first, small rows along with it, larger ones after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from narrowcast.distributed.protocols.encoder import Coder
from narrowcast.distributed.transport import agreement
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.wire import Wire


class Exchange:
    """One collective's use of the wire."""

    def __init__(self, wire: Wire, number: int, call: Call, coder: Coder) -> None:
        self.wire = wire
        self.coder = coder
        self.rank = wire.rank
        self.size = wire.size
        self.targets = [(wire.rank + i) % wire.size for i in range(1, wire.size)]
        self._header = agreement.as_tensor(call.header(number, wire.size))
        self._turn = 0
        self._nothing = torch.empty(0, dtype=torch.uint8, device=coder.device)

    def open(
        self,
        outgoing: Callable[[int], Tensor],
        sizes: Sequence[int],
        incoming: Sequence[Tensor],
        arrived: Callable[[int], None] = lambda peer: None,
    ) -> None:
        """Agree with all ranks, and exchange a row with each.

        `outgoing(peer)` makes the `sizes[peer]` bytes for a peer, which must stay as they are while `wire.turns` others
        are made. `incoming[peer]` is filled with that peer's row, then `arrived(peer)` is called: never before all
        ranks agree. It is called for this rank, too.
        """
        small = self.wire.eager

        def send_large() -> None:
            for peer in self.targets:
                if sizes[peer] > small:
                    self.send(outgoing(peer), peer)

        self._swap(lambda peer: outgoing(peer) if 0 < sizes[peer] <= small else None, send_large, incoming, arrived)

    def open_to_all(
        self, row: Tensor, incoming: Sequence[Tensor], arrived: Callable[[int], None] = lambda peer: None
    ) -> None:
        """`open`, where every peer gets the same row."""
        small = len(row) <= self.wire.eager
        along, after = (row, row[:0]) if small else (row[:0], row)
        self._swap(lambda peer: along if len(along) else None, lambda: self.send_to_all(after), incoming, arrived)

    def _swap(
        self,
        along: Callable[[int], Tensor | None],
        send_large: Callable[[], None],
        incoming: Sequence[Tensor],
        arrived: Callable[[int], None],
    ) -> None:
        """Agree, with small rows along, then send large ones, and take those of the others as they come."""
        self.agree(along, incoming)
        arrivals = self.wire.expect([row[:0] if len(row) <= self.wire.eager else row for row in incoming])
        send_large()
        arrived(self.rank)
        for peer in arrivals():
            arrived(peer)

    def agree(
        self,
        eager: Callable[[int], Tensor | None] = lambda peer: None,
        incoming: Sequence[Tensor] | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Agree with all ranks; `eager` rows ride along, into those of `incoming` that are small enough."""

        def along(peer: int) -> Tensor | None:
            row = eager(peer)
            self._count(0 if row is None else len(row))
            return row

        self._count(self._header.numel() * (self.size - 1))
        self.wire.agree(self._header, along, incoming or [self._nothing] * self.size, meanwhile)

    def send(self, row: Tensor, peer: int, stage: int = 0) -> None:
        self._count(len(row))
        self.wire.send(row, [peer], stage)

    def send_to_all(self, row: Tensor, stage: int = 0, skip: int = -1) -> None:
        """Send one row to all others (but `skip`)."""
        peers = [peer for peer in self.targets if peer != skip]
        self._count(len(row) * len(peers))
        self.wire.send(row, peers, stage)

    def reserve(self, nbytes: int) -> None:
        """Take memory for the rows that are to be sent, of up to so many bytes each. Once in a collective."""
        self._rows = self.coder.take("outbox", self.wire.turns * nbytes).view(self.wire.turns, nbytes)

    def next_row(self, nbytes: int) -> Tensor:
        """Memory for a row that is to be sent: another one each time, until it surely is."""
        self._turn += 1
        return self._rows[self._turn % self.wire.turns, :nbytes]

    def share(self, rows: Sequence[Tensor], skip: int = -1) -> None:
        """Send this rank's row of `rows` to all others (but `skip`), and fill the other rows with theirs."""
        arrivals = self.wire.expect([row[:0] for row in rows] if self.rank == skip else rows)
        self.send_to_all(rows[self.rank], skip=skip)
        for _ in arrivals():
            pass

    def _count(self, nbytes: int) -> None:
        self.coder.meter.sent_bytes += nbytes
