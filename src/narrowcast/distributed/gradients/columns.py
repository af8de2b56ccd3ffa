"""Where gradients lie in the rows that are reduced: a matter of the parameter and the number of ranks alone.

A parameter's gradient is seen as a matrix with a row per rank, its owner: rank r owns elements r*part to (r+1)*part,
where `part` is a multiple of `UNIT`, and what the last rows lack is zeros. Columns are cut into chunks of a fixed size.
A bucket is a sequence of chunks, a `PieceLayout` some of them side by side: row r of a piece is what rank r owns of it.

So neither the blocks of a codec nor the owner of an element depend on which parameters share a bucket. DDP fills one
bucket in its first iteration and several later; a run that is resumed gives the same bits as one that was not stopped.

Exempt parameters are laid one after the other, without rows: they travel without loss, so the result does not depend on
the owner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.errors import CollectiveError

UNIT = 128
"""Columns of a parameter are a multiple of this: whole blocks of the usual codecs, and aligned rows."""

CHUNK = 1 << 19
"""Elements of a chunk, at most."""

PIECE, PIECE_COLUMNS = 1 << 21, 1 << 14
"""Elements of a piece, about; with many ranks, as many as make so many columns, since each row is a message. It bounds
the memory in which gradients are put side by side: a few times this."""


@dataclass(frozen=True)
class Chunk:
    """Some columns of a parameter's gradient."""

    name: str
    numel: int
    """Elements of the whole parameter."""
    ranks: int
    part: int
    """Columns of the whole parameter."""
    start: int
    columns: int

    @property
    def whole_rows(self) -> int:
        """How many rows have all their columns; the next one may have some, those after it have none."""
        return min(self.ranks, max(0, (self.numel - self.start - self.columns) // self.part + 1))

    @property
    def rest(self) -> int:
        """How many columns the row after the whole ones has."""
        if self.whole_rows == self.ranks:
            return 0
        return max(0, min(self.columns, self.numel - self.whole_rows * self.part - self.start))

    @property
    def key(self) -> int:
        """A number for it that is the same in every run."""
        named = f"{self.start} {self.name}".encode()
        return int.from_bytes(hashlib.blake2b(named, digest_size=7).digest(), "little")

    def elements(self, flat: Tensor) -> Iterator[Tensor]:
        """The chunk's elements in the flat parameter or gradient."""
        rows, first = self.whole_rows, flat.storage_offset() + self.start
        if rows:
            yield flat.as_strided((rows, self.columns), (self.part, 1), first)
        if self.rest:
            start = rows * self.part + self.start
            yield flat[start : start + self.rest]

    def places(self, matrix: Tensor) -> Iterator[Tensor]:
        """Where `elements` lie in a matrix [ranks, columns]."""
        rows = self.whole_rows
        if rows:
            yield matrix[:rows]
        if self.rest:
            yield matrix[rows, : self.rest]

    def padding(self, matrix: Tensor) -> Iterator[Tensor]:
        """The rest of a matrix [ranks, columns]."""
        rows = self.whole_rows
        if rows < self.ranks:
            yield matrix[rows, self.rest :]
            yield matrix[rows + 1 :]

    def owned(self, rank: int) -> int:
        """How many elements `rank` owns."""
        return self.columns if rank < self.whole_rows else self.rest if rank == self.whole_rows else 0


def chunk_by_chunk(codec: Codec) -> bool:
    """Whether each chunk needs rows of its own for its bytes not to depend on its neighbours."""
    return codec.stochastic or codec.block == "row" or (isinstance(codec.block, int) and UNIT % codec.block != 0)


def worth_rows(numel: int, ranks: int) -> bool:
    """Whether a parameter is large enough to be cut in rows; a smaller one would be mostly padding."""
    return numel >= UNIT * ranks


def chunks(name: str, numel: int, ranks: int, part: int = 0) -> list[Chunk]:
    """All chunks of a parameter; `part` is how much of it a rank owns, where that is settled already."""
    part = part or -(-numel // (ranks * UNIT)) * UNIT
    width = max(1, CHUNK // (ranks * UNIT)) * UNIT
    return [Chunk(name, numel, ranks, part, start, min(width, part - start)) for start in range(0, part, width)]


@dataclass
class Entry:
    """A parameter in a bucket: `offset` is where its gradient starts."""

    name: str
    offset: int
    numel: int
    exempt: bool


@dataclass(eq=False)
class PieceLayout:
    """What is reduced in one go: chunks side by side, and runs (offset, numel) of exempt elements."""

    chunks: list[tuple[Chunk, int]] = field(default_factory=list)
    """Each with the offset of its parameter in the bucket."""
    exempt: list[tuple[int, int]] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return sum(chunk.columns for chunk, _ in self.chunks)

    @property
    def exempt_numel(self) -> int:
        return sum(numel for _, numel in self.exempt)

    @property
    def ranks(self) -> int:
        return self.chunks[0][0].ranks if self.chunks else 0

    def spans(self) -> Iterator[tuple[Chunk, int, slice]]:
        """Each chunk, the offset of its parameter, and its columns in the piece."""
        start = 0
        for chunk, offset in self.chunks:
            yield chunk, offset, slice(start, start + chunk.columns)
            start += chunk.columns


def elements_at_once(ranks: int) -> int:
    """How many elements a piece may have."""
    return max(PIECE, PIECE_COLUMNS * ranks)


class Pieces:
    """Piece after piece, each as full as it may be; `at_once` makes it one."""

    def __init__(self, ranks: int, at_once: bool) -> None:
        self.made = [PieceLayout()]
        self._most = (1 << 62) if at_once else elements_at_once(ranks)
        self._size = 0

    def room_for(self, numel: int) -> PieceLayout:
        """The piece that takes the next so many elements."""
        if self._size and self._size + numel > self._most:
            self.made.append(PieceLayout())
            self._size = 0
        self._size += numel
        return self.made[-1]


def check_cover(entries: Sequence[Entry], total: int) -> None:
    """Raise unless these parameters are all that a bucket of `total` elements holds: nothing may go unreduced."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.numel)):
        if entry.offset != end:
            raise CollectiveError(
                f"bucket: {entry.name} starts at element {entry.offset}, and what is before it ends at {end}. "
                f"Parameters must lie side by side: torch {torch.__version__} fills its buckets in a way that this "
                "narrowcast does not know. Update narrowcast, or leave this model uncompressed."
            )
        end += entry.numel
    if end != total:
        names = ", ".join(entry.name for entry in entries[:3]) + ("..." if len(entries) > 3 else "")
        raise CollectiveError(
            f"bucket: holds {total} elements, and its parameters ({names}) have {end}. The rest would not be averaged: "
            f"torch {torch.__version__} fills its buckets in a way that this narrowcast does not know. Update "
            "narrowcast, or leave this model uncompressed."
        )


def lay_out(entries: Iterable[Entry], ranks: int, at_once: bool = False) -> list[PieceLayout]:
    """The pieces of a bucket; `at_once` makes it one."""
    pieces = Pieces(ranks, at_once)
    for entry in sorted(entries, key=lambda entry: not entry.exempt):  # the exempt ones first: they are small
        if entry.exempt:
            for start in range(0, entry.numel, PIECE):
                numel = min(PIECE, entry.numel - start)
                pieces.room_for(numel).exempt.append((entry.offset + start, numel))
        else:
            for chunk in chunks(entry.name, entry.numel, ranks):
                pieces.room_for(chunk.columns * ranks).chunks.append((chunk, entry.offset))
    return pieces.made
