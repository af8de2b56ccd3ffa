"""Triton: codes of rows, one column after another. See reference/columns.py.

A program holds a few rows of at most COLUMNS columns in registers and takes the columns in order. Rows are independent,
and every operation is one of the reference's: the results are its bits.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import triton
import triton.language as tl

from narrowcast.kernels.triton.codes import AFFINE, FLT_MAX, INT, as_bits, as_float, reciprocal
from narrowcast.kernels.triton.kernels import product
from narrowcast.kernels.triton.search_kernels import units_of
from narrowcast.kernels.triton.tiles import codes_under


@triton.jit
def pick(tile, here):
    """One column [rows] of a tile, bit for bit: a sum of floats would lose the sign of a zero."""
    return as_float(tl.sum(tl.where(here, as_bits(tile), 0), 1))


@triton.jit
def nearest(x, row, exists, block, scales, zeros, levels, cells, scale_stride, slope, middle, bend, reach,
            FORM: tl.constexpr, SEARCH: tl.constexpr):  # fmt: skip
    """The codes of x [rows] as the reference numbers them, and what they decode to."""
    scale = tl.load(scales + row * scale_stride + block, mask=exists, other=1.0)
    zero = tl.zeros(x.shape, tl.int32)
    if FORM.element == AFFINE:
        zero = tl.load(zeros + row * scale_stride + block, mask=exists, other=0).to(tl.int32)
    x = x[:, None]
    code = codes_under(x, reciprocal(scale), zero, x, cells, slope, middle, bend, reach, FORM, SEARCH, False, False)
    value = product(units_of(code, zero, levels, FORM), scale[:, None], FORM.element)
    if FORM.element == INT:
        code = code - (1 << (FORM.bits - 1))
        value = value + 0.0  # a zero times a negative scale is a zero all the same
    return code, value


@triton.jit(do_not_specialize=["rows", "columns", "weight_stride", "factor_stride", "scale_stride"])
def round_kernel(weight, codes, errors, factor, scales, zeros, blocks, levels, cells, rows, columns, weight_stride,
                 factor_stride, scale_stride, slope, middle, bend, reach, FORM: tl.constexpr, SEARCH: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`codes` and `errors` are contiguous [rows, columns]. Columns of `weight` stay as they are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = row < rows
    inside = exists[:, None] & (column < columns)
    values = tl.load(weight + row[:, None] * weight_stride + column, mask=inside, other=0.0)
    chosen = tl.zeros([ROWS, COLUMNS], tl.int32)
    lost = tl.zeros([ROWS, COLUMNS], tl.float32)
    for place in range(columns):
        here = column == place
        value = pick(values, here)
        value = tl.where(value == value, tl.minimum(tl.maximum(value, -FLT_MAX), FLT_MAX), 0.0)
        code, decoded = nearest(value, row, exists, tl.load(blocks + place), scales, zeros, levels, cells, scale_stride,
                                slope, middle, bend, reach, FORM, SEARCH)  # fmt: skip
        own = factor + place * factor_stride
        error = tl.div_rn(value[:, None] - decoded, tl.load(own + place))
        behind = tl.load(own + column, mask=(column > place) & (column < columns), other=0.0)
        values = tl.where(column > place, values - error * behind, values)
        chosen = tl.where(here, code, chosen)
        lost = tl.where(here, error, lost)
    at = row[:, None] * columns + column
    tl.store(codes + at, chosen, mask=inside)
    tl.store(errors + at, lost, mask=inside)


@triton.jit(do_not_specialize=["rows", "columns", "values_stride", "slope_stride", "moment_stride", "scale_stride"])
def choose_kernel(values, slopes, codes, changes, moments, scales, zeros, blocks, levels, cells, rows, columns,
                  values_stride, slope_stride, moment_stride, scale_stride, slope, middle, bend, reach,
                  FORM: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """`codes` and `changes` are contiguous [rows, columns]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = row < rows
    inside = exists[:, None] & (column < columns)
    value_at = values + row[:, None] * values_stride + column
    slope_at = slopes + row[:, None] * slope_stride + column
    now = tl.load(value_at, mask=inside, other=0.0)
    steep = tl.load(slope_at, mask=inside, other=0.0)
    chosen = tl.zeros([ROWS, COLUMNS], tl.int32)
    changed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for place in range(columns):
        here = column == place
        value = pick(now, here)
        own = moments + place * moment_stride
        target = value - tl.div_rn(pick(steep, here), tl.load(own + place))
        target = tl.where(tl.abs(target) <= FLT_MAX, target, value)
        code, decoded = nearest(target, row, exists, tl.load(blocks + place), scales, zeros, levels, cells,
                                scale_stride, slope, middle, bend, reach, FORM, SEARCH)  # fmt: skip
        change = decoded - value[:, None]
        steep = steep + change * tl.load(own + column, mask=column < columns, other=0.0)
        chosen = tl.where(here, code, chosen)
        changed = tl.where(here, change, changed)
        now = tl.where(here, decoded, now)
    tl.store(value_at, now, mask=inside)
    tl.store(slope_at, steep, mask=inside)
    at = row[:, None] * columns + column
    tl.store(codes + at, chosen, mask=inside)
    tl.store(changes + at, changed, mask=inside)
