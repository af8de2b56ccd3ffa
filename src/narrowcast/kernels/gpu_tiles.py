"""Triton: tiles of a row between memory and registers.

A program works on one tile: GROUPS blocks of BLOCK elements, each padded to WIDTH, a power of two. Blocks too large
for that are taken in chunks of WIDTH elements (CHUNKED). `limit` counts the tile's elements that exist; where
MASKED is false they all do, and no mask costs anything.

Codes narrower than a byte are packed in registers: neighbours lie in the same thread, so that pairs join and split
without leaving it. Aligned tiles move as 32-bit words, others as bytes.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
# ruff: noqa: RUF059, SIM108, SIM109
import triton
import triton.language as tl

from narrowcast.kernels.gpu_codes import (
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
    count_below,
    insert,
    lookup,
    mix64,
    quantize,
    reciprocal,
    to_float32,
    uniform,
)
from narrowcast.kernels.gpu_scales import (
    SCALE_BF16,
    SCALE_FP32,
    SCALE_NONE,
    choose_scale,
    measure,
    scale_bits,
    scale_value,
    zero_points,
)


@triton.jit
def locate(
    tiles,
    first_tile,
    chunks,
    block,
    numel,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKED: tl.constexpr,
    ALIGN: tl.constexpr,
    EDGE: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """This program's row, tile, first block, first element, and how many of its elements exist."""
    program = tl.program_id(0)
    if SINGLE:
        # One row: no division.
        row = (program * 0).to(tl.int64)
        tile = (program + first_tile).to(tl.int64)
    else:
        row = (program // tiles).to(tl.int64)
        tile = (program % tiles + first_tile).to(tl.int64)
    if CHUNKED:
        group = tile // chunks
        inside = (tile % chunks) * WIDTH
        start = group * block + inside
        limit = tl.minimum(block - inside, numel - start)
    else:
        group = tile * GROUPS
        start = group * BLOCK
        limit = numel - start
    # The compiler cannot see these, and without them it will not move 16 bytes at once.
    start = tl.multiple_of(start, ALIGN)
    limit = tl.multiple_of(tl.minimum(limit, GROUPS * WIDTH).to(tl.int32), EDGE)
    return row, tile, group, start, limit


@triton.jit
def places(COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Where COUNT things lie that come in blocks of BLOCK, padded to WIDTH; and which are no padding."""
    index = tl.arange(0, COUNT)
    if WIDTH == BLOCK:
        place = index
        real = index >= 0
    else:
        place = index // WIDTH * BLOCK + index % WIDTH
        real = index % WIDTH < BLOCK
    return place, real


@triton.jit
def load_floats(
    x,
    limit,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT_NAN: tl.constexpr,
):
    """The tile at pointer x as fp32 [GROUPS, WIDTH], zero where nothing exists."""
    place, real = places(GROUPS * WIDTH, WIDTH, BLOCK)
    if MASKED:
        loaded = tl.load(x + place, mask=real & (place < limit), other=0)
    else:
        loaded = tl.load(x + place)
    return to_float32(loaded, EXACT_NAN).reshape([GROUPS, WIDTH])


@triton.jit
def store_floats(
    out, bits, limit, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    place, real = places(GROUPS * WIDTH, WIDTH, BLOCK)
    bits = bits.reshape([GROUPS * WIDTH])
    if MASKED:
        tl.store(out + place, bits, mask=real & (place < limit))
    else:
        tl.store(out + place, bits)


# -- codes <-> bytes ------------------------------------------------------------------------------------------------


@triton.jit
def load_units(ptr, limit, SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
               MASKED: tl.constexpr, EDGE: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """The tile's codes in units of SIZE codes each, STRIDE pointer steps apart."""
    place, real = places(GROUPS * WIDTH // SIZE, WIDTH // SIZE, BLOCK // SIZE)
    if MASKED:
        count = (limit + (SIZE - 1)) // SIZE
        if EDGE % SIZE == 0:
            count = tl.multiple_of(count, EDGE // SIZE)
        units = tl.load(ptr + place * STRIDE, mask=real & (place < count), other=0)
    else:
        units = tl.load(ptr + place * STRIDE)
    return units


@triton.jit
def load_codes(ptr, limit, BITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
               MASKED: tl.constexpr, EDGE: tl.constexpr, WORDS: tl.constexpr, CLEAN: tl.constexpr):  # fmt: skip
    """The tile's codes as integers [GROUPS, WIDTH]; those of 16 and 32 bits as they lie in memory.

    Where CLEAN is false, the bits above a code are left as they come.
    """
    if BITS == 16 or BITS == 32:
        codes = load_units(ptr, limit, 1, GROUPS, BLOCK, WIDTH, MASKED, EDGE, 1)
    elif BITS & (BITS - 1) == 0:
        held: tl.constexpr = 32 if WORDS else 8
        codes = load_units(ptr, limit, held // BITS, GROUPS, BLOCK, WIDTH, MASKED, EDGE, 1).to(tl.int32)
        for level in tl.static_range(5):
            if (16 >> level) >= BITS and (16 >> level) < held:
                codes = tl.join(codes, codes >> (16 >> level))
        if CLEAN:
            codes = codes & ((1 << BITS) - 1)
    else:
        # Eight codes in BITS bytes.
        kind = tl.int32 if BITS == 3 else tl.int64
        codes = load_units(ptr, limit, 8, GROUPS, BLOCK, WIDTH, MASKED, EDGE, BITS).to(kind)
        for byte in tl.static_range(1, BITS):
            more = load_units(ptr + byte, limit, 8, GROUPS, BLOCK, WIDTH, MASKED, EDGE, BITS).to(kind)
            codes = codes | (more << (8 * byte))
        codes = tl.join(codes, codes >> (4 * BITS))
        codes = tl.join(codes, codes >> (2 * BITS))
        codes = (tl.join(codes, codes >> BITS) & ((1 << BITS) - 1)).to(tl.int32)
    return codes.reshape([GROUPS, WIDTH])


@triton.jit
def store_codes(ptr, codes, limit, BITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
                WIDTH: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, WORDS: tl.constexpr,
                FLIPPED: tl.constexpr):  # fmt: skip
    """Store codes [GROUPS, WIDTH], clean integers; FLIPPED ones still need their top bit inverted."""
    if BITS >= 8 and not WORDS:
        size: tl.constexpr = 1
        if BITS == 8:
            codes = (codes ^ (0x80 if FLIPPED else 0)).to(tl.uint8)
    elif BITS & (BITS - 1) == 0:
        held: tl.constexpr = 32 if WORDS else 8
        size: tl.constexpr = held // BITS
        codes = codes.reshape([GROUPS * WIDTH])
        for level in tl.static_range(5):
            if (BITS << level) < held:
                low, high = codes.reshape([GROUPS * WIDTH // (2 << level), 2]).split()
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
            low, high = codes.reshape([GROUPS * WIDTH // (2 << level), 2]).split()
            codes = low + (high << (BITS << level))
    place, real = places(GROUPS * WIDTH // size, WIDTH // size, BLOCK // size)
    codes = codes.reshape([GROUPS * WIDTH // size])
    if BITS == 3 or BITS == 5 or BITS == 6 or BITS == 7:
        for byte in tl.static_range(BITS):
            at = place * BITS + byte
            tl.store(ptr + at, (codes >> (8 * byte)).to(tl.uint8), mask=real & (at * 8 < limit * BITS))
    elif MASKED:
        count = (limit + (size - 1)) // size
        if EDGE % size == 0:
            count = tl.multiple_of(count, EDGE // size)
        tl.store(ptr + place, codes, mask=real & (place < count))
    else:
        tl.store(ptr + place, codes)


@triton.jit
def field(word, offset, AT: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """The BITS bits of `word` from bit AT on as an fp32 number, two's complement if HALF is set, less `offset`.

    Under the exponent of 2**(23 - AT) the field's lowest bit weighs 1; taking that power away leaves the number.
    """
    shifted = insert(word, ((1 << BITS) - 1) << AT, ((150 - AT) << 23) ^ (HALF << AT))
    return as_float(shifted) - ((1 << (23 - AT)) + HALF + offset).to(tl.float32)


@triton.jit
def join_eight(a, b, c, d, e, f, g, h):
    """Eight neighbours from eight tensors, along three new dimensions."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    return tl.join(even, tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def load_whole(ptr, zeros, limit, BITS: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
               WIDTH: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """INT codes (HALF set) or AFFINE codes less their zero point, as fp32 whole numbers [GROUPS, WIDTH]."""
    if WORDS and BITS > 1:
        words = load_units(ptr, limit, 32 // BITS, GROUPS, BLOCK, WIDTH, MASKED, EDGE, 1)
        words = words.reshape([GROUPS, WIDTH * BITS // 32])
        offset = zeros[:, None].to(tl.int32)
        if BITS == 8:
            even = tl.join(field(words, offset, 0, 8, HALF), field(words >> 16, offset, 0, 8, HALF))
            odd = tl.join(field(words, offset, 8, 8, HALF), field(words >> 16, offset, 8, 8, HALF))
            whole = tl.join(even, odd)
        elif BITS == 4:
            # Five fields lie where a mantissa does; the others are brought there.
            rest = words >> 20
            whole = join_eight(
                field(words, offset, 0, 4, HALF), field(words, offset, 4, 4, HALF),
                field(words, offset, 8, 4, HALF), field(words, offset, 12, 4, HALF),
                field(words, offset, 16, 4, HALF), field(rest, offset, 0, 4, HALF),
                field(rest, offset, 4, 4, HALF), field(rest, offset, 8, 4, HALF))  # fmt: skip
        else:
            words = tl.join(words, words >> 16)
            offset = zeros[:, None, None].to(tl.int32)
            whole = join_eight(
                field(words, offset, 0, 2, HALF), field(words, offset, 2, 2, HALF),
                field(words, offset, 4, 2, HALF), field(words, offset, 6, 2, HALF),
                field(words, offset, 8, 2, HALF), field(words, offset, 10, 2, HALF),
                field(words, offset, 12, 2, HALF), field(words, offset, 14, 2, HALF))  # fmt: skip
        whole = whole.reshape([GROUPS, WIDTH])
    else:
        codes = load_codes(ptr, limit, BITS, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS, True)
        whole = as_float(codes ^ (0x4B000000 | HALF)) - (8388608 + HALF + zeros[:, None]).to(tl.float32)
    return whole


# -- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def decode_tile(codes, scales, zeros, levels, limit, left, ELEMENT: tl.constexpr, BITS: tl.constexpr,
                SCALE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
                MASKED: tl.constexpr, EDGE: tl.constexpr, WORDS: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """The tile whose codes, scales and zero points start at these pointers, as two factors of fp32 values."""
    if SCALE == SCALE_NONE:
        code = load_codes(codes, limit, BITS, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS, True)
        value = cast_value(code, ELEMENT, FP8)
        scale = tl.full([1, 1], 1.0, tl.float32)
    else:
        group = tl.arange(0, GROUPS)
        if MASKED:
            stored = tl.load(scales + group, mask=group < left, other=0)
        else:
            stored = tl.load(scales + group)
        scale = scale_value(stored, SCALE)[:, None]
        if ELEMENT == AFFINE:
            zero = tl.load(zeros + group, mask=group < left, other=0).to(tl.int32)
            value = load_whole(codes, zero, limit, BITS, 0, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS)
        elif ELEMENT == INT:
            zero = tl.zeros([GROUPS], tl.int32)
            half: tl.constexpr = 1 << (BITS - 1)
            value = load_whole(codes, zero, limit, BITS, half, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS)
        else:
            code = load_codes(codes, limit, BITS, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS, ELEMENT != LEVELS)
            if ELEMENT == SIGN:
                value = as_float((code << 31) | 0x3F800000)
            elif ELEMENT == LEVELS:
                value = as_float(lookup(levels, code, 1 << BITS))
            else:
                value = cast_value(code, ELEMENT, FP8)
    return value, scale


@triton.jit
def encode_tile(x, codes, scales, zeros, first, second, row, group, start, limit, left, block, last_size, step,
                top_scale, seed, cells, slope, middle,
                ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr,
                SIGNED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
                MASKED: tl.constexpr, EDGE: tl.constexpr, WORDS: tl.constexpr, FP8: tl.constexpr,
                CELLS: tl.constexpr, STEPS: tl.constexpr, SEARCHED: tl.constexpr,
                CHUNKED: tl.constexpr):  # fmt: skip
    """Encode x [GROUPS, WIDTH] into the bytes at these pointers. CHUNKED: `first` and `second` measure its block."""
    if SCALE == SCALE_NONE:
        code = cast_bits(x, ELEMENT, FP8)
    else:
        index = tl.arange(0, GROUPS)
        if not CHUNKED:
            first, second = measure(x, ELEMENT, WIDTH)
        sizes = tl.where(index == left - 1, last_size, block)
        scale, finite = choose_scale(first, second, sizes, step, top_scale, ELEMENT, SCALE, SIGNED)
        inverse = reciprocal(scale)
        tl.store(scales + index, scale_bits(scale, finite, SCALE), mask=index < left)
        # A scale that is only ever cut by a rounding error leaves |y| that close to the largest code or level.
        close: tl.constexpr = SCALE == SCALE_FP32 or SCALE == SCALE_BF16
        nothing: tl.constexpr = (1 << (BITS - 1)) if ELEMENT == INT else 0
        if ELEMENT == SIGN:
            code = (as_bits(x) >> 31) & 1
        else:
            y = x * inverse[:, None]
            if ELEMENT == LEVELS:
                code = count_below(y, cells, slope, middle, CELLS, STEPS, SEARCHED, close)
            elif ELEMENT == E4M3 or ELEMENT == E5M2:
                code = cast_bits(y, ELEMENT, FP8)
            else:
                zero = tl.zeros([GROUPS], tl.int32)
                if ELEMENT == AFFINE:
                    zero = tl.where(finite, zero_points(second, inverse, BITS), 0)
                    tl.store(zeros + index, zero.to(tl.uint8), mask=index < left)
                draws = y
                if STOCHASTIC:
                    place, _ = places(GROUPS * WIDTH, WIDTH, BLOCK)
                    key = mix64((seed + row).to(tl.uint64))
                    draws = uniform(key, start, place).reshape([GROUPS, WIDTH])
                low: tl.constexpr = -(1 << (BITS - 1)) + (0 if SIGNED else 1)
                open: tl.constexpr = SIGNED and close and (SCALE == SCALE_FP32 or BITS <= 5)
                code = quantize(y, zero[:, None], draws, ELEMENT, BITS, low, STOCHASTIC, open)
        code = tl.where(finite[:, None], code, nothing)
    if MASKED and BITS < 8 and (ELEMENT == AFFINE or ELEMENT == LEVELS):
        # Zero stands for something there: the bits after a row's last code must be zero all the same.
        place, real = places(GROUPS * WIDTH, WIDTH, BLOCK)
        code = tl.where((place < limit).reshape([GROUPS, WIDTH]), code, 0)
    store_codes(codes, code, limit, BITS, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS, ELEMENT == INT)
