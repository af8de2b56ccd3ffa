"""Shards of several parameters on their way between ranks: gradients to the rank that keeps them, parameters to all.

FSDP2 lays the shards of a parameter group side by side: a matrix with a row for each rank, in which every parameter
has `part` columns, padded with zeros where ranks do not share it evenly. `reduce_shards` sums row r of every rank's
matrix on rank r; the sum is not quantized. `gather_shards` writes every rank's row into every rank's matrix; a rank
decodes its own bytes too, so all of them hold the same bits.

One message to each peer carries all of a piece: what is exempt in a codec that loses nothing, the rest in the codec of
the call. Blocks of a codec never hold elements of two parameters, so what a parameter turns into does not depend on
its neighbours. Nothing is changed before all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.gradients.columns import UNIT, PieceLayout, Pieces, chunk_by_chunk, chunks, elements_at_once
from narrowcast.distributed.gradients.feedback import FeedbackStrip, Residuals
from narrowcast.distributed.gradients.telemetry import Probe
from narrowcast.distributed.protocols.encoder import lossless
from narrowcast.distributed.protocols.exchange import Exchange
from narrowcast.distributed.protocols.pipeline import Parts


@dataclass(frozen=True)
class Shard:
    """A parameter's columns in the matrix of a call."""

    name: str
    numel: int
    """Elements of the whole parameter."""
    part: int
    exempt: bool


@dataclass(frozen=True)
class Run:
    """Neighbouring columns that are encoded as one row."""

    key: int
    columns: slice
    """In the matrix of the call."""
    places: slice
    """In the residuals of the piece."""
    exempt: bool


