"""Sums of rows of 4-bit codes, encoded again, by sums.cu: Codec.decode_sum_encode of int4 and of tables of 16 levels.

It is made for bf16 scales of blocks of 32 to 1024 elements, a power of two, and for Hopper, where it was measured.
triton/ takes the rest: other scales and blocks, own rows in fp64, more than 16 ranks, and short rows.
"""

from __future__ import annotations

import math
import struct
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.kernels.cuda import choose, nvrtc
from narrowcast.kernels.cuda.formats import INT4, KINDS, PAIRS, codes_of, sources
from narrowcast.kernels.cuda.launch import reading
from narrowcast.kernels.cuda.nvrtc import Int
from narrowcast.kernels.curves import REACH, fit
from narrowcast.kernels.lasting import lasting
from narrowcast.kernels.layout import Format, Recipe, Scale, layout, scaling, to_float32

MOST_RANKS = 16
FEWEST = 1 << 27
"""Elements from which on it is faster than Triton for all of its formats: filling the tables of bytes takes time."""

MOST_WARPS = 24
"""Of a block; each processor has one block."""

PIECE = 1024
"""Elements that a warp takes at a time."""

ROOM = 227 << 10
"""Shared memory that a block may have."""

BLOCKS = (32, 64, 128, 256, 512, 1024)
LARGEST_FUSED = 512
"""Levels up to here have products that are finite where `HUGE_SCALE` of sums.cu says so, and exact."""

WHOLE, CURVE, STEPS = range(3)
"""`CHOICE` in the kernel."""

WIDE = {INT4: 0b11101110, PAIRS: 0b10101000}
"""Which of eight ranks read pairs of fp32: the best of those that were timed (bench/results/gpu-h200.md)."""

ONES = 1.5 * 2**23
"""Added to an fp32 number, it leaves a whole number in the low bits; 2**-7 of it leaves seven bits of fraction too."""


class Tables(NamedTuple):
    """What sums.cu is told of a format's numbers."""

    choice: int
    fused: bool
    wide: int
    """`WIDE` in the kernel."""
    curve: tuple[float, float, float]
    """`BEND`, `SLOPE`, `MIDDLE`."""
    steps: int
    numbers: Tensor
    """int32: pairs of fp32 for each byte, pairs of bf16, and the thresholds or the codes by which sums find theirs."""
    table: Tensor | None
    """Keeps the memory alive whose address `tables_of` remembers this by."""


