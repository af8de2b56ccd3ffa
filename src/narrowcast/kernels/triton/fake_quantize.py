"""Triton: fake quantization.

A tensor [outer, channels, inner] is seen as a matrix in which either each row or each column has one scale; a program
takes a tile of it, in one pass. Backward, it leaves the sums of its tile's rows or columns, in fp64, in places of its
own, and torch adds those up: no atomics, so the same call gives the same bits.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
from collections import OrderedDict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import Grid
from narrowcast.kernels.triton.arguments import OUTPUTS, loadable, on, seen
from narrowcast.kernels.triton.codes import (
    NATIVE,
    WHOLE,
    WHOLE_BITS,
    as_bits,
    as_float,
    reciprocal,
    to_float32,
    to_output,
)
from narrowcast.kernels.triton.levels import count_below, count_near, lookup
from narrowcast.kernels.triton.tables import Cells, lay_out, remember

TILE, BACKWARD_TILE, WARPS = 4096, 2048, 4
"""Elements of a program (backward: where rows have scales) and its warps: the best of 12 on an H200."""

SHORT = 256
"""Inner dimensions below this are not worth rows of their own."""

NARROW = 64
"""Columns of a tile where columns have scales: enough for whole cache lines, and few sums left for torch to add."""

LARGEST = tl.constexpr(3.3e38)
"""A little below bf16's largest, so that rounding cannot pass it."""


# -- the kernel -----------------------------------------------------------------------------------------------------


@triton.jit
def nearest_level(v, low, high, levels, cells, slope, middle, bend, reach,
                  UNIFORM: tl.constexpr, LEVELS: tl.constexpr, CELLS: tl.constexpr, STEPS: tl.constexpr,
                  SEARCHED: tl.constexpr):  # fmt: skip
    """The level of each v; NaN where v is."""
    if UNIFORM:
        whole = as_bits(tl.minimum(tl.maximum(v, low), high) + WHOLE) - WHOLE_BITS
        q = whole.to(tl.float32)
    else:
        if STEPS == 0:
            code = count_near(v, cells, bend, slope, middle, reach, CELLS, False)
        else:
            code = count_below(v, cells, slope, middle, CELLS, STEPS, SEARCHED, False)
        q = as_float(lookup(levels, code, LEVELS))
    return tl.where(v != v, v, q)


@triton.jit
def as_bf16(value):
    """fp32 below bf16's largest as the bits of bf16: what `to_output` gives, in fewer instructions."""
    bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return tl.where(value != value, 0x7FC0, bits)


@triton.jit
def fake_kernel(out, sums, x, grad, scale, rows, columns, channels, inner, low, high, levels, cells, slope, middle,
                bend, reach, UNIFORM: tl.constexpr, LEVELS: tl.constexpr, CELLS: tl.constexpr, STEPS: tl.constexpr,
                SEARCHED: tl.constexpr, BY_ROW: tl.constexpr, BACKWARD: tl.constexpr, HEIGHT: tl.constexpr,
                WIDTH: tl.constexpr, OUTPUT: tl.constexpr):  # fmt: skip
    """One tile: y into `out`, or the gradient of x there and what the scales' gradients sum up into `sums`."""
    across = tl.cdiv(columns, WIDTH)
    band, part = tl.program_id(0) // across, tl.program_id(0) % across
    row = band.to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = part * WIDTH + tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    own = row % channels if BY_ROW else column % columns // inner
    by = tl.expand_dims(tl.load(scale + own), 1 if BY_ROW else 0)
    v = to_float32(tl.load(x + at, mask=there, other=0), False) * reciprocal(by)
    q = nearest_level(v, low, high, levels, cells, slope, middle, bend, reach, UNIFORM, LEVELS, CELLS, STEPS, SEARCHED)
    if BACKWARD:
        outside = (v < low) | (v > high)
        passed = tl.load(grad + at, mask=there, other=0)
        tl.store(out + at, tl.where(outside, tl.zeros_like(passed), passed), mask=there)
        terms = to_float32(passed, False) * tl.where(outside, q, q - v)
        terms = tl.where(there, terms, 0.0).to(tl.float64)
        if BY_ROW:
            tl.store(sums + row * across + part, tl.sum(terms, 1), mask=row < rows)
        else:
            tl.store(sums + band.to(tl.int64) * columns + column, tl.sum(terms, 0), mask=column < columns)
    else:
        value = q * by
        if UNIFORM:
            value = value + 0.0
        if OUTPUT == "bf16" and NATIVE:
            if tl.max(tl.abs(by)) * tl.maximum(tl.abs(low), tl.abs(high)) < LARGEST:  # nothing to saturate
                tl.store(out + at, as_bf16(value), mask=there)
            else:
                tl.store(out + at, to_output(value, OUTPUT, False), mask=there)
        else:
            tl.store(out + at, to_output(value, OUTPUT, False), mask=there)


