"""Rows of every rank to all ranks, chunk by chunk: the all-gather of FSDP2's parameters, and of averages on a host.

FSDP2 lays the shards of a parameter group side by side: a matrix with one row per rank. A rank decodes its own bytes
too, so all of them hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import Encoder, lossless
from narrowcast.distributed.gradients.layout import ChunkLayout, exempt_runs, runs_of
from narrowcast.distributed.protocols import pipeline


def gather_shards(collective: Collective, matrix: Tensor, layout: Sequence[ChunkLayout]) -> None:
    """Write every rank's own row of its `matrix` [ranks, columns] into every rank's."""
    encoder, exact = collective.encoder, collective.encoder.using(lossless(matrix.dtype))
    chunks = []
    for index, chunk in enumerate(layout):
        runs = [(exact, columns) for columns in exempt_runs(chunk)]
        runs += [(encoder, run.columns) for run in runs_of(chunk, encoder.codec, sharded=True)]
        rows = [(each, matrix[collective.rank, columns], matrix[:, columns]) for each, columns in runs]
        chunks.append(GatheredChunk(collective, rows, index))
    pipeline.run(chunks)


class GatheredChunk:
    """A chunk on its way to all ranks.

    A run is an encoder, what this rank has [numel], and the place for what everyone has [ranks, numel].
    """

    def __init__(self, collective: Collective, runs: Sequence[tuple[Encoder, Tensor, Tensor]], index: int) -> None:
        self._collective, self._runs = collective, runs
        self._sizes = [encoder.codec.row_bytes(len(mine)) for encoder, mine, _ in runs]
        shape = collective.size, sum(self._sizes)
        inbox = collective.encoder.take(f"inbox {index % collective.wire.chunks}", shape[0] * shape[1])
        self._inbox = inbox.view(shape)
        self._mine = self._inbox[collective.rank]
        self._rides_along = index == 0 and len(self._mine) <= collective.wire.eager

    def open(self) -> None:
        if self._rides_along:
            self._encode()
            self._collective.agree(lambda peer: self._mine if len(self._mine) else None, list(self._inbox))
        else:
            self._collective.agree()

    def expect(self) -> None:
        rank, nothing = self._collective.rank, self._mine[:0]
        rows = [nothing if peer == rank or self._rides_along else row for peer, row in enumerate(self._inbox)]
        self._arrive: Callable[[], Iterator[int]] = self._collective.wire.expect(rows)

    def send(self) -> None:
        if not self._rides_along:
            self._encode()
            self._collective.send_to_all(self._mine)
        self._decode(self._collective.rank)

    def receive(self) -> None:
        for peer in self._arrive():
            self._decode(peer)

    def finish(self) -> None:
        """Nothing comes back."""

    def _encode(self) -> None:
        for (encoder, mine, _), data in zip(self._runs, self._mine.split(self._sizes), strict=True):
            encoder.encode(mine[None], data, self._collective.rank)

    def _decode(self, peer: int) -> None:
        for (encoder, _, everyones), data in zip(self._runs, self._inbox[peer].split(self._sizes), strict=True):
            encoder.decode(data, everyones[peer][None])
