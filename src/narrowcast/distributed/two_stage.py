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
import time
from collections.abc import Sequence

from torch import Tensor

from narrowcast.distributed.exchange import Exchange

UNIT = 128
"""Parts start at multiples of so many elements: whole blocks of the usual codecs, and aligned rows."""

ROW, FAST_ROW = 512 * 1024, 4 << 20
"""A piece is as large as makes its rows take about so many bytes. Small ones overlap better, and each one costs a
thread switch or two, which a link of more than `FAST` bytes a second does not wait for (bench/wire.py)."""

FAST = 160_000_000


def split(numel: int, ranks: int) -> list[int]:
    """How many elements each rank owns: about the same, the last ones fewer or none."""
    each = -(-numel // (ranks * UNIT)) * UNIT
    return [max(0, min(each, numel - rank * each)) for rank in range(ranks)]


def all_reduce(exchange: Exchange, flat: Tensor, divisor: int) -> None:
    """Sum `flat` [numel] over all ranks, in place.

    A large tensor goes in pieces: while one is added up, the next is on the wire, and the sums of the last one follow.
    The first piece is small enough to go with the header, and keeps the link busy while ranks agree. How large the
    others are depends on how fast the wire was, in the eyes of the first rank: all must cut alike.
    """
    start, sent = time.perf_counter(), exchange.coder.meter.sent_bytes
    first = with_header(exchange, flat)
    pieces = [Piece(exchange, flat[:first], 0)]
    speeds = pieces[0].open()
    if first < len(flat):
        rest = cut(exchange, flat[first:], speeds[0])
        pieces += [Piece(exchange, piece, index) for index, piece in enumerate(rest, 1)]
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
    if len(pieces) > 1:
        exchange.wire.speed = int((exchange.coder.meter.sent_bytes - sent) / (time.perf_counter() - start))


def with_header(exchange: Exchange, flat: Tensor) -> int:
    """How many elements go first: all of a small tensor, and of a large one as many as go with the header."""
    part = split(len(flat), exchange.size)[0]
    row_bytes = exchange.coder.codec.row_bytes(part)
    if exchange.wire.pieces == 1 or row_bytes <= ROW:
        return len(flat)
    return part * exchange.wire.eager // row_bytes // UNIT * UNIT * exchange.size


def cut(exchange: Exchange, flat: Tensor, speed: int) -> list[Tensor]:
    """The further pieces. On a slow wire their rows take about `ROW` bytes, on a fast one several times as many."""
    row_bytes = exchange.coder.codec.row_bytes(split(len(flat), exchange.size)[0])
    count = -(-row_bytes // (FAST_ROW if speed > FAST else ROW))
    unit = UNIT * exchange.size
    return list(flat.split(-(-len(flat) // (count * unit)) * unit))


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

    def open(self) -> Sequence[int]:
        """Agree with all ranks, and send the parts with the header where they are small enough."""
        if self.along:
            return self.exchange.agree(lambda peer: self._encode(peer) if self.sizes[peer] else None, list(self.inbox))
        return self.exchange.agree(meanwhile=self._encode_first)

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
        out = self.exchange.next_row("outbox", max(self.sizes))[: self.sizes[peer]]
        return self.coder.encode(self.parts[peer][None], out, self.rank, peer, self.index)


def reduce_scatter(exchange: Exchange, parts: Sequence[Tensor], output: Tensor, divisor: int) -> None:
    """Sum part `rank` of every rank's `parts` (flat, one per rank) into `output` (flat)."""
    coder, size, rank = exchange.coder, exchange.size, exchange.rank
    sizes = [coder.codec.row_bytes(len(part)) for part in parts]
    inbox = coder.take("inbox", size * sizes[rank]).view(size, sizes[rank])

    def outgoing(peer: int) -> Tensor:
        out = exchange.next_row("outbox", max(sizes))[: sizes[peer]]
        return coder.encode(parts[peer][None], out, rank, peer)

    exchange.open(outgoing, sizes, [row if peer != rank else row[:0] for peer, row in enumerate(inbox)])
    coder.sum(inbox, parts[rank], rank, divisor, output)
