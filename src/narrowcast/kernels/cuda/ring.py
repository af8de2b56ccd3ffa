"""How ring.cu divides a product with one row of x.

The divisions are the best of bench/gpu_row.py --sweep on an H200, over layers with rows of 4096 to 8192 elements.
Blocks that leave room for those of the next kernel let it read its weights while this one ends.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from narrowcast.kernels.cuda.formats import INT4, INT8, PAIRS, block_of, codes_of
from narrowcast.kernels.layout import Element, Format, Scale, layout

E4M3 = 4
"""`CODES` of fp8_e4m3 where the GPU converts it, beside those of formats.py."""

TABLE = 64 << 10
"""Shared memory of a table of PAIRS in ring.cu."""

TALLEST = 256
"""Rows of W that a block may have: their sums take shared memory."""

TIMED = range(4096, 8192 + 1)
"""Elements of a row of W with which this was timed."""

HELD = 64
"""Registers that a thread may fill with x."""

PROCESSOR = 228 << 10
"""Shared memory of a processor of Hopper, of which each block takes 1 KiB more than it asks for."""


SLOWER_EARLY = (INT4,)
"""`CODES` that are left to others where weights are read early, as in a decoder. Of products that follow each other at
once all are faster by ring.cu, but a decoder of 7B shapes makes fewer tokens/s with it in int4:block=128, and more in
the others (bench/results/decode-h200.md, which says what is likely behind it)."""


class Ring(NamedTuple):
    """How ring.cu divides the work: macros, grid, threads and shared memory."""

    defines: tuple[tuple[str, int], ...]
    grid: int
    threads: int
    shared: int


class Division(NamedTuple):
    """Warps that multiply; blocks that a processor has room for, and that it gets."""

    parts: int
    resident: int
    blocks: int


def direct_codes(format: Format) -> int | None:
    """`CODES` of ring.cu, or None."""
    if format.element == Element.E4M3:
        return E4M3
    codes = codes_of(format)
    return codes if codes in (INT8, INT4, PAIRS) else None


@cache
def choose_ring(format: Format, n: int, k: int, stride: int, kind: int, bias: int, processors: int) -> Ring | None:
    """How a product is divided, or None: the kernel is not made for it. `stride` is in bytes, from row to row of W."""
    codes, row_bytes = direct_codes(format), layout(format, k).row_bytes
    if codes is None or kind == 0 or k not in TIMED or not row_bytes <= stride <= row_bytes + row_bytes // 8:
        return None  # rows that overlap take more of the ring than it has for a tile
    small = n <= 32 * processors
    first = Division(16 if small and codes == INT4 else 8, 2, 1 if codes == INT4 or (small and codes != PAIRS) else 2)
    rings = (divide(format, n, k, stride, kind, bias, processors, way) for way in (first, Division(16, 1, 1)))
    return next((ring for ring in rings if ring is not None), None)


def divide(
    format: Format, n: int, k: int, stride: int, kind: int, bias: int, processors: int, way: Division, stages: int = 0
) -> Ring | None:
    """The product divided this way, with so many stages or, of 0, as many as fit; None where it cannot be."""
    codes, block = direct_codes(format), block_of(format, k)
    assert codes is not None
    narrow = codes in (INT4, PAIRS)
    chunk = 128 if narrow else 64
    pairs, rest = divmod(k, 2 * chunk)
    one_scale = not block and format.scale != Scale.NONE  # of which dot.cu makes more: bench/results/gpu-linear-h200.md
    if one_scale or (block and block % chunk and chunk != 2 * block) or rest or pairs % way.parts:
        return None
    each = pairs // way.parts
    grid = min(n, processors * way.blocks * -(-n // (processors * way.blocks * TALLEST)))
    tiles = (n + 8 * grid - 1) // (8 * grid)
    fixed = (TABLE if codes == PAIRS else 0) + tiles * 32 * way.parts
    room, tile = PROCESSOR // way.resident - 1024 - fixed, 8 * stride + 16
    stages = min(stages or room // tile, tiles)
    if stages < min(2, tiles) or stages * tile > room or each * (16 if narrow else 8) > HELD:
        return None
    defines = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": int(format.scale), "BLOCK": block, "UNROLL": 1}
    defines |= {"RING": 1, "EACH": each, "STAGES": stages, "KS": way.parts, "RESIDENT": way.resident}
    return Ring(tuple(defines.items()), grid, 32 * way.parts + 32, fixed + stages * tile)
