"""Where gradients lie in the chunks that are reduced. It depends on the parameter and the number of ranks alone.

A parameter's gradient is seen as a matrix with one row per rank, its owner: rank r owns elements r*part to (r+1)*part,
where `part` is a multiple of `UNIT`. Zeros fill the last rows. The columns are cut into sections of a fixed size. A
`ChunkLayout` is some sections side by side: row r of a chunk is what rank r owns of it.

So neither the blocks of a codec nor the owner of an element depend on which parameters share a bucket. DDP fills one
bucket in its first iteration and several later; a run that is resumed gives the same bits as one that was not stopped.

DDP's buckets hold gradients end to end, to be gathered into that matrix. FSDP2's buffers are that matrix already
(`sharded`): offsets are then columns of it, and torch has settled each `part`.

Where ranks share hosts, the rows of one place on every host follow each other: with H hosts, rows place*H to
(place+1)*H. What a host sums for a place is thus a matrix of H rows, to be reduced between hosts (`share`).

For exempt parameters, which travel without loss, the result does not depend on the owner. They are laid end to end.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.errors import CollectiveError

UNIT = 128
"""A part is a multiple of so many elements: whole blocks of the usual codecs, and aligned rows."""

SECTION = 1 << 19
"""Elements of a section, at most."""

CHUNK, CHUNK_COLUMNS = 1 << 21, 1 << 16
"""Elements of a chunk, about; with more than 32 ranks, as many as make so many columns, since each row is a message: 33
KB in int4, which take a link of 1 Gbit/s 0.28 ms and the processor about 0.13 (bench/results/messages.md). It bounds
the memory in which gradients are put side by side: a few times this, or the bucket."""


@dataclass(frozen=True)
class Section:
    """Some columns of a parameter's gradient."""

    name: str
    numel: int
    """Elements of the whole parameter."""
    ranks: int
    part: int
    """Columns of the whole parameter."""
    start: int
    columns: int
    width: int
    """Columns of all sections of the parameter but the last."""

    def all(self) -> list[Section]:
        """All sections of the parameter, this one among them."""
        starts = range(0, self.part, self.width)
        return [replace(self, start=start, columns=min(self.width, self.part - start)) for start in starts]

    def share(self, place: int, hosts: int) -> Section:
        """The rows that belong to one place on every host: `hosts` of them, one after the other."""
        numel = self.numel - place * hosts * self.part
        return replace(self, numel=max(0, min(numel, hosts * self.part)), ranks=hosts)

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
        """Its elements in the flat parameter or gradient."""
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


