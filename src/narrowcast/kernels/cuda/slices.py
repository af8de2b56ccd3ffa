"""How slices.cu divides a product with some tens of rows of x.

Blocks keep slices of x's columns in shared memory. Where x has more slices than one, their sums lie in fp32 between two
kernels, and total.cu adds them up in order: the same call gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from narrowcast.kernels.cuda.formats import BYTES, INT4, PAIRS, TABLE

WIDEST = 64
"""The most rows of x in one launch."""

PARTS = (1, 2, 3, 4, 6, 8, 11, 12, 16, 24, 32, 48, 64)
"""Into how many slices x may be cut; up to 16 were measured, more are for longer rows."""


class Slices(NamedTuple):
    """How slices.cu divides the work: macros, grid, threads, shared memory, and slices of x."""

    defines: tuple[tuple[str, int], ...]
    grid: int
    threads: int
    shared: int
    parts: int


def fits(codes: int, block: int) -> bool:
    """Whether 64 bytes of a row are a part of one block, or a few blocks of at least 32 elements."""
    chunk = 128 if codes in (INT4, PAIRS) else 64
    return block % chunk == 0 or (block >= 32 and chunk % block == 0)


def divide(
    common: dict[str, int],
    team: int,
    tiles: int,
    tall: int,
    warps: int,
    stages: int,
    parts: int,
    n: int,
    k: int,
    processors: int,
    room: int,
) -> Slices | None:
    """A division into these parts, or fewer where x has not so many; None if shared memory has no room for it."""
    codes, block = common["CODES"], common["BLOCK"]
    chunk = 128 if codes in (INT4, PAIRS) else 64
    chunks = -(-k // chunk)
    per = -(-chunks // parts)
    parts = -(-chunks // per)
    shared = per * chunk * 2 * 8 * tiles + warps * 2 * tall * 512 * (stages + (1 if block else 0))  # x, codes, scales
    if shared + (TABLE if codes in (BYTES, PAIRS) else 0) > room:
        return None
    columns = min(max(1, processors // parts), -(-n // (16 * tall * team)))
    shape = {"TEAM": team, "TILES": tiles, "TALL": tall, "KS": warps, "STAGES": stages}
    defines = common | shape | {"SPLIT": int(parts > 1), "WHOLE": int(k % chunk == 0)}
    return Slices(tuple(defines.items()), columns * parts, 32 * warps, shared, parts)


@cache
def choose_slices(
    codes: int,
    block: int,
    scale: int,
    batch: int,
    n: int,
    k: int,
    kind: int,
    bias: int,
    processors: int,
    room: int,
    hopper: bool,
) -> Slices | None:
    """How a multiplication of these sizes is divided, or None if slices.cu is not made for it."""
    if kind == 0 or not fits(codes, block):
        return None
    common = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": scale, "BLOCK": block, "UNROLL": 1}
    candidates: list[Slices] = []
    for shape in _shapes(codes, block, batch, hopper):
        ways = [divide(common, *shape, 3, parts, n, k, processors, room) for parts in PARTS]
        # What the sweep tried: as few slices as shared memory allows, and a few more.
        candidates += [slices for slices in dict.fromkeys(ways) if slices is not None][:3]
    return min(candidates, key=lambda slices: _cost(slices, batch, n, k)) if candidates else None


def _shapes(codes: int, block: int, batch: int, hopper: bool) -> list[tuple[int, int, int, int]]:
    """TEAM, TILES, TALL and KS to choose from: the best of bench/gpu_linear.py --sweep-slices on an H200.

    With sums of blocks beside the totals, sixteen warps have too few registers for 64 rows of x; with few rows of x,
    eight warps of a team leave room for a second block on a processor, while others have none.
    """
    if hopper and batch > 32:
        return [(4, 8, 1, warps) for warps in (8, 12, 16) if warps < 16 or block == 0]
    if hopper and batch > 16 and (block == 0 or codes in (BYTES, PAIRS)):
        return [(4, 4, 1, warps) for warps in (12, 16)]
    return [(1, -(-batch // 8), 2, warps) for warps in (16, 8) if warps == 8 or batch <= 16]


def _cost(slices: Slices, batch: int, n: int, k: int) -> float:
    """About how long it takes: the chunks that follow each other in a warp, longer the more warps share a processor,
    and the sums of slices on their way to memory and back. Over the same sweep, what it picks takes 1.5% longer than
    the best that was tried.
    """
    its = dict(slices.defines)
    length, weight = (128, 2) if its["CODES"] in (INT4, PAIRS) else (64, 1)
    tiles, columns = -(-n // (16 * its["TALL"] * its["TEAM"])), slices.grid // slices.parts
    teams = its["KS"] // its["TEAM"]
    busy = min(teams, -(-tiles // columns)) * its["TEAM"] / 4
    chunks = -(-tiles // (columns * teams)) * -(-k // (length * slices.parts))
    sums = slices.parts * n * batch * 7.4e-6 if slices.parts > 1 else 0.0
    return chunks * weight * (0.8 + 0.3 * busy) + sums
