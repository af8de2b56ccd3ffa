"""How wide.cu divides a product with many rows of x, on Hopper.

The work is tiles of rows of W and rows of x. What does not fill all processors at the end is divided along k as well:
the sums of such parts lie in fp32 between two kernels, and join.cu adds them up in order, so that the same call gives
the same bits.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

from narrowcast.kernels.cuda.formats import BYTES, INT4, INT8, PAIRS, TABLE

MOST_PARTS = 8


class Shape(NamedTuple):
    """Eights of rows of x, elements of k in a step, and teams, each with 64 rows of W."""

    tiles: int
    step: int
    teams: int

    @property
    def width(self) -> int:
        return 8 * self.tiles

    @property
    def height(self) -> int:
        return 64 * self.teams

    @property
    def threads(self) -> int:
        return 128 * (self.teams + 1)


SHAPES = tuple(Shape(*sizes) for sizes in itertools.product((8, 16, 32), (128, 64), (2, 3)) if sizes[0] * sizes[2] < 96)
"""What to choose from. Three teams have no registers for 256 rows of x; four, or more than 64 rows of W for a team,
were slower (bench/gpu_wide.py --sweep on an H200)."""

TIMES = {
    "int4": (0.54, 0.82, 0.72, 1.08, 1.30),
    "bytes of rows with one scale": (0.59, 0.91, 0.77, 1.15, 1.40),
    "int8, fp8": (0.70, 1.06, 0.91, 1.34, 1.58),
    "halves of 4 bits": (0.73, 0.99, 0.93, 1.23, 1.49),
    "other levels of 4 bits": (0.88, 1.20, 1.12, 1.46, 1.57),
    "other levels of 8 bits": (1.10, 1.40, 1.40, 1.90, 2.00),
}
"""Microseconds that 128 elements of k of a tile take, in the order of TIMED, fitted to a sweep on an H200. Estimates:
other levels of 8 bits; halves and levels of 4 bits with 128 rows of x and two teams; in the last column int4 and bytes,
by what the library's own calls took."""

TIMED = ((8, 2), (8, 3), (16, 2), (16, 3), (32, 2))
"""Eights of rows of x, and teams."""


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


def stage_bytes(codes: int, shape: Shape) -> int:
    """Shared memory of a step's codes and x, and of its two gates."""
    return shape.height * line_bytes(codes, shape.step) + shape.step * shape.width * 2 + 16


def stages_of(codes: int, fp8: int, shape: Shape, room: int) -> int:
    """As many steps as a ring has room for beside a tile of results and a table; up to three of 128 elements, or six
    with 64 rows of x. (With 128 rows a fourth took 2% longer in int4 at 4096x4096.)"""
    table = TABLE if codes in (BYTES, PAIRS) and not fp8 else 0
    left = room - table - shape.width * (shape.height * 2 + 16 * shape.teams)
    most = (6 if shape.tiles == 8 else 3) * 128 // shape.step
    return min(most, left // stage_bytes(codes, shape))


def divide(
    common: dict[str, int], shape: Shape, whole: int, parts: int, batch: int, n: int, k: int, processors: int, room: int
) -> Wide | None:
    """A division into tiles of this shape, the first `whole` of them not divided along k; None if it cannot be."""
    codes, block = common["CODES"], common["BLOCK"]
    stages, columns = stages_of(codes, common["FP8"], shape, room), -(-batch // shape.width)
    steps, tiles = k // shape.step, -(-n // shape.height) * columns
    fits = block % shape.step == 0 or (shape.step % block == 0 and block % 16 == 0)
    if stages < 2 or k % shape.step or not fits or whole > tiles:
        return None
    parts = -(-steps // -(-steps // parts))  # or fewer, where k has not so many steps
    macros = {"TEAM": 4, "TILES": shape.tiles, "STEP": shape.step, "STAGES": stages, "TEAMS": shape.teams}
    whole = tiles if parts == 1 else whole
    grid = min(processors, whole + (tiles - whole) * parts)
    shared = stages * stage_bytes(codes, shape) + shape.width * (shape.height * 2 + 16 * shape.teams)
    return Wide(tuple((common | macros).items()), grid, shared, shape, columns, whole, parts, tiles)


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
    ways = [way for shape in SHAPES for way in divisions(common, shape, batch, n, k, processors, room)]
    return min(ways, key=lambda wide: (cost(wide, k), wide), default=None)


def divisions(
    common: dict[str, int], shape: Shape, batch: int, n: int, k: int, processors: int, room: int
) -> list[Wide]:
    """All tiles whole, as many as fill the processors, or none, and the others in up to MOST_PARTS parts."""
    tiles = -(-n // shape.height) * -(-batch // shape.width)
    every = itertools.product((0, tiles // processors * processors), range(1, MOST_PARTS + 1))
    ways = (divide(common, shape, whole, parts, batch, n, k, processors, room) for whole, parts in every)
    return list(dict.fromkeys(way for way in ways if way is not None))


def cost(wide: Wide, k: int) -> float:
    """About how many microseconds it takes: the jobs that follow each other on a processor, and the sums of parts on
    their way to memory and back.

    It is off by 4% of the sweep's 840 times (root mean square; 15% at most), and what it picked there took 0.6% longer
    than the best on average, 11% at most.
    """
    shape, divided = wide.shape, wide.tiles - wide.whole
    jobs = divided * wide.parts
    rounds_of_tiles, rounds_of_parts = -(-wide.whole // wide.grid), -(-jobs // wide.grid)
    length = (rounds_of_tiles + rounds_of_parts / wide.parts) * k / 128
    each = TIMES[_kind(dict(wide.defines))][TIMED.index((shape.tiles, shape.teams))]
    slower = (1.08 if shape.step == 64 and shape.tiles < 32 else 1.0) * (1.05 if divided and wide.whole else 1.0)
    sums = 2.6 + jobs * shape.width * shape.height * 1.1e-6 if divided else 0.0
    return length * each * slower + 2.2 * (rounds_of_tiles + rounds_of_parts) + sums + 1.0


def _kind(defines: dict[str, int]) -> str:
    """What decoding takes: the row of TIMES."""
    codes, scaling = defines["CODES"], defines["SCALING"]
    if codes == INT4:
        return "int4"
    if codes == PAIRS:
        return "halves of 4 bits" if scaling < 2 else "other levels of 4 bits"
    if codes == INT8 or defines["FP8"]:
        return "int8, fp8" if scaling else "bytes of rows with one scale"
    return "other levels of 8 bits"