def equal_part(numel: int, ranks: int) -> int:
    """A part of so many elements for each rank, padding included."""
    return -(-numel // (ranks * UNIT)) * UNIT


def is_worth_rows(numel: int, ranks: int) -> bool:
    """Whether a parameter is large enough to be cut in rows; a smaller one would be mostly padding."""
    return numel >= UNIT * ranks


def sections_of(name: str, numel: int, ranks: int, part: int = 0) -> list[Section]:
    """All sections of a parameter; `part` is how much of it a rank owns, where that is settled already."""
    part = part or equal_part(numel, ranks)
    width = max(1, SECTION // (ranks * UNIT)) * UNIT
    return Section(name, numel, ranks, part, 0, min(width, part), width).all()


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient in a bucket: `offset` is where it starts, in elements, or in columns where sharded."""

    name: str
    offset: int
    numel: int
    exempt: bool
    part: int = 0
    """Where sharded: how many columns it has, padding included."""


class Place(NamedTuple):
    """Where elements of a section are: in the bucket, and in the matrix of the chunk."""

    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    row: int
    column: int


@dataclass(eq=False)
class ChunkLayout:
    """What is reduced at once: sections side by side, and runs (offset, length) of exempt elements, or columns."""

    sections: list[tuple[Section, int]] = field(default_factory=list)
    """Each with the offset of its parameter in the bucket."""
    exempt: list[tuple[int, int]] = field(default_factory=list)
    share: ChunkLayout | None = None
    """Where ranks share hosts: what the place of this rank has of it."""

    def share_out(self, place: int, places: int, hosts: int) -> None:
        """Set `share`: rows of sections, and an equal part of the exempt elements."""
        exempt = [(0, equal_part(self.exempt_numel, places))] if self.exempt else []
        self.share = ChunkLayout([(section.share(place, hosts), 0) for section, _ in self.sections], exempt)

    @property
    def columns(self) -> int:
        return sum(section.columns for section, _ in self.sections)

    @property
    def exempt_numel(self) -> int:
        return sum(numel for _, numel in self.exempt)

    @property
    def ranks(self) -> int:
        return self.sections[0][0].ranks if self.sections else 0

    def spans(self) -> Iterator[tuple[Section, int, slice]]:
        """Each section, the offset of its parameter, and its columns in the chunk."""
        start = 0
        for section, offset in self.sections:
            yield section, offset, slice(start, start + section.columns)
            start += section.columns

    def aligned_runs(self) -> list[slice]:
        """Its columns, in as few runs as let every section begin a multiple of `UNIT` after the begin of a run."""
        runs: list[slice] = []
        for _, _, span in self.spans():
            if runs and (span.start - runs[-1].start) % UNIT == 0:
                runs[-1] = slice(runs[-1].start, span.stop)
            else:
                runs.append(span)
        return runs

    @functools.cached_property
    def places(self) -> list[Place]:
        """Where all elements of sections are, in order: what `Section.elements` and `Section.places` say, at once."""
        places = []
        for section, offset, span in self.spans():
            rows, first = section.whole_rows, offset + section.start
            if rows:
                places.append(Place((rows, section.columns), first, (section.part, 1), 0, span.start))
            if section.rest:
                places.append(Place((section.rest,), first + rows * section.part, (1,), rows, span.start))
        return places

    @functools.cached_property
    def _padded(self) -> list[tuple[Section, slice]]:
        return [(section, span) for section, _, span in self.spans() if section.whole_rows < section.ranks]

    def padding(self, matrix: Tensor) -> list[Tensor]:
        """What no element of a gradient fills of a chunk's matrix [ranks, columns]."""
        return [view for section, span in self._padded for view in section.padding(matrix[:, span])]

    def padding_of(self, rank: int, owned: Tensor) -> list[Tensor]:
        """The same of the row that `rank` owns [columns]."""
        return [owned[span][section.owned(rank) :] for section, span in self._padded]


Cut = Callable[[bool], list[ChunkLayout]]
"""`cut(all_exempt)`: how a bucket is cut into chunks, as it is or with all of its parameters exempt."""


def elements_at_once(ranks: int) -> int:
    """How many elements a chunk may have."""
    return max(CHUNK, CHUNK_COLUMNS * ranks)


def lay_out(
    gradients: Iterable[Gradient], ranks: int, *, sharded: bool = False, at_once: bool = False
) -> list[ChunkLayout]:
    """The chunks of a bucket, each as full as it may be; `at_once` makes it one."""
    most = (1 << 62) if at_once else elements_at_once(ranks)
    chunks, size = [ChunkLayout()], 0

    def room_for(numel: int) -> ChunkLayout:
        nonlocal size
        if size and size + numel > most:
            chunks.append(ChunkLayout())
            size = 0
        size += numel
        return chunks[-1]

    unit = ranks if sharded else 1
    width = max(1, elements_at_once(ranks) // unit)
    in_order = gradients if sharded else sorted(gradients, key=lambda gradient: not gradient.exempt)
    for gradient in in_order:
        if gradient.exempt:
            length = gradient.part if sharded else gradient.numel
            for start in range(0, length, width):
                count = min(width, length - start)
                room_for(count * unit).exempt.append((gradient.offset + start, count))
        else:
            for section in sections_of(gradient.name, gradient.numel, ranks, gradient.part):
                room_for(section.columns * ranks).sections.append((section, gradient.offset))
    return chunks


def check_cover(gradients: Sequence[Gradient], total: int) -> None:
    """Raise unless these gradients are all that a bucket of `total` elements holds: nothing may go unreduced."""
    end = 0
    for gradient in sorted(gradients, key=lambda gradient: (gradient.offset, gradient.numel)):
        if gradient.offset != end:
            raise CollectiveError(
                f"bucket: {gradient.name} starts at element {gradient.offset}, and what is before it ends at {end}. "
                f"Parameters must lie side by side: torch {torch.__version__} fills its buckets in a way that this "
                "narrowcast does not know. Update narrowcast, or leave this model uncompressed."
            )
        end += gradient.numel
    if end != total:
        names = ", ".join(gradient.name for gradient in gradients[:3]) + ("..." if len(gradients) > 3 else "")
        raise CollectiveError(
            f"bucket: holds {total} elements, and its parameters ({names}) have {end}. The rest would not be averaged: "
            f"torch {torch.__version__} fills its buckets in a way that this narrowcast does not know. Update "
            "narrowcast, or leave this model uncompressed."
        )
