"""How wide.cu divides a product with many rows of x, on Hopper.

The work is tiles of rows of W and rows of x. What does not fill all processors at the end is divided along k as well:
the sums of such parts lie in fp32 between two kernels, and join.cu adds them up in order, so that the same call gives
the same bits.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

from narrowcast.kernels.cuda.formats import BYTES, INT4, PAIRS, TABLE

MOST_PARTS = 8


class Shape(NamedTuple):
    """Eights of rows of x and sixty-fours of rows of W for a team, elements in a step, steps in a ring, teams."""

    tiles: int
    tall: int
    step: int
    stages: int
    teams: int = 2

    @property
    def width(self) -> int:
        return 8 * self.tiles

    @property
    def height(self) -> int:
        return 64 * self.tall * self.teams

    @property
    def threads(self) -> int:
        return 128 * (self.teams + 1)


SHAPES = {128: (Shape(16, 1, 128, 4), Shape(16, 1, 64, 5)), 256: (Shape(16, 2, 64, 4), Shape(16, 2, 64, 3))}
"""By the largest batch, the first that fits: the best of bench/gpu_wide.py --sweep on an H200, or within 5% of it."""


class Wide(NamedTuple):
    """How wide.cu divides the work: macros, grid and shared memory; the shape, columns of tiles, tiles that are not
    divided along k, and parts of those that are."""

    defines: tuple[tuple[str, int], ...]
    grid: int
    shared: int
    shape: Shape
    columns: int
    whole: int
    parts: int
    tiles: int


def line_bytes(codes: int, step: int) -> int:
    """Bytes of a row of W in a step."""
    return step // 2 if codes in (INT4, PAIRS) else step


def shared_bytes(codes: int, shape: Shape) -> int:
    """Shared memory of a ring, of a tile of results and of two gates for each stage."""
    stage = shape.height * line_bytes(codes, shape.step) + shape.step * shape.width * 2
    return shape.stages * (stage + 16) + shape.width * (shape.height * 2 + 16 * shape.teams)


def divide(
    common: dict[str, int], shape: Shape, whole: int, parts: int, batch: int, n: int, k: int, processors: int, room: int
) -> Wide | None:
    """A division into tiles of this shape, the first `whole` of them not divided along k; None if it cannot be."""
    codes, block = common["CODES"], common["BLOCK"]
    shared, columns = shared_bytes(codes, shape), -(-batch // shape.width)
    held = TABLE if codes in (BYTES, PAIRS) and not common["FP8"] else 0
    steps, tiles = k // shape.step, -(-n // shape.height) * columns
    fits = block % shape.step == 0 or (shape.step % block == 0 and block % 16 == 0)
    if shared + held > room or k % shape.step or not fits or whole > tiles:
        return None
    parts = -(-steps // -(-steps // parts))  # or fewer, where k has not so many steps
    macros = {"TEAM": 4, "TILES": shape.tiles, "TALL": shape.tall, "STEP": shape.step, "STAGES": shape.stages}
    defines = common | macros | {"TEAMS": shape.teams}
    whole = tiles if parts == 1 else whole
    grid = min(processors, whole + (tiles - whole) * parts)
    return Wide(tuple(defines.items()), grid, shared, shape, columns, whole, parts, tiles)


@cache
def choose_wide(
    codes: int,
    block: int,
    scale: int,
    scaling: int,
    fp8: int,
    batch: int,
    n: int,
    k: int,
    kind: int,
    bias: int,
    processors: int,
    room: int,
) -> Wide | None:
    """How a multiplication of these sizes is divided, or None if wide.cu is not made for it."""
    if kind == 0 or n % 8:
        return None
    common = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": scale, "BLOCK": block, "UNROLL": 1, "SCALING": scaling}
    common["FP8"] = fp8
    for shape in SHAPES[min(size for size in SHAPES if batch <= size or size == max(SHAPES))]:
        tiles = -(-n // shape.height) * -(-batch // shape.width)
        every = itertools.product({0, tiles // processors * processors}, range(1, MOST_PARTS + 1))
        ways = [divide(common, shape, whole, parts, batch, n, k, processors, room) for whole, parts in every]
        fitting = [wide for wide in ways if wide is not None]
        if fitting:
            return min(fitting, key=lambda wide: (cost(wide, k), wide))
    return None


def cost(wide: Wide, k: int) -> float:
    """About how many microseconds it takes, to compare parts: rounds of jobs, and sums going to memory and back."""
    shape, divided = wide.shape, wide.tiles - wide.whole
    one = shape.height * shape.width * k / 2.9e6  # of a tile
    jobs = divided * wide.parts
    rounds = -(-wide.whole // wide.grid) + -(-jobs // wide.grid) / wide.parts
    started = -(-wide.whole // wide.grid) + -(-jobs // wide.grid)
    sums = 0.0 if not divided else jobs * shape.width * shape.height * 8 / 4e6 + 2.5
    return rounds * one + 1.5 * started + sums
