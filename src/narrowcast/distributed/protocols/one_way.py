"""Collectives that move tensors without adding them: each element is quantized once.

Where several ranks end with the same tensor (all_gather, broadcast) the sender decodes its own bytes too, so all of
them hold the same bits. What a rank sends to itself (in an all_to_all) does not travel, and stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from narrowcast.distributed.collective import Collective


def all_gather(collective: Collective, outputs: Sequence[Tensor], mine: Tensor) -> None:
    """Write every rank's `mine` into `outputs` (rows of each rank, [count, numel])."""
    encoder, rank = collective.encoder, collective.rank
    sizes = [encoder.nbytes(output) for output in outputs]
    inbox = encoder.take("inbox", sum(sizes)).split(sizes)
    encoder.encode(mine, inbox[rank], rank)
    incoming = [row if peer != rank else row[:0] for peer, row in enumerate(inbox)]
    collective.swap_one(inbox[rank], incoming, lambda peer: encoder.decode(inbox[peer], outputs[peer]))


def all_to_all(collective: Collective, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Send `inputs[peer]` to each peer, and write what each sent into `outputs[peer]` (rows, [count, numel])."""
    encoder, rank = collective.encoder, collective.rank
    sizes = [encoder.nbytes(rows) for rows in inputs]
    collective.reserve(max(sizes))

    def outgoing(peer: int) -> Tensor:
        return encoder.encode(inputs[peer], collective.next_row(sizes[peer]), rank, peer)

    def arrived(peer: int) -> None:
        if peer == rank:
            outputs[peer].copy_(inputs[peer])
        else:
            encoder.decode(inbox[peer], outputs[peer])

    expected = [encoder.nbytes(rows) if peer != rank else 0 for peer, rows in enumerate(outputs)]
    inbox = encoder.take("inbox", sum(expected)).split(expected)
    collective.swap(outgoing, sizes, inbox, arrived)


def broadcast(collective: Collective, rows: Tensor, root: int) -> None:
    """Write the root's `rows` [count, numel] into every rank's.

    A small tensor goes to everyone directly. A large one is cut into one part per rank: the root sends each rank its
    part, and each rank passes its own on to all, so that no link carries much more than the tensor once.
    """
    encoder, rank, size = collective.encoder, collective.rank, collective.size
    total = encoder.nbytes(rows)
    data = encoder.take("inbox", total)
    if rank == root:
        encoder.encode(rows, data, rank)
    if total <= collective.wire.eager:
        incoming = [data if peer == root != rank else data[:0] for peer in range(size)]
        collective.swap(lambda peer: data, [total if rank == root else 0] * size, incoming)
    else:
        parts = data.tensor_split(size)
        none = [part[:0] for part in parts]
        sizes = [len(part) if rank == root != peer else 0 for peer, part in enumerate(parts)]
        incoming = [parts[rank] if peer == root != rank else none[peer] for peer in range(size)]
        collective.swap(lambda peer: parts[peer], sizes, incoming)
        collective.share(parts, skip=root)
    encoder.decode(data, rows)
