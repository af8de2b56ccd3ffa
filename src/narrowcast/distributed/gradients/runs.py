"""The rows of a chunk: neighbouring columns that are encoded as one."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.codecs import Codec
from narrowcast.distributed.gradients.layout import UNIT, ChunkLayout


@dataclass(frozen=True)
class Run:
    """Neighbouring columns that are encoded as one row."""

    key: int
    columns: slice
    """Where its gradients are: in the matrix of the chunk, or of the call where sharded."""
    places: slice
    """In the matrix of the chunk."""


def runs_of(layout: ChunkLayout, codec: Codec, *, sharded: bool) -> list[Run]:
    """The rows of a chunk: as few as keep each section's bytes independent of its neighbours."""
    alone = codec.stochastic or codec.block == "row" or (isinstance(codec.block, int) and UNIT % codec.block != 0)
    runs: list[Run] = []
    for section, offset, places in layout.spans():
        start = offset + section.start if sharded else places.start
        columns = slice(start, start + section.columns)
        last = runs[-1] if runs and not alone else None
        if last and last.columns.stop == start and (start - last.columns.start) % UNIT == 0:
            runs[-1] = Run(0, slice(last.columns.start, columns.stop), slice(last.places.start, places.stop))
        else:
            runs.append(Run(section.key if alone else 0, columns, places))
    return runs


def exempt_runs(layout: ChunkLayout) -> list[slice]:
    """The exempt elements (or columns) of a chunk, neighbours as one."""
    runs: list[slice] = []
    for offset, count in layout.exempt:
        if runs and runs[-1].stop == offset:
            runs[-1] = slice(runs[-1].start, offset + count)
        else:
            runs.append(slice(offset, offset + count))
    return runs
