"""How ring.cu divides a product with one row of x."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from narrowcast.kernels.cuda.formats import INT4, INT8, PAIRS, block_of, codes_of
from narrowcast.kernels.layout import Element, Format

E4M3 = 4
"""`CODES` of fp8_e4m3 without a table, beside those of formats.py."""

TABLE = 64 << 10
"""Shared memory of a table of PAIRS; x lies between its entries."""

TALLEST = 256
"""Rows of W that a block may have: their sums take shared memory."""

PROCESSOR = 228 << 10
"""Shared memory of a processor of Hopper, of which each block takes 1 KiB more than it asks for."""


class Ring(NamedTuple):
    """How ring.cu divides the work: macros, grid, threads and shared memory."""

    defines: tuple[tuple[str, int], ...]
    grid: int
    threads: int
    shared: int


def direct_codes(format: Format) -> int | None:
    """`CODES` of ring.cu, or None."""
    if format.element == Element.E4M3:
        return E4M3
    codes = codes_of(format)
    return codes if codes in (INT8, INT4, PAIRS) else None


@cache
def choose_ring(format: Format, n: int, k: int, stride: int, kind: int, bias: int, processors: int) -> Ring | None:
    """How a product of these sizes is divided, or None: the kernel is not made for it."""
    codes = direct_codes(format)
    if codes is None or kind == 0:
        return None
    return divide(codes, format, n, k, stride, kind, bias, processors, 16, 0, 1)


def divide(
    codes: int,
    format: Format,
    n: int,
    k: int,
    stride: int,
    kind: int,
    bias: int,
    processors: int,
    parts: int,
    stages: int,
    resident: int,
) -> Ring | None:
    """A division; with 0 stages, as many as fit."""
    block = block_of(format, k)
    chunk = 128 if codes in (INT4, PAIRS) else 64
    if block and block % chunk and chunk != 2 * block:
        return None
    pairs, rest = divmod(k, 2 * chunk)
    if rest or pairs % parts:
        return None
    grid = min(n, processors * -(-n // (processors * TALLEST)))
    tiles = -(-(-(-n // grid)) // 8)
    fixed = (TABLE if codes == PAIRS else 0) + tiles * 32 * parts
    room = PROCESSOR // resident - 1024 - fixed
    tile = 8 * stride + 16
    stages = min(stages or room // tile, tiles)
    if stages < min(2, tiles) or stages * tile > room:
        return None
    defines = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": int(format.scale), "BLOCK": block, "UNROLL": 1}
    defines |= {"EACH": pairs // parts, "STAGES": stages, "KS": parts, "RESIDENT": resident, "RING": 1}
    return Ring(tuple(defines.items()), grid, 32 * parts + 32, fixed + stages * tile)

