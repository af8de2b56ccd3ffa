"""Collectives that move tensors without adding them: each element is quantized once.

Where several ranks end with the same tensor (all_gather, broadcast) the sender decodes its own bytes too, so all of
them hold the same bits. What a rank keeps for itself alone (its own piece of an all_to_all) never travels, and stays
exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from narrowcast.distributed.protocols.exchange import Exchange


def all_gather(exchange: Exchange, outputs: Sequence[Tensor], mine: Tensor) -> None:
    """Write every rank's `mine` into `outputs` (rows of each rank, [count, numel])."""
    coder, rank = exchange.coder, exchange.rank
    sizes = [coder.nbytes(output) for output in outputs]
    inbox = coder.take("inbox", sum(sizes)).split(sizes)
    coder.encode(mine, inbox[rank], rank)
    incoming = [row if peer != rank else row[:0] for peer, row in enumerate(inbox)]
    exchange.open_to_all(inbox[rank], incoming, lambda peer: coder.decode(inbox[peer], outputs[peer]))


def all_to_all(exchange: Exchange, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Send `inputs[peer]` to each peer, and write what each sent into `outputs[peer]` (rows, [count, numel])."""
    coder, rank = exchange.coder, exchange.rank
    sizes = [coder.nbytes(piece) for piece in inputs]
    exchange.reserve(max(sizes))

    def outgoing(peer: int) -> Tensor:
        return coder.encode(inputs[peer], exchange.next_row(sizes[peer]), rank, peer)

    def arrived(peer: int) -> None:
        if peer == rank:
            outputs[peer].copy_(inputs[peer])
        else:
            coder.decode(inbox[peer], outputs[peer])

    expected = [coder.nbytes(piece) if peer != rank else 0 for peer, piece in enumerate(outputs)]
    inbox = coder.take("inbox", sum(expected)).split(expected)
    exchange.open(outgoing, sizes, inbox, arrived)


def broadcast(exchange: Exchange, rows: Tensor, root: int) -> None:
    """Write the root's `rows` [count, numel] into every rank's.

    A small tensor goes to everyone directly. A large one is cut into as many pieces as there are ranks: the root
    hands one to each, and each passes its own on to all, so that no link carries much more than the tensor once.
    """
    coder, rank, size = exchange.coder, exchange.rank, exchange.size
    total = coder.nbytes(rows)
    data = coder.take("inbox", total)
    if rank == root:
        coder.encode(rows, data, rank)
    if total <= exchange.wire.eager:
        incoming = [data if peer == root != rank else data[:0] for peer in range(size)]
        exchange.open(lambda peer: data, [total if rank == root else 0] * size, incoming)
    else:
        pieces = data.tensor_split(size)
        none = [piece[:0] for piece in pieces]
        sizes = [len(piece) if rank == root != peer else 0 for peer, piece in enumerate(pieces)]
        incoming = [pieces[rank] if peer == root != rank else none[peer] for peer in range(size)]
        exchange.open(lambda peer: pieces[peer], sizes, incoming)
        exchange.share(pieces, skip=root)
    coder.decode(data, rows)
