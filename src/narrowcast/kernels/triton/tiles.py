"""Triton: tiles of a row between memory and registers.

A program works on one tile (TILE of groups.py): some blocks, each padded to a power of two. Blocks too large for
that are taken in chunks. `limit` counts the tile's elements that exist; where the tile is not masked they all do, and
no mask costs anything.

Codes narrower than a byte are packed in registers: neighbours lie in the same thread, so that pairs join without
leaving it. Aligned tiles move as 32-bit words, others as bytes. words.py has the way back.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
# ruff: noqa: RUF059, SIM108, SIM109
import triton
import triton.language as tl

from narrowcast.kernels.triton.codes import (
    AFFINE,
    E4M3,
    E5M2,
    INT,
    LEVELS,
    SIGN,
    as_bits,
    as_float,
    cast_bits,
    cast_value,
    mix64,
    quantize,
    reciprocal,
    to_float32,
    uniform,
)
from narrowcast.kernels.triton.levels import count_below, count_near, lookup
from narrowcast.kernels.triton.scales import (
    SCALE_BF16,
    SCALE_FP32,
    SCALE_NONE,
    choose_scale,
    load_scales,
    measure,
    scale_bits,
    scale_value,
    zero_points,
)
from narrowcast.kernels.triton.words import load_bytewise, load_codes, load_whole, places


@triton.jit
def locate(tiles, first_tile, chunks, block, numel, TILE: tl.constexpr, SINGLE: tl.constexpr):
    """This program's row, tile, first block, first element, and how many of its elements exist."""
    program = tl.program_id(0)
    if SINGLE:
        # One row: no division.
        row = (program * 0).to(tl.int64)
        tile = (program + first_tile).to(tl.int64)
    else:
        row = (program // tiles).to(tl.int64)
        tile = (program % tiles + first_tile).to(tl.int64)
    if TILE.chunked:
        group = tile // chunks
        inside = (tile % chunks) * TILE.width
        start = group * block + inside
        limit = tl.minimum(block - inside, numel - start)
    else:
        group = tile * TILE.groups
        start = group * TILE.block
        limit = numel - start
    # The compiler cannot see these, and without them it will not move 16 bytes at once.
    align: tl.constexpr = TILE.align
    edge: tl.constexpr = TILE.edge
    start = tl.multiple_of(start, align)
    limit = tl.multiple_of(tl.minimum(limit, TILE.groups * TILE.width).to(tl.int32), edge)
    return row, tile, group, start, limit


@triton.jit
def load_floats(x, limit, TILE: tl.constexpr, EXACT_NAN: tl.constexpr):
    """The tile at pointer x as fp32 [groups, width], zero where nothing exists."""
    place, real = places(TILE, 1)
    if TILE.masked:
        loaded = tl.load(x + place, mask=real & (place < limit), other=0)
    else:
        loaded = tl.load(x + place)
    return to_float32(loaded, EXACT_NAN).reshape([TILE.groups, TILE.width])


@triton.jit
def store_floats(out, bits, limit, TILE: tl.constexpr):
    """Store results [groups, width], which come as integers."""
    place, real = places(TILE, 1)
    bits = bits.reshape([TILE.groups * TILE.width])
    if TILE.masked:
        tl.store(out + place, bits, mask=real & (place < limit))
    else:
        tl.store(out + place, bits)


# -- codes <-> bytes ------------------------------------------------------------------------------------------------


@triton.jit
def store_codes(ptr, codes, limit, BITS: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
                FLIPPED: tl.constexpr):  # fmt: skip
    """Store codes [groups, width], clean integers; FLIPPED ones still need their top bit inverted."""
    elements: tl.constexpr = TILE.groups * TILE.width
    edge: tl.constexpr = TILE.edge
    if BITS >= 8 and not WORDS:
        size: tl.constexpr = 1
        if BITS == 8:
            codes = (codes ^ (0x80 if FLIPPED else 0)).to(tl.uint8)
    elif BITS & (BITS - 1) == 0:
        held: tl.constexpr = 32 if WORDS else 8
        size: tl.constexpr = held // BITS
        codes = codes.reshape([elements])
        for level in tl.static_range(5):
            if (BITS << level) < held:
                low, high = codes.reshape([elements // (2 << level), 2]).split()
                codes = low + (high << (BITS << level))
        if FLIPPED:
            # The top bit of every code of a word, as the signed number that an int32 constant must be.
            pattern: tl.constexpr = ((1 << 32) - 1) // ((1 << BITS) - 1) * (1 << (BITS - 1)) - (1 << 32)
            codes = codes ^ pattern
        codes = codes if WORDS else codes.to(tl.uint8)
    else:
        size: tl.constexpr = 8
        if FLIPPED:
            codes = codes ^ (1 << (BITS - 1))
        codes = codes if BITS == 3 else codes.to(tl.int64)
        for level in tl.static_range(3):
            low, high = codes.reshape([elements // (2 << level), 2]).split()
            codes = low + (high << (BITS << level))
    place, real = places(TILE, size)
    codes = codes.reshape([elements // size])
    if BITS == 3 or BITS == 5 or BITS == 6 or BITS == 7:
        for byte in tl.static_range(BITS):
            at = place * BITS + byte
            tl.store(ptr + at, (codes >> (8 * byte)).to(tl.uint8), mask=real & (at * 8 < limit * BITS))
    elif TILE.masked:
        count = (limit + (size - 1)) // size
        if edge % size == 0:
            count = tl.multiple_of(count, edge // size)
        tl.store(ptr + place, codes, mask=real & (place < count))
    else:
        tl.store(ptr + place, codes)


# -- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def decode_tile(codes, scales, zeros, levels, limit, left, FORM: tl.constexpr, TILE: tl.constexpr,
                WORDS: tl.constexpr, BYTEWISE: tl.constexpr):  # fmt: skip
    """The tile whose codes, scales and zero points start at these pointers, as two factors of fp32 values."""
    ELEMENT: tl.constexpr = FORM.element
    BITS: tl.constexpr = FORM.bits
    SCALE: tl.constexpr = FORM.scale
    if SCALE == SCALE_NONE:
        code = load_codes(codes, limit, BITS, TILE, WORDS, True)
        value = cast_value(code, ELEMENT, FORM.fp8)
        scale = tl.full([1, 1], 1.0, tl.float32)
    else:
        group = tl.arange(0, TILE.groups)
        if TILE.masked:
            stored = tl.load(scales + group, mask=group < left, other=0)
        else:
            stored = load_scales(scales + group)
        scale = scale_value(stored, SCALE)[:, None]
        if BYTEWISE:
            value = load_bytewise(codes, limit, TILE)
            scale = scale * 0.0625
        elif ELEMENT == AFFINE:
            zero = tl.load(zeros + group, mask=group < left, other=0).to(tl.int32)
            value = load_whole(codes, zero, limit, BITS, 0, TILE, WORDS)
        elif ELEMENT == INT:
            zero = tl.zeros([TILE.groups], tl.int32)
            half: tl.constexpr = 1 << (BITS - 1)
            value = load_whole(codes, zero, limit, BITS, half, TILE, WORDS)
        else:
            code = load_codes(codes, limit, BITS, TILE, WORDS, ELEMENT != LEVELS)
            if ELEMENT == SIGN:
                value = as_float((code << 31) | 0x3F800000)
            elif ELEMENT == LEVELS:
                value = as_float(lookup(levels, code, 1 << BITS))
            else:
                value = cast_value(code, ELEMENT, FORM.fp8)
    return value, scale


@triton.jit
def codes_under(x, inverse, zero, draws, cells, slope, middle, bend, reach, FORM: tl.constexpr, SEARCH: tl.constexpr,
                CLOSE: tl.constexpr, STOCHASTIC: tl.constexpr):  # fmt: skip
    """The codes of x [groups, width] under scales [groups] whose reciprocals are given. INT codes have their top bit
    flipped.

    CLOSE: the scales were only ever cut by a rounding error, which leaves |y| that close to the largest code or level.
    Otherwise nothing is known of how large y is.
    """
    ELEMENT: tl.constexpr = FORM.element
    BITS: tl.constexpr = FORM.bits
    if ELEMENT == SIGN:
        code = (as_bits(x) >> 31) & 1
    else:
        y = x * inverse[:, None]
        if ELEMENT == LEVELS:
            if SEARCH.steps == 0:
                code = count_near(y, cells, bend, slope, middle, reach, SEARCH.cells, CLOSE)
            else:
                code = count_below(y, cells, slope, middle, SEARCH.cells, SEARCH.steps, SEARCH.searched, CLOSE)
        elif ELEMENT == E4M3 or ELEMENT == E5M2:
            code = cast_bits(y, ELEMENT, FORM.fp8)
        else:
            low: tl.constexpr = -(1 << (BITS - 1)) + (0 if FORM.signed else 1)
            open: tl.constexpr = FORM.signed and CLOSE and (FORM.scale == SCALE_FP32 or BITS <= 5)
            code = quantize(y, zero[:, None], draws, ELEMENT, BITS, low, STOCHASTIC, open)
    return code


@triton.jit
def choose_codes(x, zeros, second, finite, inverse, row, start, left, seed, cells, slope, middle, bend, reach,
                 FORM: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr):  # fmt: skip
    """The codes of x [groups, width], whose blocks have these scales; stores zero points where codes are affine."""
    ELEMENT: tl.constexpr = FORM.element
    BITS: tl.constexpr = FORM.bits
    STOCHASTIC: tl.constexpr = FORM.stochastic and (ELEMENT == INT or ELEMENT == AFFINE)
    close: tl.constexpr = FORM.scale == SCALE_FP32 or FORM.scale == SCALE_BF16
    zero = tl.zeros([TILE.groups], tl.int32)
    if ELEMENT == AFFINE:
        index = tl.arange(0, TILE.groups)
        zero = tl.where(finite, zero_points(second, inverse, BITS, STOCHASTIC), 0)
        tl.store(zeros + index, zero.to(tl.uint8), mask=index < left)
    draws = x
    if STOCHASTIC:
        place, _ = places(TILE, 1)
        key = mix64((seed + row).to(tl.uint64))
        draws = uniform(key, start, place).reshape([TILE.groups, TILE.width])
    code = codes_under(x, inverse, zero, draws, cells, slope, middle, bend, reach, FORM, SEARCH, close, STOCHASTIC)
    nothing: tl.constexpr = (1 << (BITS - 1)) if ELEMENT == INT else 0
    return tl.where(finite[:, None], code, nothing)


@triton.jit
def encode_tile(x, codes, scales, zeros, first, second, row, start, limit, left, block, last_size, step, top_scale,
                seed, cells, slope, middle, bend, reach, FORM: tl.constexpr, TILE: tl.constexpr,
                SEARCH: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Encode x [groups, width] into the bytes at these pointers. In chunks, `first` and `second` measure its block."""
    ELEMENT: tl.constexpr = FORM.element
    BITS: tl.constexpr = FORM.bits
    SCALE: tl.constexpr = FORM.scale
    MASKED: tl.constexpr = TILE.masked
    CHUNKED: tl.constexpr = TILE.chunked
    if SCALE == SCALE_NONE:
        code = cast_bits(x, ELEMENT, FORM.fp8)
    else:
        index = tl.arange(0, TILE.groups)
        if not CHUNKED:
            first, second = measure(x, ELEMENT, TILE.width)
        sizes = tl.where(index == left - 1, last_size, block)
        scale, finite = choose_scale(first, second, sizes, step, top_scale, ELEMENT, SCALE, FORM.signed)
        inverse = reciprocal(scale)
        if MASKED:
            tl.store(scales + index, scale_bits(scale, finite, SCALE), mask=index < left)
        else:
            tl.store(scales + index, scale_bits(scale, finite, SCALE))
        code = choose_codes(x, zeros, second, finite, inverse, row, start, left, seed, cells, slope, middle, bend,
                            reach, FORM, TILE, SEARCH)  # fmt: skip
    if MASKED and BITS < 8 and (ELEMENT == AFFINE or ELEMENT == LEVELS):
        # Zero stands for something there: the bits after a row's last code must be zero all the same.
        place, real = places(TILE, 1)
        code = tl.where((place < limit).reshape([TILE.groups, TILE.width]), code, 0)
    store_codes(codes, code, limit, BITS, TILE, WORDS, ELEMENT == INT)
