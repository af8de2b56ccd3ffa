"""How a row is cut into tiles, for the Triton kernels.

Full tiles run without masks; a last one that is not full runs in a launch of its own when the row is long, else all
run masked. Sizes of tiles are fixed (`TILES`): nothing is tuned when a user calls, so that the first call compiles
and does no more. bench/gpu.py --sweep is where the sizes come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from narrowcast.kernels.layout import Format, Scale, layout
from narrowcast.kernels.triton.groups import group


class Tile(NamedTuple):
    """Elements that one program takes, and the warps it runs on."""

    elements: int
    warps: int


TILES: dict[tuple[str, int], Tile] = {
    ("encode", 32): Tile(2048, 4),
    ("decode", 32): Tile(1024, 4),
    ("adamw", 32): Tile(2048, 4),
    ("decode_sum_encode", 32): Tile(2048, 4),
    ("decode_sum_encode", 8): Tile(2048, 4),
    ("decode_sum_encode of integers", 8): Tile(16384, 8),
    ("decode_sum_encode", 4): Tile(2048, 2),
    ("decode_sum_encode of integers", 4): Tile(1024, 1),
}
"""Per operation and bits per code, at most so many; bench/gpu.py --sweep tries others."""

BYTEWISE = 0b01000100
"""Which ranks of every eight a sum over 4-bit integers reads by `words.load_bytewise`, as bits. On an H200 these
two took a reduction of eight rows from 83% of a copy to 88% (bench/gpu.py --variants).
"""

ONE_PASS = 8192
"""Blocks up to this size are measured and encoded by one program; larger ones take two passes over the input."""

SPLIT = 16
"""Rows of at least so many full tiles get a launch without masks."""


class Cut(NamedTuple):
    """How a row is cut into tiles."""

    groups: int
    """Blocks per tile; 1 where a tile is a chunk of a block."""
    block: int
    width: int
    chunked: bool
    chunks: int
    tiles: int
    full: int
    """Leading tiles that need no mask."""
    align: int
    """A power of two that divides every tile's first element."""
    edge: int
    """A power of two that divides every tile's number of elements."""

    def words(self, bits: int) -> bool:
        """Whether the codes of every tile start at a 32-bit word."""
        whole = bits in (1, 2, 4, 8) and self.width * bits >= 32 and self.align * bits % 32 == 0
        return whole and self.block == self.width


@lru_cache(maxsize=4096)
def cut(format: Format, numel: int, elements: int, one_pass: int) -> Cut:
    """Cut a row of `numel` elements into tiles of about `elements`."""
    where = layout(format, numel)
    size = elements if format.scale == Scale.NONE else where.block_size
    count = -(-numel // size)
    size = min(size, numel)
    if format.scale != Scale.NONE and size > one_pass:
        chunks = -(-size // elements)
        starts = elements if count == 1 else math.gcd(elements, size)
        even = size % elements == 0 and numel % size == 0
        full = count * chunks if even else numel // elements if count == 1 else 0
        edge = math.gcd(128, elements, numel, size)
        return Cut(1, elements, elements, True, chunks, count * chunks, full, math.gcd(128, starts), edge)
    width = _power_of_two(max(size, 8))
    block = width if count == 1 else size
    groups = min(max(elements // width, 1), _power_of_two(count))
    tile = groups * block
    full = numel // tile if block == width else 0
    align = math.gcd(128, tile)
    return Cut(groups, block, width, False, 1, -(-count // groups), full, align, math.gcd(align, numel))


def launches(tiles: Cut) -> Iterator[dict[str, Any]]:
    """The parts of a grid: all tiles at once, or the full ones without masks and then the rest."""
    if tiles.full == tiles.tiles:
        parts = [(0, tiles.tiles, False)]
    elif tiles.full >= SPLIT:
        parts = [(0, tiles.full, False), (tiles.full, tiles.tiles, True)]
    else:
        parts = [(0, tiles.tiles, True)]
    for start, stop, masked in parts:
        shape = {"groups": tiles.groups, "block": tiles.block, "width": tiles.width, "chunked": tiles.chunked}
        tile = group(**shape, masked=masked, align=tiles.align, edge=tiles.edge)
        yield {"first_tile": start, "tiles": stop - start, "TILE": tile}


def tile_for(operation: str, format: Format) -> Tile:
    """The tile of an operation on codes of so many bits: the entry of the fewest bits that are enough."""
    if operation == "decode_sum_encode" and format.signed_scale and format.bits in (4, 8):
        operation = "decode_sum_encode of integers"
    return TILES[operation, min(wide for name, wide in TILES if name == operation and wide >= format.bits)]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