def lay_out_shards(shards: Sequence[Shard], ranks: int, at_once: bool) -> list[PieceLayout]:
    """The pieces of a matrix of shards. Exempt elements are counted in columns."""
    pieces = Pieces(ranks, at_once)
    offset, width = 0, max(1, elements_at_once(ranks) // ranks)
    for shard in shards:
        if shard.exempt:
            for start in range(0, shard.part, width):
                columns = min(width, shard.part - start)
                pieces.room_for(columns * ranks).exempt.append((offset + start, columns))
        else:
            for chunk in chunks(shard.name, shard.numel, ranks, shard.part):
                pieces.room_for(chunk.columns * ranks).chunks.append((chunk, offset))
        offset += shard.part
    return pieces.made


def runs(piece: PieceLayout, codec: Codec) -> Iterator[Run]:
    """The rows of a piece: as few as keep every parameter's blocks its own."""
    nowhere, alone = slice(0, 0), chunk_by_chunk(codec)
    merged: list[Run] = []
    for offset, count in piece.exempt:
        if merged and merged[-1].columns.stop == offset:
            merged[-1] = Run(0, slice(merged[-1].columns.start, offset + count), nowhere, True)
        else:
            merged.append(Run(0, slice(offset, offset + count), nowhere, True))
    yield from merged
    merged = []
    for chunk, offset, places in piece.spans():
        columns = slice(offset + chunk.start, offset + chunk.start + chunk.columns)
        last = merged[-1] if merged and not alone else None
        if last and last.columns.stop == columns.start and (columns.start - last.columns.start) % UNIT == 0:
            joined = slice(last.columns.start, columns.stop), slice(last.places.start, places.stop)
            merged[-1] = Run(0, *joined, False)
        else:
            merged.append(Run(chunk.key if alone else 0, columns, places, False))
    yield from merged


def reduce_shards(
    exchange: Exchange,
    matrix: Tensor,
    output: Tensor,
    layout: Sequence[PieceLayout],
    divisor: int,
    residuals: Residuals | None,
    probe: Probe | None,
) -> None:
    """Sum this rank's row of every rank's `matrix` [ranks, columns] into `output` [columns]."""
    pieces = [_Reduced(exchange, matrix, output, piece, i, divisor, residuals, probe) for i, piece in enumerate(layout)]
    largest = max(max(piece.sizes) for piece in pieces)
    exchange.reserve(largest)
    small = len(pieces) == 1 and largest <= exchange.wire.eager
    if small:
        pieces[0].alone()
    else:
        exchange.agree()
        _in_turn(exchange, pieces)
    if residuals is not None:
        residuals.reduced(layout)


def gather_shards(exchange: Exchange, matrix: Tensor, layout: Sequence[PieceLayout]) -> None:
    """Write every rank's own row of its `matrix` [ranks, columns] into every rank's."""
    pieces = [_Gathered(exchange, matrix, piece, i) for i, piece in enumerate(layout)]
    if len(pieces) == 1:
        pieces[0].alone()
    else:
        exchange.agree()
        _in_turn(exchange, pieces)


class _Piece(Protocol):
    def expect(self) -> None: ...

    def send(self) -> None: ...

    def finish(self) -> None: ...


def _in_turn(exchange: Exchange, pieces: Sequence[_Piece]) -> None:
    """Take pieces there, once ranks agree: while one is on the wire, the last one is decoded."""
    for piece in pieces[:2]:
        piece.expect()
    for i, piece in enumerate(pieces):
        piece.send()
        if i >= 1:
            pieces[i - 1].finish()
        if i + 2 < len(pieces):
            pieces[i + 2].expect()
    pieces[-1].finish()
    exchange.wire.flush()


class _Reduced(Parts):
    """A piece of gradients on its way to the ranks that keep them."""

    def __init__(
        self,
        exchange: Exchange,
        matrix: Tensor,
        output: Tensor,
        layout: PieceLayout,
        index: int,
        divisor: int,
        residuals: Residuals | None,
        probe: Probe | None,
    ) -> None:
        self._matrix, self._layout, self._divisor = matrix, layout, divisor
        self._before: Tensor | None = None
        self._sender: Tensor | None = None
        if residuals is not None and layout.chunks:
            step = residuals.step_of(layout, matrix.device)
            self._before, self._sender = step.sender, step.next_sender
        coder, exact = exchange.coder, exchange.coder.using(lossless(matrix.dtype))
        self._runs = list(runs(layout, coder.codec))
        strips = [
            FeedbackStrip(
                exact if run.exempt else coder,
                self._source(run).unbind(),
                [output[run.columns]] * exchange.size,
                run.key,
                keeps=self._sender is not None and not run.exempt,
                owner=None,
                owner_next=None,
                probe=None if run.exempt else probe,
            )
            for run in self._runs
        ]
        super().__init__(exchange, strips, index)

    def alone(self) -> None:
        """Swap all of it with the header, where it is small."""
        self._add_gradients()
        self.exchange.open(self.encode, self.sizes, self.coming())
        self.sent()
        self._add_up()

    def expect(self) -> None:
        self._arrive = self.exchange.wire.expect(self.coming())

    def send(self) -> None:
        self._add_gradients()
        self.send_parts()

    def finish(self) -> None:
        for _ in self._arrive():
            pass
        self._add_up()

    def _add_gradients(self) -> None:
        """To the residuals, where there are some."""
        if self._before is not None and self._sender is not None:
            for run in self._runs:
                if not run.exempt:
                    gradients, target = self._matrix[:, run.columns], self._sender[:, run.places]
                    torch.add(self._before[:, run.places], gradients, out=target)

    def _add_up(self) -> None:
        for strip, rows in zip(self.strips, self.rows(self.inbox, self.rank), strict=True):
            strip.add(rows, self.rank, self._divisor)
        # Not every codec gives zeros back for zeros, and nobody saves what is left of them.
        if self._sender is not None:
            for chunk, _, span in self._layout.spans():
                for padding in chunk.padding(self._sender[:, span]):
                    padding.zero_()

    def _source(self, run: Run) -> Tensor:
        if self._sender is None or run.exempt:
            return self._matrix[:, run.columns]
        return self._sender[:, run.places]


class _Gathered:
    """A piece of parameters on its way to all ranks."""

    def __init__(self, exchange: Exchange, matrix: Tensor, layout: PieceLayout, index: int) -> None:
        self._exchange, self._matrix = exchange, matrix
        coder, exact = exchange.coder, exchange.coder.using(lossless(matrix.dtype))
        self._rows = [(exact if run.exempt else coder, run) for run in runs(layout, coder.codec)]
        self._sizes = [c.codec.row_bytes(run.columns.stop - run.columns.start) for c, run in self._rows]
        shape = exchange.size, sum(self._sizes)
        self._inbox = coder.take(f"inbox {index % exchange.wire.pieces}", shape[0] * shape[1]).view(shape)

    def alone(self) -> None:
        """All of it, where there is one piece: a small one goes with the header."""
        self._encode()
        self._exchange.open_to_all(self._mine, self._coming(), self._decode)

    def expect(self) -> None:
        self._arrive: Callable[[], Iterator[int]] = self._exchange.wire.expect(self._coming())

    def send(self) -> None:
        self._encode()
        self._exchange.send_to_all(self._mine)
        self._decode(self._exchange.rank)

    def finish(self) -> None:
        for peer in self._arrive():
            self._decode(peer)

    @property
    def _mine(self) -> Tensor:
        return self._inbox[self._exchange.rank]

    def _coming(self) -> list[Tensor]:
        return [row if peer != self._exchange.rank else row[:0] for peer, row in enumerate(self._inbox)]

    def _encode(self) -> None:
        rank = self._exchange.rank
        for (coder, run), data in zip(self._rows, self._mine.split(self._sizes), strict=True):
            coder.encode(self._matrix[rank, run.columns][None], data, rank)

    def _decode(self, peer: int) -> None:
        for (coder, run), data in zip(self._rows, self._inbox[peer].split(self._sizes), strict=True):
            coder.decode(data, self._matrix[peer, run.columns][None])
