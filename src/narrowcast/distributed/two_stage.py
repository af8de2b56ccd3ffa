"""The two-stage reduction.

1. The tensor is split into one part per rank, its owner. Each rank encodes each part for its owner; its own stays
   exact.
2. Every owner gets the rows of its part, sums them in rank order in fp32, divides for an average, and encodes the
   sum: one fused pass.
3. The encoded sums go to all ranks. The owner too decodes its own bytes, so every rank ends with the same bits.

Each element is quantized twice whatever the number of ranks, and each rank sends 2(N-1)/N of the encoded tensor.
`reduce_scatter` ends with the sum, which is not quantized again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.exchange import Exchange

UNIT = 128
"""Parts start at multiples of so many elements: whole blocks of the usual codecs, and aligned rows."""

ROW = 768 * 1024
"""A piece is as large as makes its rows take about so many bytes. Smaller ones overlap better on a slow link, larger
ones cost fewer thread switches on a fast one (bench/wire.py). It decides who owns an element, and so the last bits
of a sum: it must not depend on anything that may differ between two runs."""


def split(numel: int, ranks: int) -> list[int]:
    """How many elements each rank owns: about the same, the last ones fewer or none."""
    each = -(-numel // (ranks * UNIT)) * UNIT
    return [max(0, min(each, numel - rank * each)) for rank in range(ranks)]


def cut(numel: int, ranks: int, codec: Codec, eager: int) -> list[int]:
    """How many elements the pieces have in which a tensor is reduced.

    The first one of a large tensor is small enough to go with the header, and keeps the link busy while ranks agree.
    """
    part = split(numel, ranks)[0]
    row_bytes = codec.row_bytes(part)
    if row_bytes <= ROW or not eager:
        return [numel]
    unit = UNIT * ranks
    first = part * (eager - 256) // row_bytes // UNIT * unit  # less a little, for the padding of rows
    each = -(-(numel - first) // (-(-row_bytes // ROW) * unit)) * unit
    return [first, *(min(each, numel - start) for start in range(first, numel, each))]


def all_reduce(exchange: Exchange, flat: Tensor, divisor: int) -> None:
    """Sum `flat` [numel] over all ranks, in place.

    A large tensor goes in pieces: while one is added up, the next is on the wire, and the sums of the last one follow.
    """
    sizes = cut(len(flat), exchange.size, exchange.coder.codec, exchange.wire.eager)
    pieces = [Piece(exchange, piece, index) for index, piece in enumerate(flat.split(sizes))]
    exchange.reserve(max(max(piece.sizes) for piece in pieces))
    pieces[0].open()
    for piece in pieces[:2]:
        piece.expect()
    for i, piece in enumerate(pieces):
        piece.send_parts()
        if i >= 1:
            pieces[i - 1].add_up(divisor)
        if i >= 2:
            pieces[i - 2].collect()
        if i + 2 < len(pieces):
            pieces[i + 2].expect()
    pieces[-1].add_up(divisor)
    for piece in pieces[-2:]:
        piece.collect()
    exchange.wire.flush()


class Piece:
    """A piece of a tensor on its way through an all_reduce."""

    def __init__(self, exchange: Exchange, flat: Tensor, index: int) -> None:
        self.exchange = exchange
        self.coder = coder = exchange.coder
        self.index = index
        self.rank = exchange.rank
        self.parts = flat.split(split(len(flat), exchange.size))
        self.sizes = [coder.codec.row_bytes(len(part)) for part in self.parts]
        self.along = index == 0 and max(self.sizes) <= exchange.wire.eager  # small enough to go with the header
        slot = index % exchange.wire.pieces
        shape = exchange.size, self.sizes[self.rank]
        self.inbox = coder.take(f"inbox {slot}", math.prod(shape)).view(shape)
        self.results = coder.take(f"results {slot}", sum(self.sizes)).split(self.sizes)
        self._first: Tensor | None = None

    def open(self) -> None:
        """Agree with all ranks, and send the parts with the header where they are small enough."""
        if self.along:
            self.exchange.agree(lambda peer: self._encode(peer) if self.sizes[peer] else None, list(self.inbox))
        else:
            self.exchange.agree(meanwhile=self._encode_first)

    def expect(self) -> None:
        """Say where the rows of this piece go, in time for peers that are early."""
        nothing = self.inbox[0, :0]
        coming = [nothing if self.along or peer == self.rank else row for peer, row in enumerate(self.inbox)]
        self._parts_arrive = self.exchange.wire.expect(coming, 0)
        self._results_arrive = self.exchange.wire.expect(self.results, 1)

    def send_parts(self) -> None:
        """Each part to its owner."""
        if not self.along:
            for peer in self.exchange.targets:
                row, self._first = self._first, None
                self.exchange.send(self._encode(peer) if row is None else row, peer, 0)

    def add_up(self, divisor: int) -> None:
        """Add up the rows of this rank's own part, and send the sum to all."""
        for _ in self._parts_arrive():
            pass
        mine, part = self.results[self.rank], self.parts[self.rank]
        self.coder.sum_encode(self.inbox, part, self.rank, divisor, mine, self.rank, self.exchange.size, self.index)
        for peer in self.exchange.targets:
            self.exchange.send(mine, peer, 1)
        self.coder.decode(mine, part[None])

    def collect(self) -> None:
        """Decode the sums of the others."""
        for peer in self._results_arrive():
            self.coder.decode(self.results[peer], self.parts[peer][None])

    def _encode_first(self) -> None:
        self._first = self._encode(self.exchange.targets[0])

    def _encode(self, peer: int) -> Tensor:
        out = self.exchange.next_row(self.sizes[peer])
        return self.coder.encode(self.parts[peer][None], out, self.rank, peer, self.index)


def reduce_scatter(exchange: Exchange, parts: Sequence[Tensor], output: Tensor, divisor: int) -> None:
    """Sum part `rank` of every rank's `parts` (flat, one per rank) into `output` (flat)."""
    coder, size, rank = exchange.coder, exchange.size, exchange.rank
    sizes = [coder.codec.row_bytes(len(part)) for part in parts]
    inbox = coder.take("inbox", size * sizes[rank]).view(size, sizes[rank])
    exchange.reserve(max(sizes))

    def outgoing(peer: int) -> Tensor:
        return coder.encode(parts[peer][None], exchange.next_row(sizes[peer]), rank, peer)

    exchange.open(outgoing, sizes, [row if peer != rank else row[:0] for peer, row in enumerate(inbox)])
    coder.sum(inbox, parts[rank], rank, divisor, output)