def decode_sum_encode(
    out: Tensor, data: Tensor, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
) -> bool:
    """Encode the sum of the rows of `data`, or return False. `out` is contiguous, at a multiple of 16 bytes."""
    if numel < FEWEST or not 2 <= len(data) <= MOST_RANKS or not _known(recipe.format) or not runs_on(data.device):
        return False
    if not readable(data):
        return False
    if own is not None and not (own.is_contiguous() and own.data_ptr() % 16 == 0 and own.dtype in KINDS):
        return False
    with torch.cuda.device(data.device):
        launch = launch_of(recipe, data.device, len(data), None if own is None else (own_rank, own.dtype), divisor)
        if launch is None:
            return False
        where, factor = layout(recipe.format, numel), 1.0 / divisor if division(divisor) == 1 else float(divisor)
        grid = min(choose._processors(data.device), -(-numel // (PIECE * launch.threads // 32)))
        sizes = (numel, where.scales_offset, where.row_bytes, Int(data.stride(0)), Int(bits_of(factor)))
        launch.kernel(grid, launch.threads, launch.shared, (data, launch.tables.numbers, out, own, *sizes))
    return True


class Launch(NamedTuple):
    """A compiled kernel, and what it runs with."""

    kernel: nvrtc.Function
    threads: int
    shared: int
    tables: Tables


_launches: dict[object, Launch | None] = {}


def launch_of(
    recipe: Recipe, device: torch.device, ranks: int, own: tuple[int, torch.dtype] | None, divisor: int
) -> Launch | None:
    """The launch of such a sum, compiled once; None where there is none. `own` is its rank and dtype."""
    table = None if recipe.table is None else recipe.table.data_ptr()
    key = (recipe.format, recipe.peak, table, device.index, ranks, own, division(divisor))
    if key not in _launches:
        tables = tables_of(recipe, device)
        _launches[key] = None if tables is None else _compile(tables, recipe, device, ranks, own, division(divisor))
    return _launches[key]


def work_of(fused: bool, own: bool, ranks: int) -> tuple[int, int]:
    """`HELD` in the kernel, and the warps of a block: the best of those that were timed (bench/results/gpu-h200.md)."""
    if fused:
        return 0, 24
    return (0, 16) if own or ranks > 8 else (1, 20)


def _compile(
    tables: Tables, recipe: Recipe, device: torch.device, ranks: int, own: tuple[int, torch.dtype] | None, divide: int
) -> Launch:
    rank, dtype = (-1, torch.float32) if own is None else own
    # A NaN may ask for any of 256 steps: what it reads has to be there, and does not count.
    behind = {WHOLE: 0, CURVE: 16 * 128, STEPS: tables.steps * 256}[tables.choice]
    least = (512 if tables.choice == STEPS else 256) * 256
    held, warps = work_of(tables.fused, own is not None, ranks)
    staged = (0 if held else PIECE // 2 * ranks) + (0 if own is None else PIECE * dtype.itemsize)
    warps = min(warps, MOST_WARPS, (ROOM - 256 * 256 - behind) // max(staged, 1))
    shared = max(least, 256 * 256 + behind + warps * staged)
    step, limit = scaling(recipe.format, recipe.peak)
    defines: dict[str, Any] = {"RANKS": ranks, "OWN": rank, "X": KINDS[dtype], "DIVIDE": divide, "THREADS": 32 * warps}
    defines |= {"CODES": codes_of(recipe.format), "BLOCK": recipe.format.block, "SCALE": int(recipe.format.scale)}
    defines |= {"FUSED": int(tables.fused), "WIDE": tables.wide, "CHOICE": tables.choice, "STEPS": tables.steps}
    named = {"PEAK_STEP": step, "LIMIT": limit} | dict(zip(("BEND", "SLOPE", "MIDDLE"), tables.curve, strict=True))
    defines |= {name: bits_of(value) & 0xFFFFFFFF for name, value in named.items()}
    defines |= {"BIAS": -1, "UNROLL": 1, "HELD": held}
    kernel = nvrtc.function(sources("sums"), "sums", (*defines.items(), *reading()), device.index)
    return Launch(kernel, 32 * warps, shared, tables)


def readable(data: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes, less than 2**31 apart."""
    stride, last = data.stride()
    return last == 1 and stride % 16 == 0 and data.data_ptr() % 16 == 0 and 0 <= stride < 2**31


def takes(recipe: Recipe, device: torch.device) -> bool:
    """Whether large sums of a few rows are done here."""
    return _known(recipe.format) and runs_on(device) and tables_of(recipe, torch.device("cpu")) is not None


_tables: dict[object, Tables | None] = {}


def tables_of(recipe: Recipe, device: torch.device) -> Tables | None:
    """The tables of a format, made once: that reads the levels, and waits for the device. None where there are none."""
    key = (recipe.format.element, device, None if recipe.table is None else recipe.table.data_ptr())
    if key not in _tables:
        tables = _make_tables(recipe.table)
        if tables is not None:
            tables = tables._replace(numbers=lasting(partial(tables.numbers.to, device), device), table=recipe.table)
        _tables[key] = tables
    return _tables[key]


def _make_tables(table: Tensor | None) -> Tables | None:
    """`table` is that of a recipe, None for int4."""
    byte = torch.arange(256, dtype=torch.int64, device="cpu")
    if table is None:
        levels = (torch.arange(16, dtype=torch.int64, device="cpu") ^ 8).float() - 8
        choice, curve, behind, fused = WHOLE, (0.0, 0.0, 0.0), byte[:0], True
    else:
        levels, thresholds = table.cpu()
        finite = levels[levels.isfinite()]
        chosen = _steps(thresholds, float(finite.abs().max())) or _curve(thresholds, float(finite.abs().max()))
        if chosen is None:
            return None
        choice, curve, behind = chosen
        fused = bool((finite == finite.round()).all()) and float(finite.abs().max()) <= LARGEST_FUSED
    pairs = torch.stack([levels[byte & 15], levels[byte >> 4]], 1)
    halves = pairs.bfloat16()
    exact = bool((halves.float().eq(pairs) | pairs.isnan()).all())
    wide = WIDE[INT4 if table is None else PAIRS] if fused and exact else 0xFF
    parts = [pairs.view(-1).view(torch.int32), halves.view(-1).view(torch.int32), behind.int()]
    return Tables(choice, fused, wide, curve, len(behind), torch.cat(parts), None)


Choice = tuple[int, tuple[float, float, float], Tensor]


def _steps(thresholds: Tensor, peak: float) -> Choice | None:
    """Codes by how many steps lie below a number, where all thresholds are multiples of one step."""
    finite = thresholds[thresholds.isfinite()].double()
    for power in range(4, -9, -1):
        step = 2.0**power
        ends = math.ceil(REACH * peak / step) + 1
        if 2 * ends > 255:
            return None
        if bool((finite / step == (finite / step).round()).all()):
            # Rounded up, a number is above the thresholds below that many steps.
            cells = torch.arange(-ends, ends + 1, dtype=torch.float64, device="cpu")
            codes = (finite[None] / step < cells[:, None]).sum(1)
            return STEPS, (0.0, 1 / step, ONES + ends), codes
    return None


def _curve(thresholds: Tensor, peak: float) -> Choice | None:
    """Thresholds by a curve that guesses the code or one less."""
    curve = fit(thresholds[thresholds.isfinite()].double(), to_float32(REACH * peak), 16)
    if curve is None:
        return None
    bend, slope, middle = curve
    return CURVE, (bend, slope, middle + 0.5 + ONES / 128), thresholds.contiguous().view(torch.int32)


def _known(format: Format) -> bool:
    """Whether sums.cu is made for such codes, scales and blocks."""
    whole = format.scale == Scale.BF16 and format.block in BLOCKS and not format.stochastic
    return whole and format.bits == 4 and codes_of(format) in (INT4, PAIRS)


def division(divisor: int) -> int:
    """`DIVIDE` in the kernel: one multiplication by a power of two rounds like the division."""
    return 0 if divisor == 1 else 1 if divisor & (divisor - 1) == 0 else 2


def bits_of(value: float) -> int:
    """fp32 as a signed integer of 32 bits."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@cache
def runs_on(device: torch.device) -> bool:
    """Whether this is a Hopper GPU on which CUDA can be compiled."""
    return device.type == "cuda" and not nvrtc.missing() and torch.cuda.get_device_capability(device)[0] == 9
