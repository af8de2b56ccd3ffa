"""Tensors that are larger than memory: encoded and decoded a tile at a time.

The bytes are those of `Codec.encode`, or `encode_searched`, for the whole tensor. Memory holds one tile of about
`tiles.TILE` elements, and the scales of one row. Rows are independent, so a tile is several rows. A row that is
longer than a tile is cut
between blocks: its codes come first and are passed on at once, its scales follow behind the last of them. Two kinds of
codecs read more at once: with `block=row`, a whole row, which one scale belongs to; with stochastic rounding, the
whole tensor, since random numbers depend on the place in it.

The caller passes a function that reads elements, or bytes, of the rows laid end to end. Nothing here knows files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from narrowcast.codecs import fields, tiles
from narrowcast.codecs.base import Codec
from narrowcast.kernels.reference.search import GAIN

Read = Callable[[int, int], Tensor]
"""Of (start, stop): these elements or bytes, as a tensor of one dimension."""


def encode_tiles(
    codec: Codec, rows: int, numel: int, read: Read, seed: int = 0, *, searched: bool = False
) -> Iterator[Tensor]:
    """The bytes of `rows` rows of `numel` elements each, in order: of `encode`, or of a search."""
    if codec.stochastic and not searched:
        if rows * numel:
            yield codec.encode(read(0, rows * numel).view(rows, numel), seed).view(-1)
    elif _cut_rows(codec, numel):
        for row in range(rows):
            yield from _encode_row(codec, numel, _from(read, row * numel), searched)
    else:
        for start, stop in tiles.tiles(rows, numel):
            tile = read(start * numel, stop * numel).view(stop - start, numel)
            yield (codec.encode_searched(tile, gain=GAIN) if searched else codec.encode(tile)).view(-1)


def decode_tiles(codec: Codec, rows: int, numel: int, read: Read, dtype: torch.dtype) -> Iterator[Tensor]:
    """The elements of `rows` encoded rows, in order. `read` reads their bytes."""
    size = codec.row_bytes(numel)
    if _cut_rows(codec, numel):
        for row in range(rows):
            for start, stop in _cuts(codec, numel):
                yield codec.decode(
                    fields.read_part(codec, numel, start, stop, _from(read, row * size)), stop - start, dtype
                )
    else:
        for start, stop in tiles.tiles(rows, numel):
            yield codec.decode(read(start * size, stop * size).view(stop - start, size), numel, dtype).view(-1)


def _cut_rows(codec: Codec, numel: int) -> bool:
    return numel > tiles.TILE and codec.block != "row"


def _cuts(codec: Codec, numel: int) -> Iterator[tuple[int, int]]:
    """The tiles of one long row. Each begins with a block, and at a whole byte of codes."""
    block = codec.block if isinstance(codec.block, int) else 8
    step = max(tiles.TILE // block, 1) * block
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def _encode_row(codec: Codec, numel: int, read: Read, searched: bool) -> Iterator[Tensor]:
    end, *behind = fields.new_end(codec, numel)
    for start, stop in _cuts(codec, numel):
        part = read(start, stop)
        row = codec.encode_searched(part, gain=GAIN) if searched else codec.encode(part)
        codes, *parts = fields.regions(codec, row, stop - start)
        yield codes
        for place, (rest, part) in enumerate(zip(behind, parts, strict=True)):
            rest[: len(part)] = part
            behind[place] = rest[len(part) :]
    yield end


def _from(read: Read, first: int) -> Read:
    return lambda start, stop: read(first + start, first + stop)
