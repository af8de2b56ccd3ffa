"""Rows between ranks, once: the agreement first, small rows along with it, larger ones in rounds after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from narrowcast.distributed import agreement
from narrowcast.distributed.agreement import Call
from narrowcast.distributed.coder import Coder
from narrowcast.distributed.wire import Wire


class Exchange:
    """One collective's use of the wire."""

    def __init__(self, wire: Wire, number: int, call: Call, coder: Coder) -> None:
        self.wire = wire
        self.coder = coder
        self.rank = wire.rank
        self.size = wire.size
        self._header = agreement.as_tensor(call.header(number, wire.size))
        self._nothing = torch.empty(0, dtype=torch.uint8, device=coder.device)

    def open(
        self,
        outgoing: Callable[[int, int], Tensor],
        sizes: Sequence[int],
        incoming: Sequence[Tensor],
        arrived: Callable[[int], None] = lambda peer: None,
        shared: Sequence[Tensor] = (),
    ) -> None:
        """Agree with all ranks, and exchange a row with each.

        `outgoing(peer, turn)` makes the `sizes[peer]` bytes for a peer, in memory that is its own for `wire.turns`
        turns. `incoming[peer]` is filled with that peer's row, then `arrived(peer)` is called: never before all ranks
        agree. `shared` are the rows of a `share` that follows: saying so now saves a trip.
        """
        small = self.wire.eager
        first: list[Tensor] = []

        def along(peer: int) -> Tensor | None:
            return outgoing(peer, 0) if 0 < sizes[peer] <= small else None

        def meanwhile() -> None:
            peer = (self.rank + 1) % self.size
            if sizes[peer] > small:
                first.append(outgoing(peer, 0))

        def rest(peer: int, turn: int) -> Tensor:
            if sizes[peer] <= small:
                return self._nothing
            return first.pop() if turn == 0 else outgoing(peer, turn)

        self.wire.agree(self._header, along, incoming, meanwhile)
        self.wire.expect([row[:0] if len(row) <= small else row for row in incoming])
        if shared:
            self.wire.expect(shared)
        self._count(self._header.numel() * (self.size - 1) + sum(sizes) - sizes[self.rank])
        self.wire.rounds(rest, arrived)

    def share(self, rows: Sequence[Tensor], arrived: Callable[[int], None], skip: int = -1) -> None:
        """Send this rank's row of `rows` to all others (but `skip`); the other rows are filled with theirs."""
        mine = rows[self.rank]
        self._count(mine.numel() * (self.size - 1 - (0 <= skip != self.rank)))
        at_once = max(len(row) for row in rows) <= self.wire.eager
        self.wire.rounds(lambda peer, turn: self._nothing if peer == skip else mine, arrived, at_once)

    def _count(self, nbytes: int) -> None:
        self.coder.meter.sent_bytes += nbytes
