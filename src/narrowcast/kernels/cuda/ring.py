"""How ring.cu divides a product with one row of x."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from narrowcast.kernels.cuda.formats import INT4, INT8, PAIRS, block_of, codes_of
from narrowcast.kernels.layout import SCALE_BYTES, Element, Format, Scale

E4M3 = 4
"""`CODES` of fp8_e4m3 without a table, beside those of formats.py."""

TABLE = 64 << 10
"""Shared memory of a table of PAIRS; x lies between its entries."""

TALLEST = 256
"""Rows of W that a block may have: their sums take shared memory."""

PROCESSOR = 228 << 10
"""Shared memory of a processor of Hopper, of which each block takes 1 KiB more than it asks for."""


class Ring(NamedTuple):
    """How ring.cu divides the work: macros, grid, threads, shared memory, and rows of W to a block."""

    defines: tuple[tuple[str, int], ...]
    grid: int
    threads: int
    shared: int
    height: int


def direct_codes(format: Format) -> int | None:
    """`CODES` of ring.cu, or None."""
    if format.element == Element.E4M3:
        return E4M3
    codes = codes_of(format)
    return codes if codes in (INT8, INT4, PAIRS) else None


@cache
def choose_ring(format: Format, n: int, k: int, kind: int, bias: int, processors: int) -> Ring | None:
    """How a product of these sizes is divided, or None: the kernel is not made for it."""
    codes = direct_codes(format)
    if codes is None or kind == 0:
        return None
    return divide(codes, format, n, k, kind, bias, processors, 16, 2048, 0, 2)


def divide(
    codes: int,
    format: Format,
    n: int,
    k: int,
    kind: int,
    bias: int,
    processors: int,
    parts: int,
    span: int,
    stages: int,
    resident: int,
) -> Ring | None:
    """A division; with 0 stages, as many as fit."""
    block, scale = block_of(format, k), Scale(format.scale)
    if not fits(codes, block, SCALE_BYTES[scale], span, k):
        return None
    height = rows_of_block(n, processors)
    narrow = codes in (INT4, PAIRS)
    line = span // 2 if narrow else span
    scales = -(-(-(-span // block) * SCALE_BYTES[scale]) // 16) * 16 if block else 0
    stage = 16 * ((line + scales + 63) // 128 * 128 + 64)
    chunk = 128 if narrow else 64
    x = (-(-k // chunk) + 1) * chunk * 2
    if codes == PAIRS and x > TABLE // 2:
        return None
    fixed = (TABLE if codes == PAIRS else x) + -(-height // 16) * 64 * parts + 16 * 16
    stages = stages or (PROCESSOR // resident - 1024 - fixed) // stage
    if stages < 2 or fixed + stages * stage > PROCESSOR - 1024:
        return None
    defines = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": int(scale), "BLOCK": block, "UNROLL": 1}
    defines |= {"SPAN": span, "STAGES": stages, "KS": parts, "RESIDENT": resident}
    threads = 32 * parts + 32
    return Ring(tuple(defines.items()), -(-n // height), threads, fixed + stages * stage, height)


def rows_of_block(n: int, processors: int) -> int:
    """Rows of W for each block, so that all processors have as many."""
    waves = -(-n // (processors * TALLEST))
    return -(-n // (processors * waves))


def fits(codes: int, block: int, scale_bytes: int, span: int, k: int) -> bool:
    """Whether chunks are parts of blocks, or two or four of them, and spans, where there are several, whole blocks."""
    chunk = 128 if codes in (INT4, PAIRS) else 64
    if block and block % chunk and chunk not in (2 * block, 4 * block):
        return False
    return not block or k <= span or (span % block == 0 and span // block * scale_bytes % 16 == 0)
