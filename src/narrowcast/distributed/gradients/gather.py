"""Rows of every rank to all ranks, chunk by chunk: the all-gather of FSDP2's parameters, and of averages on a host.

FSDP2 lays the shards of a parameter group side by side: a matrix with one row per rank. A rank decodes its own bytes
too, so all of them hold the same bits.

Where ranks share hosts, a rank sends its row to those in its place on the other hosts, and then passes on the rows that
it has from these, still encoded, within its host. So a row reaches a host once, and is decoded to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import Encoder, bytes_of, lossless
from narrowcast.distributed.gradients.layout import ChunkLayout
from narrowcast.distributed.gradients.runs import exempt_runs, runs_of
from narrowcast.distributed.protocols import pipeline
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.agreement import Call


def gather_shards(collective: Collective, matrix: Tensor, layout: Sequence[ChunkLayout]) -> None:
    """Write every rank's own row of its `matrix` [ranks, columns] into every rank's."""
    runs = [_runs(collective.encoder, matrix, collective.rank, range(collective.size), chunk) for chunk in layout]
    pipeline.run([GatheredChunk(collective, each, index) for index, each in enumerate(runs)])


def gather_by_hosts(mesh: Mesh, call: Call, matrix: Tensor, layout: Sequence[ChunkLayout]) -> list[Collective]:
    """The same where ranks share hosts: its phases."""
    mine = mesh.everyone.rank
    encoded: list[Tensor] = []

    def between(collective: Collective) -> None:
        rows = [ranks[mesh.within.rank] for ranks in mesh.hosts]
        runs = [_runs(collective.encoder, matrix, mine, rows, chunk) for chunk in layout]
        chunks = [GatheredChunk(collective, each, index, kept=True) for index, each in enumerate(runs)]
        pipeline.run(chunks)
        encoded[:] = [chunk.inbox for chunk in chunks]

    def within(collective: Collective) -> None:
        chunks = []
        for index, (chunk, rows) in enumerate(zip(layout, encoded, strict=True)):
            runs = [
                [_runs(collective.encoder, matrix, mine, [ranks[place]], chunk) for ranks in mesh.hosts]
                for place in range(collective.size)
            ]
            chunks.append(_PassedChunk(collective, rows, runs, index))
        pipeline.run(chunks)

    calls = (replace(call, op=f"{call.op} {where} hosts") for where in ("between", "within"))
    groups = (mesh.between, between), (mesh.within, within)
    return [Collective(group, each, protocol) for (group, protocol), each in zip(groups, calls, strict=True)]


Run = tuple[Encoder, Tensor, Sequence[Tensor]]
"""An encoder, what this rank has [numel], and the places for what ranks have [numel], rank by rank."""


def _runs(encoder: Encoder, matrix: Tensor, mine: int, rows: Sequence[int], chunk: ChunkLayout) -> list[Run]:
    exact = encoder.using(lossless(matrix.dtype))
    runs = [(exact, columns) for columns in exempt_runs(chunk)]
    runs += [(encoder, run.columns) for run in runs_of(chunk, encoder.codec, sharded=True)]
    return [(each, matrix[mine, columns], [matrix[row, columns] for row in rows]) for each, columns in runs]


class GatheredChunk:
    """A chunk on its way to all ranks. With `kept`, `inbox` [ranks, bytes] stays as it is for what comes later.

    Rows that are elements as they lie in memory go from where they are to their places.
    """

    def __init__(self, collective: Collective, runs: Sequence[Run], index: int, *, kept: bool = False) -> None:
        self._collective, self._runs = collective, runs
        self._sizes = [encoder.codec.row_bytes(len(mine)) for encoder, mine, _ in runs]
        in_memory = None if kept or len(runs) != 1 else _rows_in_memory(*runs[0])
        self._open(sum(self._sizes), index, kept, in_memory)

    def _open(self, nbytes: int, index: int, kept: bool, in_memory: list[Tensor] | None = None) -> None:
        collective, shape = self._collective, (self._collective.size, nbytes)
        self._in_memory = in_memory is not None
        if in_memory is not None:
            self._mine, *self._rows_of = in_memory
        else:
            if kept:
                self.inbox = torch.empty(shape, dtype=torch.uint8, device=collective.group.device)
            else:
                slot = f"inbox {index % collective.wire.chunks}"
                self.inbox = collective.encoder.take(slot, shape[0] * shape[1]).view(shape)
            self._rows_of = list(self.inbox)
            self._mine = self._rows_of[collective.rank]
        self._rides_along = index == 0 and len(self._mine) <= collective.wire.eager

    def open(self) -> None:
        if self._rides_along:
            self._encode()
            self._collective.agree(lambda peer: self._mine if len(self._mine) else None, self._rows_of)
        else:
            self._collective.agree()

    def expect(self) -> None:
        rank, nothing = self._collective.rank, self._mine[:0]
        rows = [nothing if peer == rank or self._rides_along else row for peer, row in enumerate(self._rows_of)]
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
        if not self._in_memory:
            for (encoder, mine, _), data in zip(self._runs, self._mine.split(self._sizes), strict=True):
                encoder.encode(mine[None], data, self._collective.rank)

    def _decode(self, peer: int) -> None:
        row = self._rows_of[peer]
        if not self._in_memory:
            _decode(self._runs, peer, row)
        elif peer == self._collective.rank and row.data_ptr() != self._mine.data_ptr():
            row.copy_(self._mine)


class _PassedChunk(GatheredChunk):
    """Encoded rows that a rank has from all hosts, on their way to the others of its host."""

    def __init__(
        self, collective: Collective, rows: Tensor, runs: Sequence[Sequence[Sequence[Run]]], index: int
    ) -> None:
        self._collective = collective
        self._rows, self._of_places = rows, runs
        self._open(rows.numel(), index, kept=False)

    def _encode(self) -> None:
        self._mine.copy_(self._rows.view(-1))

    def _decode(self, peer: int) -> None:
        if peer != self._collective.rank:  # its own rows it has decoded before
            for runs, row in zip(self._of_places[peer], self.inbox[peer].view(self._rows.shape), strict=True):
                _decode(runs, 0, row)


def _rows_in_memory(encoder: Encoder, mine: Tensor, everyones: Sequence[Tensor]) -> list[Tensor] | None:
    """The rows of `mine` and of `everyones`, where all of them are elements as they lie in memory."""
    codec, nbytes = encoder.codec, encoder.codec.row_bytes(len(mine))
    rows = [row for each in (mine, *everyones) if (row := bytes_of(each, codec, nbytes)) is not None]
    return rows if len(rows) == 1 + len(everyones) else None


def _decode(runs: Sequence[Run], peer: int, row: Tensor) -> None:
    sizes = [encoder.codec.row_bytes(len(mine)) for encoder, mine, _ in runs]
    for (encoder, _, everyones), data in zip(runs, row.split(sizes), strict=True):
        encoder.decode(data, everyones[peer][None])
