"""Triton: the scales that lose least, and codes under scales that a row holds already. See reference/search.py.

    search_kernel   replaces each block's scale (and zero point) in rows that `encode` wrote by the best one
    codes_kernel    rounds elements to the nearest codes under the scales that the rows hold

A program of `search_kernel` takes some blocks, of any rows, in pieces of at most 64 elements. An element's place in its
piece is its lane in the reference's sums, and pieces come in order: so sums are the reference's, whatever the block. A
piece of some blocks is [WIDTH / 8 * blocks, 8]: eight threads share a block, and each has every eighth element, so that
half of the folds stay inside a thread.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
# ruff: noqa: RUF059, SIM109
import triton
import triton.language as tl

from narrowcast.kernels.triton.codes import (
    AFFINE,
    INT,
    LEVELS,
    SIGN,
    as_bits,
    as_float,
    cast_value,
    reciprocal,
    to_float32,
)
from narrowcast.kernels.triton.kernels import codes_place, product
from narrowcast.kernels.triton.levels import lookup
from narrowcast.kernels.triton.scales import (
    FLT_MIN,
    SCALE_BF16,
    SCALE_E8M0,
    SCALE_FP16,
    scale_bits,
    scale_value,
)
from narrowcast.kernels.triton.tiles import codes_under, load_floats, locate, store_codes
from narrowcast.kernels.triton.words import places


@triton.jit
def units_of(code, zero, levels, FORM: tl.constexpr):
    """What codes of `codes_under` stand for, in units of the scale."""
    ELEMENT: tl.constexpr = FORM.element
    BITS: tl.constexpr = FORM.bits
    if ELEMENT == SIGN:
        unit = as_float((code << 31) | 0x3F800000)
    elif ELEMENT == INT:
        unit = (code - (1 << (BITS - 1))).to(tl.float32)
    elif ELEMENT == AFFINE:
        unit = (code - zero[:, None]).to(tl.float32)
    elif ELEMENT == LEVELS:
        unit = as_float(lookup(levels, code, 1 << BITS))
    else:
        unit = cast_value(code, ELEMENT, FORM.fp8)
    return unit


@triton.jit
def spread(numbers, TIMES: tl.constexpr):
    """One number a block [groups] for each row of a piece [TIMES * groups, 8]."""
    groups: tl.constexpr = numbers.shape[0]
    return tl.broadcast_to(numbers[None, :], [TIMES, groups]).reshape([TIMES * groups])


@triton.jit
def fold(lanes, GROUPS: tl.constexpr):
    """The sum of each block's lanes, folded in halves. Every `tl.sum` adds two numbers: no order is left open."""
    rows: tl.constexpr = lanes.shape[0]
    for level in tl.static_range(3):
        if (rows >> level) > GROUPS:
            lanes = tl.sum(lanes.reshape([2, rows >> (level + 1), 8]), 0)
    for level in tl.static_range(3):
        lanes = tl.sum(lanes.reshape([GROUPS, 2, 4 >> level]), 1)
    return lanes.reshape([GROUPS])


