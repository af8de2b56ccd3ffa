"""Parameters to all ranks, in a codec: the all-gather of FSDP2.

FSDP2 lays the shards of a parameter group side by side: a matrix with one row per rank. Every rank's row goes to every
rank, chunk by chunk. A rank decodes its own bytes too, so all of them hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.gradients.layout import ChunkLayout, exempt_runs, runs_of
from narrowcast.distributed.protocols import pipeline


def gather_shards(collective: Collective, matrix: Tensor, layout: Sequence[ChunkLayout]) -> None:
    """Write every rank's own row of its `matrix` [ranks, columns] into every rank's."""
    pipeline.run([_GatheredChunk(collective, matrix, chunk, i) for i, chunk in enumerate(layout)])


class _GatheredChunk:
    """A chunk of parameters on its way to all ranks."""

    def __init__(self, collective: Collective, matrix: Tensor, layout: ChunkLayout, index: int) -> None:
        self._collective, self._matrix = collective, matrix
        encoder, exact = collective.encoder, collective.encoder.using(lossless(matrix.dtype))
        self._runs = [(exact, columns) for columns in exempt_runs(layout)]
        self._runs += [(encoder, run.columns) for run in runs_of(layout, encoder.codec, sharded=True)]
        self._sizes = [each.codec.row_bytes(columns.stop - columns.start) for each, columns in self._runs]
        shape = collective.size, sum(self._sizes)
        self._inbox = encoder.take(f"inbox {index % collective.wire.chunks}", shape[0] * shape[1]).view(shape)
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
        rank = self._collective.rank
        for (encoder, columns), data in zip(self._runs, self._mine.split(self._sizes), strict=True):
            encoder.encode(self._matrix[rank, columns][None], data, rank)

    def _decode(self, peer: int) -> None:
        for (encoder, columns), data in zip(self._runs, self._inbox[peer].split(self._sizes), strict=True):
            encoder.decode(data, self._matrix[peer, columns][None])
