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

from narrowcast.distributed.exchange import Exchange

UNIT = 128
"""Parts start at multiples of so many elements: whole blocks of the usual codecs, and aligned rows."""


def split(numel: int, ranks: int) -> list[int]:
    """How many elements each rank owns: about the same, the last ones fewer or none."""
    each = -(-numel // (ranks * UNIT)) * UNIT
    return [max(0, min(each, numel - rank * each)) for rank in range(ranks)]


def all_reduce(exchange: Exchange, flat: Tensor, divisor: int) -> None:
    """Sum `flat` [numel] over all ranks, in place."""
    coder, rank = exchange.coder, exchange.rank
    parts = flat.split(split(len(flat), exchange.size))
    sizes = [coder.codec.row_bytes(len(part)) for part in parts]
    results = coder.take("results", sum(sizes)).split(sizes)
    gathered = gather_parts(exchange, parts, results)
    coder.sum_encode(gathered, parts[rank], rank, divisor, results[rank], rank, exchange.size)
    exchange.share(results, lambda peer: coder.decode(results[peer], parts[peer][None]))


def reduce_scatter(exchange: Exchange, parts: Sequence[Tensor], output: Tensor, divisor: int) -> None:
    """Sum part `rank` of every rank's `parts` (flat, one per rank) into `output` (flat)."""
    gathered = gather_parts(exchange, parts)
    exchange.coder.sum(gathered, parts[exchange.rank], exchange.rank, divisor, output)


def gather_parts(exchange: Exchange, parts: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> Tensor:
    """The encoded rows [ranks, row_bytes] of the part that this rank owns; its own row is left blank."""
    coder, size, rank = exchange.coder, exchange.size, exchange.rank
    sizes = [coder.codec.row_bytes(len(part)) for part in parts]
    width = max(sizes)
    outbox = coder.take("outbox", exchange.wire.turns * width).view(-1, width) if width else None

    def outgoing(peer: int, turn: int) -> Tensor:
        assert outbox is not None
        return coder.encode(parts[peer][None], outbox[turn % len(outbox), : sizes[peer]], rank, peer)

    inbox = coder.take("inbox", size * sizes[rank]).view(size, sizes[rank])
    incoming = [inbox[peer] if peer != rank else inbox[peer, :0] for peer in range(size)]
    exchange.open(outgoing, sizes, incoming, shared=shared)
    return inbox
