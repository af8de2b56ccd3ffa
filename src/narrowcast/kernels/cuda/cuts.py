"""How dot.cu and tile.cu divide a product with a few rows of x.

The constants are the best of bench/gpu_linear.py --sweep on an H200.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from narrowcast.kernels.cuda.formats import BYTES, INT4, INT8, PAIRS, TABLE, block_of
from narrowcast.kernels.layout import Format

LARGE = 60_000_000
"""Weights that make a layer large: most of its time is reading them."""

HUGE = 100_000_000
"""Weights of a layer whose time is all reading: an output matrix."""

TILED = {8: 16, 4: 32}
"""The largest batch that tile.cu takes at once, by bits: 4-bit codes go twice."""

SHARED, SPARE = 200 << 10, 1 << 10
"""Shared memory that a block asks for at most, and what it leaves of that which the GPU gives a block: a consumer card
has 99 KB, an A100 163."""


class Cut(NamedTuple):
    """How a kernel of cuda/ divides the work: macros, grid, threads and shared memory."""

    name: str
    defines: tuple[tuple[str, int], ...]
    grid: int
    threads: int
    shared: int


@cache
def choose_cut(
    codes: int,
    format: Format,
    batch: int,
    n: int,
    k: int,
    kind: int,
    bias: int,
    processors: int,
    room: int = SHARED + SPARE,
) -> Cut | None:
    """How a multiplication of these sizes is cut, or None: neither kernel is made for it.

    `room` is the shared memory that the GPU gives a block.
    """
    block, room = block_of(format, k), min(SHARED, room - SPARE)
    common = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": int(format.scale), "BLOCK": block, "UNROLL": 1}
    if codes == INT8 and batch == 1 and block % 16 == 0 and -(-k // 512) * 2048 <= room:
        rows, teams, parts, waves = (2, 8, 2, 1 << 20) if n * k < LARGE else (4, 4, 2, 8)
        defines = common | {"ROWS": rows, "TEAMS": teams, "KS": parts, "RESIDENT": 1024}
        grid = min(processors * waves, -(-n // (rows * teams)))
        return Cut("dot", tuple(defines.items()), grid, 32 * teams * parts, -(-k // 512) * 2048)
    if kind == 0 or batch > max(TILED.values()):
        return None
    tiles = 0 if batch == 1 else next(count for count in (1, 2, 4) if batch <= 8 * count)
    wide = next((width for width in (16, 8, 4) if fits(codes, block, tiles, width)), None)
    if wide is None:
        return None
    table, small = codes in (BYTES, PAIRS), n * k < LARGE
    parts, tall, resident = 16, 1, 1024
    many = tiles == 0 and n > 32 * processors and (codes == PAIRS or (codes == INT4 and block >= 128))
    if many:
        parts, common["UNROLL"], resident = (
            (8, 2, 768) if table or small else (4, 4, 512) if n * k >= HUGE else (4, 2, 1024)
        )
    elif not small and tiles == 0:
        parts = 4 if not table else 16 if n * k < HUGE else 8
        common["UNROLL"] = 2 if codes == INT4 and block >= 128 else 1
    elif tiles == 4:
        parts, tall, resident = 4, 2, 512
    elif not small:
        parts, tall, resident = (8, 1, 1024) if tiles == 1 else (8, 2, 512)
    walking = table or (tiles == 2 and tall == 2) or (many and resident < 1024)
    grid = processors * resident // (32 * parts) if walking else n
    return tile_cut(common, codes, wide, tiles, tall, parts, resident, n, k, grid, room)


def tile_cut(
    common: dict[str, int],
    codes: int,
    wide: int,
    tiles: int,
    tall: int,
    parts: int,
    resident: int,
    n: int,
    k: int,
    grid: int,
    room: int = SHARED,
) -> Cut | None:
    """A cut for `tile` of cuda/."""
    defines = common | {"WIDE": wide, "TILES": tiles, "TALL": tall, "KS": parts, "RESIDENT": resident}
    chunk = 4 * wide * (2 if codes in (INT4, PAIRS) else 1)
    shared = 2 * 4 * parts * 16 * tall * max(1, 8 * tiles)  # sums
    shared += 0 if tiles else (-(-k // chunk) + 1) * chunk * 2  # x
    held = TABLE if codes in (BYTES, PAIRS) else 0
    if shared + held > room:
        return None
    return Cut("tile", tuple(defines.items()), min(grid, -(-n // (16 * tall))), 32 * parts, shared)


def fits(codes: int, block: int, tiles: int, wide: int) -> bool:
    """Whether a chunk of four lanes of `wide` bytes is a part of one block, or, for one column, two or four blocks."""
    chunk = 4 * wide * (2 if codes in (INT4, PAIRS) else 1)
    if chunk < 32:
        return False
    return block == 0 or block % chunk == 0 or (tiles == 0 and chunk in (2 * block, 4 * block))
