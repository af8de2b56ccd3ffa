"""Triton: the kernels. Each program of a grid takes one tile of one row; see tiles.py.

    encode             floats -> bytes
    measure            floats -> statistics of chunks, for blocks larger than a tile; `fold` combines them
    decode             bytes  -> floats, summed over ranks where there are several
    decode_sum_encode  bytes  -> bytes, decode and encode of a tile in one

What a kernel is compiled for comes in groups: FORM, TILE, SEARCH and SUM (groups.py). Counts and offsets change from
call to call and are not specialised on: a kernel compiles once per format, dtype and tile, not once per size. They come
one by one, since Triton 3.4 would specialise on what a tuple holds.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
# ruff: noqa: RUF059
import triton
import triton.language as tl

from narrowcast.kernels.triton.codes import AFFINE, FLT_MAX, FP32, INT, NAN_BITS, as_bits, as_float, to_output
from narrowcast.kernels.triton.scales import SCALE_NONE, combine, measure
from narrowcast.kernels.triton.tiles import decode_tile, encode_tile, load_floats, locate, store_floats
from narrowcast.kernels.triton.words import places

FOLD = tl.constexpr(1024)
"""Statistics that one program of `fold_kernel` combines."""

HUGE_SCALE_BITS = tl.constexpr(0x78800000)
"""Of 2**114, in fp32: with codes and whole levels below 2**13, a product with a smaller scale is finite."""

_COUNTS = ["numel", "tiles", "first_tile", "chunks", "block", "groups", "last_size", "seed"]
_OFFSETS = ["codes_end", "scales_at", "zeros_at", "end"]


@triton.jit
def product(value, scale, ELEMENT: tl.constexpr):
    """What a code stands for; an affine block may span more than fp32 does, and is cut there."""
    result = value * scale
    if ELEMENT == AFFINE:
        result = tl.minimum(result, FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
        result = tl.maximum(result, -FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
    return result


@triton.jit
def first_rank(codes, scales, zeros, levels, own, limit, left, FORM: tl.constexpr, TILE: tl.constexpr,
               SUM: tl.constexpr, FUSED: tl.constexpr):  # fmt: skip
    """The tile of rank 0, with which a sum begins."""
    ELEMENT: tl.constexpr = FORM.element
    SCALE: tl.constexpr = FORM.scale
    RANKS: tl.constexpr = SUM.ranks
    OWN_RANK: tl.constexpr = SUM.own_rank
    if OWN_RANK == 0:
        total = load_floats(own, limit, TILE, False)
    else:
        value, scale = decode_tile(codes, scales, zeros, levels, limit, left, FORM, TILE, SUM.words, False)
        if SCALE == SCALE_NONE:
            total = value
        elif ELEMENT == INT and FUSED:
            nothing = tl.zeros([TILE.groups, TILE.width], tl.float32)
            total = tl.fma(value, tl.broadcast_to(scale, [TILE.groups, TILE.width]), nothing)
        else:
            total = product(value, scale, ELEMENT)
    if ELEMENT == INT and (OWN_RANK == 0 or not FUSED) and (OWN_RANK != 0 or RANKS != 1):
        # A zero times a negative scale is a zero all the same: once the sum is no -0.0, no term makes it one.
        total = total + 0.0
    return total


@triton.jit
def add_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks, FORM: tl.constexpr, TILE: tl.constexpr,
              SUM: tl.constexpr, FUSED: tl.constexpr, BYTEWISE: tl.constexpr):  # fmt: skip
    """The tile's sum over ranks, in order, and where it is FUSED the bits of each block's largest scale.

    `SUM.ranks` is 0 where their number is only known when the kernel runs. Where it is known, rank r is read by
    `load_bytewise` if bit r % 8 of BYTEWISE says so.
    """
    ELEMENT: tl.constexpr = FORM.element
    SCALE: tl.constexpr = FORM.scale
    RANKS: tl.constexpr = SUM.ranks
    OWN_RANK: tl.constexpr = SUM.own_rank
    codes_apart: tl.constexpr = 16 // SUM.code_size
    scales_apart: tl.constexpr = 16 // FORM.scale_size
    largest = tl.zeros([TILE.groups, 1], tl.int32)
    total = first_rank(codes, scales, zeros, levels, own, limit, left, FORM, TILE, SUM, FUSED)
    # Rows start at multiples of 16 bytes.
    apart = (row_bytes >> 4).to(tl.int64)
    if RANKS == 0:
        for rank in range(1, ranks):
            if rank == OWN_RANK:
                total = total + load_floats(own, limit, TILE, False)
            else:
                value, scale = decode_tile(codes + apart * (rank * codes_apart), scales + apart * (rank * scales_apart),
                                           zeros + apart * (rank * 16), levels, limit, left, FORM, TILE, SUM.words,
                                           False)  # fmt: skip
                total = total + (value if SCALE == SCALE_NONE else product(value, scale, ELEMENT))
    else:
        for rank in tl.static_range(1, RANKS):
            if rank == OWN_RANK:
                total = total + load_floats(own, limit, TILE, False)
            else:
                value, scale = decode_tile(codes + apart * (rank * codes_apart), scales + apart * (rank * scales_apart),
                                           zeros + apart * (rank * 16), levels, limit, left, FORM, TILE, SUM.words,
                                           (BYTEWISE >> (rank % 8)) % 2 == 1)  # fmt: skip
                if SCALE == SCALE_NONE:
                    total = total + value
                elif FUSED:
                    # The product of so few bits is exact, so one rounding is all there is in either case.
                    total = tl.fma(value, tl.broadcast_to(scale, [TILE.groups, TILE.width]), total)
                    largest = tl.maximum(largest, as_bits(scale) & 0x7FFFFFFF)
                else:
                    total = total + product(value, scale, ELEMENT)
    return total, largest


@triton.jit
def sum_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks, divisor, FORM: tl.constexpr,
              TILE: tl.constexpr, SUM: tl.constexpr):  # fmt: skip
    """The tile's sum over ranks, in order, divided."""
    FUSED: tl.constexpr = SUM.fused
    total, largest = add_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks, FORM, TILE, SUM, FUSED,
                               SUM.bytewise)  # fmt: skip
    if FUSED and SUM.ranks > 1:  # noqa: SIM102 - this one is decided when the kernel is compiled
        # A scale that no encoder writes may make a product overflow, which fused would not be infinite.
        if tl.max(largest) > HUGE_SCALE_BITS:
            total, largest = add_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks, FORM, TILE,
                                       SUM, False, 0)  # fmt: skip
    if SUM.divide == "multiply":
        total = total * divisor
    elif SUM.divide == "divide":
        total = tl.div_rn(total, divisor)
    return total