@triton.jit
def load_piece(x, weights, piece, sizes, finite, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr):
    """A piece of each block as fp32, zero where nothing exists or a block is not finite, and its weights."""
    rows: tl.constexpr = x.shape[0]
    groups: tl.constexpr = rows // (WIDTH // 8)
    place = piece * WIDTH + (tl.arange(0, rows) // groups)[:, None] * 8 + tl.arange(0, 8)[None, :]
    # Without this a thread would take eight neighbours, and most additions would need another thread's number.
    place = tl.max_contiguous(place, [1, 1])
    inside = (place < sizes[:, None]) & finite[:, None]
    values = to_float32(tl.load(x[:, None] + place, mask=inside, other=0), False)
    importance = tl.where(inside, 1.0, 0.0)
    if WEIGHTED:
        importance = tl.load(weights[:, None] + place, mask=inside, other=0.0)
    return values, importance, inside


@triton.jit
def lane_products(values, importance, inside, scale, inverse, zero, levels, cells, slope, middle, bend, reach,
                  FORM: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    """Of each element: the squared error, the error times the unit, and the squared unit, weighted."""
    # A scale may be far below the one that reaches the largest element.
    code = codes_under(values, inverse, zero, values, cells, slope, middle, bend, reach, FORM, SEARCH, False, False)
    unit = units_of(code, zero, levels, FORM)
    error = values - product(unit, scale[:, None], FORM.element)
    squared, cross, square = error * error, error * unit, unit * unit
    if WEIGHTED:
        squared, cross, square = squared * importance, cross * importance, square * importance
    return tl.where(inside, squared, 0.0), tl.where(inside, cross, 0.0), tl.where(inside, square, 0.0)


@triton.jit
def share_of(gain, values, importance, inside, x, weights, pieces, sizes, finite, WIDTH: tl.constexpr,
             WEIGHTED: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """The gain over the weighted squares of each block."""
    squares = values * values * importance
    if not ONE:
        for piece in range(1, pieces):
            next_values, next_importance, _ = load_piece(x, weights, piece, sizes, finite, WIDTH, WEIGHTED)
            squares += next_values * next_values * next_importance
    return tl.div_rn(gain, fold(squares, x.shape[0] // (WIDTH // 8)))


@triton.jit
def try_scale(scale, zero, share, values, importance, inside, x, weights, pieces, sizes, finite, levels, cells, slope,
              middle, bend, reach, FORM: tl.constexpr, SEARCH: tl.constexpr, WIDTH: tl.constexpr,
              WEIGHTED: tl.constexpr, ONE: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
    """What a scale loses, what is lost with the one that fits its codes best, and that one: `Choice`, [groups] each.

    The first piece is in registers; ONE: there is no other.
    """
    times: tl.constexpr = WIDTH // 8
    wide, inverse, zeros = spread(scale, times), spread(reciprocal(scale), times), spread(zero, times)
    errors, cross, squares = lane_products(values, importance, inside, wide, inverse, zeros, levels, cells, slope,
                                           middle, bend, reach, FORM, SEARCH, WEIGHTED)  # fmt: skip
    if not ONE:
        for piece in range(1, pieces):
            next_values, next_importance, next_inside = load_piece(x, weights, piece, sizes, finite, WIDTH, WEIGHTED)
            e, c, s = lane_products(next_values, next_importance, next_inside, wide, inverse, zeros, levels, cells,
                                    slope, middle, bend, reach, FORM, SEARCH, WEIGHTED)  # fmt: skip
            errors, cross, squares = errors + e, cross + c, squares + s
    groups: tl.constexpr = scale.shape[0]
    loss, slope_sum, bend_sum = fold(errors, groups), fold(cross, groups), fold(squares, groups)
    if GAIN:
        lacking, reached = loss + scale * slope_sum, slope_sum + scale * bend_sum
        pull = share * lacking
        loss, slope_sum = loss + pull * lacking, slope_sum + pull * reached
        bend_sum = bend_sum + share * reached * reached
    step = tl.div_rn(slope_sum, bend_sum)
    floor = loss
    if FORM.scale != SCALE_E8M0:
        floor = loss - slope_sum * step
    return loss, floor, scale + step


@triton.jit
def round_to_stored(scale, limit, SCALE: tl.constexpr):
    """The nearest number of the stored format, ties to even, its magnitude at most `limit`; for a NaN, any number."""
    magnitude = tl.minimum(tl.abs(scale), limit)
    bits = as_bits(magnitude)
    if SCALE == SCALE_BF16:
        magnitude = as_float(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16)
    elif SCALE == SCALE_E8M0:
        magnitude = as_float(((bits + 0x3FFFFF + ((bits >> 23) & 1)) >> 23) << 23)
    elif SCALE == SCALE_FP16:
        magnitude = magnitude.to(tl.float16).to(tl.float32)
    return as_float(as_bits(tl.minimum(magnitude, limit)) | ((as_bits(scale) >> 31) << 31))


@triton.jit
def stored_or(wanted, instead, limit, FORM: tl.constexpr):
    """The stored scales nearest to `wanted`, or `instead` where there is none to use; and where there is one."""
    scale = round_to_stored(wanted, limit, FORM.scale)
    allowed = (wanted == wanted) & ((tl.abs(scale) if FORM.signed else scale) >= FLT_MIN)
    return tl.where(allowed, scale, instead), allowed


@triton.jit
def best_of(nearest, zero, share, values, importance, inside, x, weights, pieces, sizes, finite, levels, cells,
            top_scale, slope, middle, bend, reach, FORM: tl.constexpr, SEARCH: tl.constexpr, TRY: tl.constexpr,
            WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ONE: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
    """The scales and zero points of least loss, found as in `search` of reference/search.py."""
    loss, floor, fit = try_scale(nearest, zero, share, values, importance, inside, x, weights, pieces, sizes, finite,
                                 levels, cells, slope, middle, bend, reach, FORM, SEARCH, WIDTH, WEIGHTED, ONE,
                                 GAIN)  # fmt: skip
    # The one of least loss, and the one of the lowest floor: both begin with the nearest.
    least_scale, least_zero, least_loss = nearest, zero, loss
    scale = nearest
    for number in tl.static_range(3):
        if number < TRY.count:
            wanted = nearest * (TRY.first if number == 0 else TRY.second if number == 1 else TRY.third)
            other, allowed = stored_or(wanted, nearest, top_scale, FORM)
            a, b, c = try_scale(other, zero, share, values, importance, inside, x, weights, pieces, sizes, finite,
                                levels, cells, slope, middle, bend, reach, FORM, SEARCH, WIDTH, WEIGHTED, ONE,
                                GAIN)  # fmt: skip
            taken = allowed & (b < floor)
            scale, loss = tl.where(taken, other, scale), tl.where(taken, a, loss)
            floor, fit = tl.where(taken, b, floor), tl.where(taken, c, fit)
    if FORM.element == AFFINE:
        top: tl.constexpr = (1 << FORM.bits) - 1
        for number in tl.static_range(2):
            shifted = tl.minimum(tl.maximum(zero + (2 * number - 1), 0), top)
            a, b, c = try_scale(scale, shifted, share, values, importance, inside, x, weights, pieces, sizes, finite,
                                levels, cells, slope, middle, bend, reach, FORM, SEARCH, WIDTH, WEIGHTED, ONE,
                                GAIN)  # fmt: skip
            taken = b < floor
            zero, loss = tl.where(taken, shifted, zero), tl.where(taken, a, loss)
            floor, fit = tl.where(taken, b, floor), tl.where(taken, c, fit)
    less = loss < least_loss
    least_scale, least_zero = tl.where(less, scale, least_scale), tl.where(less, zero, least_zero)
    least_loss = tl.where(less, loss, least_loss)
    for _ in tl.static_range(TRY.refinements):
        scale, allowed = stored_or(fit, nearest, top_scale, FORM)
        loss, floor, fit = try_scale(scale, zero, share, values, importance, inside, x, weights, pieces, sizes, finite,
                                     levels, cells, slope, middle, bend, reach, FORM, SEARCH, WIDTH, WEIGHTED, ONE,
                                     GAIN)  # fmt: skip
        fit = tl.where(allowed, fit, float("nan"))
        less = allowed & (loss < least_loss)
        least_scale, least_zero = tl.where(less, scale, least_scale), tl.where(less, zero, least_zero)
        least_loss = tl.where(less, loss, least_loss)
    return least_scale, least_zero


@triton.jit(do_not_specialize=["numel", "count", "groups", "block", "pieces", "scales_at", "zeros_at"])
def search_kernel(scales, out, x, weights, levels, cells, x_stride, row_bytes, numel, count, groups, block, pieces,
                  scales_at, zeros_at, gain, top_scale, slope, middle, bend, reach, FORM: tl.constexpr,
                  SEARCH: tl.constexpr, TRY: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
                  WEIGHTED: tl.constexpr, ONE: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
    """`scales` and `out` are the same bytes; `count` blocks, `groups` of them in each row."""
    index = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    exists = index < count
    row, group = index // groups, index % groups
    at = scales + (row * row_bytes + scales_at) // FORM.scale_size + group
    nearest = scale_value(tl.load(at, mask=exists, other=0), FORM.scale)
    finite = exists & (nearest == nearest)
    nearest = tl.where(finite, nearest, 1.0)
    zero_at = out + row * row_bytes + zeros_at + group
    zero = tl.zeros([GROUPS], tl.int32)
    if FORM.element == AFFINE:
        zero = tl.load(zero_at, mask=finite, other=0).to(tl.int32)
    times: tl.constexpr = WIDTH // 8
    sizes = spread(tl.minimum(numel - group * block, block), times)
    x = x + spread(row * x_stride + group * block, times)
    weights = weights + spread(group * block, times)
    here = spread(finite, times)
    values, importance, inside = load_piece(x, weights, 0, sizes, here, WIDTH, WEIGHTED)
    share = tl.zeros([GROUPS], tl.float32)
    if GAIN:
        share = share_of(gain, values, importance, inside, x, weights, pieces, sizes, here, WIDTH, WEIGHTED, ONE)
    scale, zero = best_of(nearest, zero, share, values, importance, inside, x, weights, pieces, sizes, here, levels,
                          cells, top_scale, slope, middle, bend, reach, FORM, SEARCH, TRY, WIDTH, WEIGHTED, ONE,
                          GAIN)  # fmt: skip
    tl.store(at, scale_bits(scale, finite, FORM.scale), mask=exists)
    if FORM.element == AFFINE:
        tl.store(zero_at, zero.to(tl.uint8), mask=finite)


@triton.jit(do_not_specialize=["numel", "tiles", "first_tile", "chunks", "block", "groups", "scales_at", "zeros_at"])
def codes_kernel(codes, scales, out, x, cells, x_stride, row_bytes, numel, tiles, first_tile, chunks, block, groups,
                 scales_at, zeros_at, slope, middle, bend, reach, FORM: tl.constexpr, TILE: tl.constexpr,
                 SEARCH: tl.constexpr, CODE_SIZE: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """`codes`, `scales` and `out` are the same bytes. Scales, zero points and padding stay as they are."""
    ELEMENT: tl.constexpr = FORM.element
    BITS: tl.constexpr = FORM.bits
    row, tile, group, start, limit = locate(tiles, first_tile, chunks, block, numel, TILE, SINGLE)
    values = load_floats(x + row * x_stride + start, limit, TILE, False)
    base = row * row_bytes
    index = tl.arange(0, TILE.groups)
    here = index < groups - group
    at = scales + (base + scales_at) // FORM.scale_size + group + index
    scale = scale_value(tl.load(at, mask=here, other=0), FORM.scale)
    finite = here & (scale == scale)
    zero = tl.zeros([TILE.groups], tl.int32)
    if ELEMENT == AFFINE:
        zero = tl.load(out + base + zeros_at + group + index, mask=here, other=0).to(tl.int32)
    inverse = reciprocal(tl.where(finite, scale, 1.0))
    code = codes_under(values, inverse, zero, values, cells, slope, middle, bend, reach, FORM, SEARCH, False, False)
    nothing: tl.constexpr = (1 << (BITS - 1)) if ELEMENT == INT else 0
    code = tl.where(finite[:, None], code, nothing)
    if TILE.masked and BITS < 8 and (ELEMENT == AFFINE or ELEMENT == LEVELS):
        # Zero stands for something there: the bits after a row's last code must be zero all the same.
        place, real = places(TILE, 1)
        code = tl.where((place < limit).reshape([TILE.groups, TILE.width]), code, 0)
    store_codes(codes + (base + codes_place(start, FORM, TILE)) // CODE_SIZE, code, limit, BITS, TILE, False,
                ELEMENT == INT)  # fmt: skip