# -- launches -------------------------------------------------------------------------------------------------------


def fake_quantize(out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
    _launch(out, None, None, x, scale, grid)


def fake_quantize_backward(dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
    _launch(dx, dscale, grad, x, scale, grid)


def _launch(out: Tensor, dscale: Tensor | None, grad: Tensor | None, x: Tensor, scale: Tensor, grid: Grid) -> None:
    outer, channels, inner = x.shape
    by_row = channels == 1 or inner >= SHORT
    rows, columns = (outer * channels, inner) if by_row else (outer, channels * inner)
    tile = BACKWARD_TILE if by_row and grad is not None else TILE
    width = min(triton.next_power_of_2(columns), tile if by_row else NARROW)
    height = min(triton.next_power_of_2(rows), tile // width)
    across, bands = triton.cdiv(columns, width), triton.cdiv(rows, height)
    sums = scale
    if grad is not None:
        size = rows * across if by_row else bands * columns
        sums = torch.empty(size, dtype=torch.float64, device=x.device)
    with on(x.device):
        fake_kernel[(bands * across,)](
            out=seen(out, out.element_size()) if grad is None else loadable(out),
            sums=sums,
            x=loadable(x),
            grad=x if grad is None else loadable(grad),
            scale=scale,
            rows=rows,
            columns=columns,
            channels=channels,
            inner=inner,
            BY_ROW=by_row,
            BACKWARD=grad is not None,
            HEIGHT=height,
            WIDTH=width,
            OUTPUT=OUTPUTS[x.dtype],
            num_warps=WARPS,
            enable_fp_fusion=False,
            **_searched(grid),
        )
    if dscale is not None:
        shape = (outer, channels, across) if by_row else (bands, channels, inner)
        dscale.copy_(sums.view(shape).sum((0, 2)))


# -- grids: laid out once, which reads them and waits for the device --------------------------------------------------

_remembered: OrderedDict[tuple[object, ...], tuple[Grid, float, float, Cells | None]] = OrderedDict()


def _searched(grid: Grid) -> dict[str, Any]:
    """How a grid's levels are found, as arguments."""
    levels, thresholds, uniform = grid
    version = 0 if levels.is_inference() else levels._version
    key = (str(levels.device), levels.data_ptr(), thresholds.data_ptr(), len(levels), version, uniform)
    _, low, high, cells = remember(_remembered, key, lambda: _laid_out(grid))
    bounds = {"low": low, "high": high, "UNIFORM": uniform}
    if cells is None:
        nothing = {"levels": levels, "cells": levels, "slope": 0.0, "middle": 0.0, "bend": 0.0, "reach": 0.0}
        return {**bounds, **nothing, "LEVELS": 1, "CELLS": 1, "STEPS": 0, "SEARCHED": 0}
    curve = {name: getattr(cells, name) for name in ("levels", "slope", "middle", "bend", "reach")}
    sizes = {"LEVELS": len(cells.levels), "CELLS": cells.size, "STEPS": cells.steps, "SEARCHED": cells.searched}
    return {**bounds, **curve, "cells": cells.entries, **sizes}


def _laid_out(grid: Grid) -> tuple[Grid, float, float, Cells | None]:
    """With the grid itself, which keeps the memory alive whose addresses are its key."""
    low, high = grid.levels[0].item(), grid.levels[-1].item()
    return grid, low, high, None if grid.uniform else lay_out(_table(grid))


def _table(grid: Grid) -> Tensor:
    """A grid as `Recipe.table` has it: levels and thresholds, filled up to a power of two."""
    size = max(2, triton.next_power_of_2(len(grid.levels)))
    levels = pad(grid.levels, (0, size - len(grid.levels)), value=torch.nan)
    return torch.stack([levels, pad(grid.thresholds, (0, size - len(grid.thresholds)), value=torch.inf)])