@triton.jit
def codes_place(start, FORM: tl.constexpr, TILE: tl.constexpr):
    """The byte of a row at which the codes from element `start` on begin."""
    BITS: tl.constexpr = FORM.bits
    align: tl.constexpr = TILE.align * BITS // 8
    return tl.multiple_of(start // 8 * BITS if BITS < 8 else start * (BITS // 8), align)


@triton.jit(do_not_specialize=_COUNTS + _OFFSETS)
def encode_kernel(codes, scales, out, x, first, second, cells, x_stride, row_bytes, numel, tiles, first_tile, chunks,
                  block, groups, last_size, codes_end, scales_at, zeros_at, end, step, top_scale, seed, slope, middle,
                  bend, reach, FORM: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr, CODE_SIZE: tl.constexpr,
                  SINGLE: tl.constexpr):  # fmt: skip
    """`codes`, `scales` and `out` are the same bytes, seen as the integers that each needs."""
    row, tile, group, start, limit = locate(tiles, first_tile, chunks, block, numel, TILE, SINGLE)
    values = load_floats(x + row * x_stride + start, limit, TILE, FORM.element == FP32)
    a, b = 0, 0
    if TILE.chunked:
        at = row * groups + group + tl.arange(0, 1)
        a, b = tl.load(first + at), tl.load(second + at)
    base = row * row_bytes
    encode_tile(values, codes + (base + codes_place(start, FORM, TILE)) // CODE_SIZE,
                scales + (base + scales_at) // FORM.scale_size + group, out + base + zeros_at + group, a, b, row, start,
                limit, groups - group, block, last_size, step, top_scale, seed, cells, slope, middle, bend, reach, FORM,
                TILE, SEARCH, False)  # fmt: skip
    if tile == 0:
        store_padding(out + base, codes_end, scales_at, end, row_bytes)


@triton.jit
def store_padding(out, codes_end, scales_at, end, row_bytes):
    """Zeros between codes and scales, and after everything: under 16 bytes each."""
    index = tl.arange(0, 16)
    nothing = tl.zeros([16], tl.uint8)
    tl.store(out + codes_end + index, nothing, mask=codes_end + index < scales_at)
    tl.store(out + end + index, nothing, mask=end + index < row_bytes)


@triton.jit(do_not_specialize=_COUNTS)
def measure_kernel(first, second, x, x_stride, numel, tiles, first_tile, chunks, block, ELEMENT: tl.constexpr,
                   TILE: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """Statistics of every chunk, [rows, tiles]."""
    row, tile, group, start, limit = locate(tiles, first_tile, chunks, block, numel, TILE, SINGLE)
    values = load_floats(x + row * x_stride + start, limit, TILE, False)
    a, b = measure(values, ELEMENT, TILE.width)
    at = row * tiles + tile + tl.arange(0, 1)
    tl.store(first + at, a)
    tl.store(second + at, b)


@triton.jit(do_not_specialize=["count", "parts"])
def fold_kernel(to_first, to_second, first, second, count, parts, ELEMENT: tl.constexpr):
    """[blocks, count] statistics to [blocks, parts], FOLD neighbours at a time."""
    program = tl.program_id(0)
    block = (program // parts).to(tl.int64)
    index = program % parts * FOLD + tl.arange(0, FOLD)
    at = block * count + index
    a = tl.load(first + at, mask=index < count, other=0).reshape([1, FOLD])
    b = tl.load(second + at, mask=index < count, other=0).reshape([1, FOLD])
    a, b = combine(a, b, ELEMENT, FOLD)
    to = program + tl.arange(0, 1)
    tl.store(to_first + to, a)
    tl.store(to_second + to, b)


@triton.jit(do_not_specialize=[*_COUNTS, *_OFFSETS, "ranks"])
def decode_kernel(out, codes, scales, data, levels, own, out_stride, row_bytes, numel, tiles, first_tile, chunks, block,
                  groups, scales_at, zeros_at, ranks, divisor, FORM: tl.constexpr, TILE: tl.constexpr,
                  SUM: tl.constexpr, OUTPUT: tl.constexpr, RAW: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """Row r of `out` from row r of `data`, or one row from the sum of `ranks` rows."""
    row, tile, group, start, limit = locate(tiles, first_tile, chunks, block, numel, TILE, SINGLE)
    base = row * row_bytes
    total = sum_ranks(codes + (base + codes_place(start, FORM, TILE)) // SUM.code_size,
                      scales + (base + scales_at) // FORM.scale_size + group, data + base + zeros_at + group, levels,
                      own + start, limit, groups - group, row_bytes, ranks, divisor, FORM, TILE, SUM)  # fmt: skip
    bits = to_output(total, OUTPUT, RAW)
    store_floats(out + row * out_stride + start, bits, limit, TILE)


@triton.jit(do_not_specialize=[*_COUNTS, *_OFFSETS, "ranks"])
def decode_sum_encode_kernel(to_codes, to_scales, out, codes, scales, data, levels, own, cells, row_bytes, stride,
                             numel, tiles, first_tile, block, groups, last_size, codes_end, scales_at, zeros_at, end,
                             ranks, divisor, step, top_scale, seed, slope, middle, bend, reach, FORM: tl.constexpr,
                             TILE: tl.constexpr, SEARCH: tl.constexpr, SUM: tl.constexpr, STORE_WORDS: tl.constexpr,
                             TO_SIZE: tl.constexpr):  # fmt: skip
    """One row from the sum of `ranks` rows, for blocks that fit in a tile."""
    MASKED: tl.constexpr = TILE.masked
    row, tile, group, start, limit = locate(tiles, first_tile, 1, block, numel, TILE, True)
    codes_at = codes_place(start, FORM, TILE)
    total = sum_ranks(codes + codes_at // SUM.code_size, scales + scales_at // FORM.scale_size + group,
                      data + zeros_at + group, levels, own + start, limit, groups - group, stride, ranks, divisor, FORM,
                      TILE, SUM)  # fmt: skip
    if FORM.element == FP32:
        total = as_float(tl.where(total != total, NAN_BITS, as_bits(total)))
    if MASKED:
        place, real = places(TILE, 1)
        total = tl.where((real & (place < limit)).reshape([TILE.groups, TILE.width]), total, 0.0)
    encode_tile(total, to_codes + codes_at // TO_SIZE, to_scales + scales_at // FORM.scale_size + group,
                out + zeros_at + group, 0, 0, row, start, limit, groups - group, block, last_size, step, top_scale,
                seed, cells, slope, middle, bend, reach, FORM, TILE, SEARCH, STORE_WORDS)  # fmt: skip
    if tile == 0:
        store_padding(out, codes_end, scales_at, end, row_bytes)
