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

from collections.abc import Sequence

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.protocols.exchange import Exchange
from narrowcast.distributed.protocols.pipeline import Piece, Strip

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
    """Sum `flat` [numel] over all ranks, in place."""
    sizes = cut(len(flat), exchange.size, exchange.coder.codec, exchange.wire.eager)
    parts = [piece.split(split(len(piece), exchange.size)) for piece in flat.split(sizes)]
    pieces = [Piece(exchange, [Strip(exchange.coder, part, key=i)], i) for i, part in enumerate(parts)]
    exchange.reserve(max(max(piece.sizes) for piece in pieces))
    pieces[0].open()
    reduce(exchange, pieces, divisor)


def reduce(exchange: Exchange, pieces: Sequence[Piece], divisor: int) -> None:
    """Take pieces from parts to sums, once ranks agree.

    While one is added up, the next is on the wire, and the sums of the last one follow.
    """
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
