"""Chunks of a tensor through a reduction, several at a time.

A `Chunk` is what travels together: one message takes it to each peer. It is made of segments. A `Segment` is a run of
elements in one codec: a part for each rank, its owner, and the place for each part's sum.

The first chunk opens the collective. Where it is small, its rows ride along with the headers; the rows of the first one
that is not may leave while ranks agree (wire.py). Then a chunk goes through four steps, and the chunks of a tensor take
turns (`run`), so that encoding, sending, summing and decoding overlap:

    expect    say where the rows of the others go
    send      encode each part for its owner, and send it
    receive   sum the rows of this rank's own part; send the sum to everyone, or keep it
    finish    decode the sums of the others
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import Encoder, bytes_of
from narrowcast.distributed.transport.wire import IN_ADVANCE


class Steps(Protocol):
    """What goes through the pipeline."""

    def open(self) -> None:
        """Agree with all ranks: of the first chunk, before any other step. What is small may ride along."""

    def expect(self) -> None: ...

    def send(self) -> None: ...

    def receive(self) -> None: ...

    def finish(self) -> None: ...


def run(chunks: Sequence[Steps]) -> None:
    """Take chunks through all steps: while one is summed, the next is on the wire, and the sums of the last follow."""
    chunks[0].open()
    for chunk in chunks[:2]:
        chunk.expect()
    for i, chunk in enumerate(chunks):
        chunk.send()
        if i >= 1:
            chunks[i - 1].receive()
        if i >= 2:
            chunks[i - 2].finish()
        if i + 2 < len(chunks):
            chunks[i + 2].expect()
    chunks[-1].receive()
    for chunk in chunks[-2:]:
        chunk.finish()


class Segment:
    """Elements in one codec: `parts[rank]` is what that rank owns, and `sums[rank]` takes its sum."""

    def __init__(
        self, encoder: Encoder, parts: Sequence[Tensor], sums: Sequence[Tensor] | None = None, key: int | None = None
    ) -> None:
        self.encoder = encoder
        self.parts = parts
        self.sums = parts if sums is None else sums
        self.key = () if key is None else (key,)
        """Tells the segments of one collective apart where rounding is stochastic."""
        self.sizes = [encoder.codec.row_bytes(len(part)) for part in parts]

    def encode(self, rank: int, peer: int, out: Tensor) -> None:
        """Encode the part of `peer`, as `rank`, into the bytes `out`."""
        self.encoder.encode(self.parts[peer][None], out, rank, peer, *self.key)

    def row_in_memory(self, peer: int) -> Tensor | None:
        """The row of the part of `peer`, where it is the part as it lies in memory."""
        return bytes_of(self.parts[peer], self.encoder.codec, self.sizes[peer])

    def sent(self) -> None:
        """Called once every part is encoded, while the bytes are still there."""

    def decode_sum_encode(self, inbox: Tensor, rank: int, divisor: int, out: Tensor) -> None:
        """Sum the rows of the part that `rank` owns into `out`, encoded, and into its place."""
        own = self.parts[rank]
        self.encoder.decode_sum_encode(inbox, own, rank, divisor, out, rank, len(self.parts), *self.key)
        self.decode(rank, out)

    def decode_sum(self, inbox: Tensor, rank: int, divisor: int) -> None:
        """Sum the rows of the part that `rank` owns into its place. The sum is not quantized."""
        self.encoder.decode_sum(inbox, self.parts[rank], rank, divisor, self.sums[rank])

    def decode(self, peer: int, data: Tensor) -> None:
        """Decode the sum of the part that `peer` owns into its place."""
        self.encoder.decode(data, self.sums[peer][None])


class Chunk:
    """Segments that travel in one message to each peer.

    With `keep_sums`, each owner keeps its sum to itself. With `eager`, the first chunk travels with the header where it
    is small enough. `from_memory` says that parts stay as they are until their rows have left: those that are rows as
    they lie in memory are not copied.
    """

    def __init__(
        self,
        collective: Collective,
        segments: Sequence[Segment],
        index: int,
        divisor: int,
        *,
        keep_sums: bool = False,
        eager: bool = True,
        from_memory: bool = False,
    ) -> None:
        self.collective = collective
        self._from_memory = from_memory and len(segments) == 1
        self.segments = segments
        self.rank = collective.rank
        self.divisor = divisor
        self.keep_sums = keep_sums
        self.sizes = [sum(segment.sizes[peer] for segment in segments) for peer in range(collective.size)]
        slot, take = index % collective.wire.chunks, collective.encoder.take
        shape = collective.size, self.sizes[self.rank]
        room = collective.wire.in_advance
        self._may_leave = index <= 1 and min(self.sizes) > 0 and max(self.sizes) <= room
        self._inbox_bytes = take(f"inbox {slot}", shape[0] * shape[1] + (room if self._may_leave else 0))
        self._inbox = self._inbox_bytes[: shape[0] * shape[1]].view(shape)
        if not keep_sums:
            self._sums = take(f"sums {slot}", sum(self.sizes)).split(self.sizes)
        self._rides_along = eager and index == 0 and max(self.sizes) <= collective.wire.eager
        self._prepared = self._left = False
        self._first_row: Tensor | None = None
        self.following: Chunk | None = None

    def prepare(self) -> None:
        """Bring the elements to where `Segment.encode` reads them. Nothing else may change: ranks may not agree yet."""

    def open(self) -> None:
        first = self.following if self._rides_along else self
        leaving = first if first is not None and first._may_leave else None
        if leaving is not None:
            agree = partial(self.collective.agree, meanwhile=leaving._leave, in_advance=True)
        else:
            agree = partial(self.collective.agree, meanwhile=self._encode_first)
        if self._rides_along:
            self._prepare_once()
            agree(lambda peer: self._encode(peer) if self.sizes[peer] else None, list(self._inbox))
        else:
            agree()

    def expect(self) -> None:
        if not self._left:
            nothing = self._inbox[0, :0]
            mine = [nothing if peer == self.rank or self._rides_along else row for peer, row in enumerate(self._inbox)]
            self._parts_arrive = self.collective.wire.expect(mine, 0)
        if not self.keep_sums:
            self._sums_arrive = self.collective.wire.expect(self._sums, 1)

    def send(self) -> None:
        if not self._rides_along and not self._left:
            self._send_rows(0)
        for segment in self.segments:
            segment.sent()

    def receive(self) -> None:
        for _ in self._parts_arrive():
            pass
        received = self._rows(self._inbox, self.rank)
        if self.keep_sums:
            for segment, rows in zip(self.segments, received, strict=True):
                segment.decode_sum(rows, self.rank, self.divisor)
            return
        mine = self._sums[self.rank]
        for segment, rows, out in zip(self.segments, received, self._rows(mine, self.rank), strict=True):
            if len(out):
                segment.decode_sum_encode(rows, self.rank, self.divisor, out)
        self.collective.send_to_all(mine, stage=1)

    def finish(self) -> None:
        if not self.keep_sums:
            for peer in self._sums_arrive():
                for segment, row in zip(self.segments, self._rows(self._sums[peer], peer), strict=True):
                    segment.decode(peer, row)

    def _prepare_once(self) -> None:
        if not self._prepared:
            self.prepare()
            self._prepared = True

    def _leave(self) -> None:
        """Send the rows while ranks agree: nothing else may change.

        Those of the others may be of any call: one that is too long for its place runs into those after it.
        """
        self._left = True
        room, step = self.collective.wire.in_advance, self.sizes[self.rank]
        rows = [self._inbox_bytes[peer * step : peer * step + room] for peer in range(self.collective.size)]
        self._parts_arrive = self.collective.wire.expect(rows, IN_ADVANCE)
        self._send_rows(IN_ADVANCE)

    def _send_rows(self, stage: int) -> None:
        self._prepare_once()
        for peer in self.collective.targets:
            row, self._first_row = self._first_row, None  # encoded while ranks agreed
            self.collective.send(self._encode(peer) if row is None else row, peer, stage)

    def _encode_first(self) -> None:
        """Encode the first row while ranks agree, unless it rides along."""
        if not self._rides_along:
            self._prepare_once()
            self._first_row = self._encode(self.collective.targets[0])

    def _encode(self, peer: int) -> Tensor:
        """The row for a peer."""
        row = self.segments[0].row_in_memory(peer) if self._from_memory else None
        if row is not None:
            return row
        out = self.collective.next_row(self.sizes[peer])
        for segment, row in zip(self.segments, self._rows(out, peer), strict=True):
            segment.encode(self.rank, peer, row)
        return out

    def _rows(self, data: Tensor, peer: int) -> Sequence[Tensor]:
        """What each segment has of the part of `peer`: `data` is a row, or several [count, bytes]."""
        if len(self.segments) == 1:
            return (data,)
        return torch.split(data, [segment.sizes[peer] for segment in self.segments], -1)


def reduce(collective: Collective, chunks: Sequence[Chunk]) -> None:
    """Reduce a tensor that is cut into these chunks."""
    collective.reserve(max(max(chunk.sizes) for chunk in chunks))
    if len(chunks) > 1:
        chunks[0].following = chunks[1]
    run(chunks)
