"""A piece of a tensor on its way through a reduction, and the strips that it is made of.

A `Strip` is a run of elements in one codec: a part for each rank, the part's owner, and the place for each part's sum.
A piece carries one or several strips: one message takes all of its rows to a peer. `Parts` brings them to their owners.
`Piece` brings the sums back, too: it goes through `expect`, `send_parts`, `add_up` and `collect`, in this order. The
pieces of a tensor take turns (`two_stage.reduce`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.distributed.protocols.encoder import Coder
from narrowcast.distributed.protocols.exchange import Exchange


class Strip:
    """Elements that are reduced in one codec: `parts[rank]` is that rank's own, and `results[rank]` takes its sum."""

    def __init__(self, coder: Coder, parts: Sequence[Tensor], results: Sequence[Tensor] | None = None, key: int = 0):
        self.coder = coder
        self.parts = parts
        self.results = parts if results is None else results
        self.key = key
        """Tells strips apart where rounding is stochastic."""
        self.sizes = [coder.codec.row_bytes(len(part)) for part in parts]

    def encode(self, rank: int, peer: int, out: Tensor) -> None:
        """Encode the part of `peer`, as `rank`, into the bytes `out`."""
        self.coder.encode(self.parts[peer][None], out, rank, peer, self.key)

    def sent(self) -> None:
        """Every part has been encoded; the bytes are still where they were."""

    def add_up(self, inbox: Tensor, rank: int, divisor: int, out: Tensor) -> None:
        """Add up the rows of the part that `rank` owns into `out`, encoded, and its own result."""
        self.coder.sum_encode(inbox, self.parts[rank], rank, divisor, out, rank, len(self.parts), self.key)
        self.decode(rank, out)

    def add(self, inbox: Tensor, rank: int, divisor: int) -> None:
        """Add up the rows of the part that `rank` owns into its result, which is not quantized."""
        self.coder.sum(inbox, self.parts[rank], rank, divisor, self.results[rank])

    def decode(self, peer: int, data: Tensor) -> None:
        """Take the encoded sum of the part that `peer` owns."""
        self.coder.decode(data, self.results[peer][None])


class Parts:
    """Strips whose parts go to their owners: one message takes all rows to a peer. `index` is the piece's number."""

    def __init__(self, exchange: Exchange, strips: Sequence[Strip], index: int) -> None:
        self.exchange = exchange
        self.strips = strips
        self.rank = exchange.rank
        self.sizes = [sum(strip.sizes[peer] for strip in strips) for peer in range(exchange.size)]
        self.slot = index % exchange.wire.pieces
        shape = exchange.size, self.sizes[self.rank]
        self.inbox = exchange.coder.take(f"inbox {self.slot}", shape[0] * shape[1]).view(shape)

    def coming(self) -> list[Tensor]:
        """Where the rows of the others go."""
        return [row[:0] if peer == self.rank else row for peer, row in enumerate(self.inbox)]

    def encode(self, peer: int) -> Tensor:
        """The row for a peer."""
        out = self.exchange.next_row(self.sizes[peer])
        for strip, row in zip(self.strips, self.rows(out, peer), strict=True):
            strip.encode(self.rank, peer, row)
        return out

    def send_parts(self) -> None:
        """Each part to its owner."""
        for peer in self.exchange.targets:
            self.exchange.send(self.encode(peer), peer)
        self.sent()

    def sent(self) -> None:
        """Every row has been encoded; the bytes are still where they were."""
        for strip in self.strips:
            strip.sent()

    def rows(self, data: Tensor, peer: int) -> Sequence[Tensor]:
        """What the strips have of the parts of `peer`: `data` is a row, or some [count, bytes]."""
        return torch.split(data, [strip.sizes[peer] for strip in self.strips], -1)


class Piece(Parts):
    """What travels in one message to each peer, twice: parts to their owners, then sums to everyone."""

    def __init__(self, exchange: Exchange, strips: Sequence[Strip], index: int, eager: bool = True) -> None:
        super().__init__(exchange, strips, index)
        # Small enough to go with the header.
        self.along = eager and index == 0 and max(self.sizes) <= exchange.wire.eager
        self.results = exchange.coder.take(f"results {self.slot}", sum(self.sizes)).split(self.sizes)
        self._first: Tensor | None = None

    def open(self) -> None:
        """Agree with all ranks, and send the parts with the header where they are small enough."""
        if self.along:
            self.exchange.agree(lambda peer: self.encode(peer) if self.sizes[peer] else None, list(self.inbox))
        else:
            self.exchange.agree(meanwhile=self._encode_first)

    def expect(self) -> None:
        """Say where the rows of this piece go, in time for peers that are early."""
        coming = [self.inbox[0, :0]] * self.exchange.size if self.along else self.coming()
        self._parts_arrive = self.exchange.wire.expect(coming, 0)
        self._results_arrive = self.exchange.wire.expect(self.results, 1)

    def send_parts(self) -> None:
        if self.along:
            self.sent()
        else:
            super().send_parts()

    def add_up(self, divisor: int) -> None:
        """Add up the rows of this rank's own part, and send the sum to all."""
        for _ in self._parts_arrive():
            pass
        mine = self.results[self.rank]
        received, sums = self.rows(self.inbox, self.rank), self.rows(mine, self.rank)
        for strip, rows, out in zip(self.strips, received, sums, strict=True):
            if len(out):
                strip.add_up(rows, self.rank, divisor, out)
        self.exchange.send_to_all(mine, stage=1)

    def collect(self) -> None:
        """Decode the sums of the others."""
        for peer in self._results_arrive():
            for strip, row in zip(self.strips, self.rows(self.results[peer], peer), strict=True):
                strip.decode(peer, row)

    def encode(self, peer: int) -> Tensor:
        row, self._first = self._first, None  # made while ranks agreed
        return super().encode(peer) if row is None else row

    def _encode_first(self) -> None:
        self._first = super().encode(self.exchange.targets[0])
