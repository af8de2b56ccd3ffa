"""Triton: the kernels. Each program of a grid takes one tile of one row; see gpu_tiles.py.

    encode   floats -> bytes
    measure  floats -> statistics of chunks, for blocks larger than a tile; `fold` combines them, `encode` reads them
    decode   bytes  -> floats, summed over ranks where there are several
    reduce   bytes  -> bytes, decode and encode of a tile in one

Counts and offsets that change from call to call are not specialised on: a kernel compiles once per format, dtype
and tile, not once per size.
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

HUGE_SCALE_BITS = tl.constexpr(0x7A800000)
"""Of 2**118, in fp32: with codes below 2**9, a product with a smaller scale is finite."""

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
def add_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks,
              ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
              BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr,
              WORDS: tl.constexpr, FP8: tl.constexpr, RANKS: tl.constexpr, OWN_RANK: tl.constexpr,
              FUSED: tl.constexpr, CODE_SIZE: tl.constexpr, SCALE_SIZE: tl.constexpr,
              BYTEWISE: tl.constexpr):  # fmt: skip
    """The tile's sum over ranks, in order, and where it is FUSED the bits of each block's largest scale.

    RANKS is 0 where their number is only known when the kernel runs. Where it is known, rank r is read by
    `load_bytewise` if bit r % 8 of BYTEWISE says so.
    """
    largest = tl.zeros([GROUPS, 1], tl.int32)
    if OWN_RANK == 0:
        total = load_floats(own, limit, GROUPS, BLOCK, WIDTH, MASKED, False)
    else:
        value, scale = decode_tile(codes, scales, zeros, levels, limit, left, ELEMENT, BITS, SCALE, GROUPS, BLOCK,
                                   WIDTH, MASKED, EDGE, WORDS, FP8, False)  # fmt: skip
        if SCALE == SCALE_NONE:
            total = value
        elif ELEMENT == INT and FUSED:
            total = tl.fma(value, tl.broadcast_to(scale, [GROUPS, WIDTH]), tl.zeros([GROUPS, WIDTH], tl.float32))
        else:
            total = product(value, scale, ELEMENT)
    if ELEMENT == INT and (OWN_RANK == 0 or not FUSED) and (OWN_RANK != 0 or RANKS != 1):
        # A zero times a negative scale is a zero all the same: once the sum is no -0.0, no term makes it one.
        total = total + 0.0
    # Rows start at multiples of 16 bytes.
    apart = (row_bytes >> 4).to(tl.int64)
    if RANKS == 0:
        for rank in range(1, ranks):
            if rank == OWN_RANK:
                total = total + load_floats(own, limit, GROUPS, BLOCK, WIDTH, MASKED, False)
            else:
                value, scale = decode_tile(codes + apart * (rank * (16 // CODE_SIZE)),
                                           scales + apart * (rank * (16 // SCALE_SIZE)), zeros + apart * (rank * 16),
                                           levels, limit, left, ELEMENT, BITS, SCALE, GROUPS, BLOCK, WIDTH, MASKED,
                                           EDGE, WORDS, FP8, False)  # fmt: skip
                total = total + (value if SCALE == SCALE_NONE else product(value, scale, ELEMENT))
    else:
        for rank in tl.static_range(1, RANKS):
            if rank == OWN_RANK:
                total = total + load_floats(own, limit, GROUPS, BLOCK, WIDTH, MASKED, False)
            else:
                value, scale = decode_tile(codes + apart * (rank * (16 // CODE_SIZE)),
                                           scales + apart * (rank * (16 // SCALE_SIZE)), zeros + apart * (rank * 16),
                                           levels, limit, left, ELEMENT, BITS, SCALE, GROUPS, BLOCK, WIDTH, MASKED,
                                           EDGE, WORDS, FP8, (BYTEWISE >> (rank % 8)) % 2 == 1)  # fmt: skip
                if SCALE == SCALE_NONE:
                    total = total + value
                elif FUSED:
                    # The product of so few bits is exact, so one rounding is all there is in either case.
                    total = tl.fma(value, tl.broadcast_to(scale, [GROUPS, WIDTH]), total)
                    largest = tl.maximum(largest, as_bits(scale) & 0x7FFFFFFF)
                else:
                    total = total + product(value, scale, ELEMENT)
    return total, largest


@triton.jit
def sum_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks, divisor,
              ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
              BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr,
              WORDS: tl.constexpr, FP8: tl.constexpr, RANKS: tl.constexpr, OWN_RANK: tl.constexpr,
              DIVIDE: tl.constexpr, FUSED: tl.constexpr, CODE_SIZE: tl.constexpr,
              SCALE_SIZE: tl.constexpr, BYTEWISE: tl.constexpr):  # fmt: skip
    """The tile's sum over ranks, in order, divided."""
    total, largest = add_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks, ELEMENT, BITS, SCALE,
                               GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS, FP8, RANKS, OWN_RANK, FUSED, CODE_SIZE,
                               SCALE_SIZE, BYTEWISE)  # fmt: skip
    if FUSED and RANKS > 1:  # noqa: SIM102 - this one is decided when the kernel is compiled
        # A scale that no encoder writes may make a product overflow, which fused would not be infinite.
        if tl.max(largest) > HUGE_SCALE_BITS:
            total, largest = add_ranks(codes, scales, zeros, levels, own, limit, left, row_bytes, ranks, ELEMENT, BITS,
                                       SCALE, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS, FP8, RANKS, OWN_RANK, False,
                                       CODE_SIZE, SCALE_SIZE, 0)  # fmt: skip
    if DIVIDE == "multiply":
        total = total * divisor
    elif DIVIDE == "divide":
        total = tl.div_rn(total, divisor)
    return total


@triton.jit(do_not_specialize=_COUNTS + _OFFSETS)
def encode_kernel(codes, scales, out, x, first, second, cells, x_stride, row_bytes, numel, tiles,
                  first_tile, chunks, block, groups, last_size, codes_end, scales_at, zeros_at, end, step, top_scale,
                  seed, slope, middle, bend, reach,
                  ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr,
                  SIGNED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
                  CHUNKED: tl.constexpr, MASKED: tl.constexpr, ALIGN: tl.constexpr, EDGE: tl.constexpr,
                  FP8: tl.constexpr, CELLS: tl.constexpr, STEPS: tl.constexpr, SEARCHED: tl.constexpr,
                  CODE_SIZE: tl.constexpr, SCALE_SIZE: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """`codes`, `scales` and `out` are the same bytes, seen as the integers that each needs."""
    row, tile, group, start, limit = locate(
        tiles, first_tile, chunks, block, numel, GROUPS, BLOCK, WIDTH, CHUNKED, ALIGN, EDGE, SINGLE
    )
    values = load_floats(x + row * x_stride + start, limit, GROUPS, BLOCK, WIDTH, MASKED, ELEMENT == FP32)
    a, b = 0, 0
    if CHUNKED:
        at = row * groups + group + tl.arange(0, 1)
        a, b = tl.load(first + at), tl.load(second + at)
    base = row * row_bytes
    codes_at = tl.multiple_of(start // 8 * BITS if BITS < 8 else start * (BITS // 8), ALIGN * BITS // 8)
    encode_tile(values, codes + (base + codes_at) // CODE_SIZE, scales + (base + scales_at) // SCALE_SIZE + group,
                out + base + zeros_at + group, a, b, row, group, start, limit, groups - group, block, last_size, step,
                top_scale, seed, cells, slope, middle, bend, reach, ELEMENT, BITS, SCALE, STOCHASTIC, SIGNED, GROUPS,
                BLOCK, WIDTH, MASKED, EDGE, False, FP8, CELLS, STEPS, SEARCHED, CHUNKED)  # fmt: skip
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
def measure_kernel(first, second, x, x_stride, numel, tiles, first_tile, chunks, block,
                   ELEMENT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, ALIGN: tl.constexpr,
                   EDGE: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """Statistics of every chunk, [rows, tiles]."""
    row, tile, group, start, limit = locate(
        tiles, first_tile, chunks, block, numel, 1, WIDTH, WIDTH, True, ALIGN, EDGE, SINGLE
    )
    values = load_floats(x + row * x_stride + start, limit, 1, WIDTH, WIDTH, MASKED, False)
    a, b = measure(values, ELEMENT, WIDTH)
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
def decode_kernel(out, codes, scales, data, levels, own, out_stride, row_bytes, numel, tiles, first_tile, chunks,
                  block, groups, scales_at, zeros_at, ranks, divisor,
                  ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
                  BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
                  ALIGN: tl.constexpr, EDGE: tl.constexpr, WORDS: tl.constexpr, FP8: tl.constexpr,
                  CODE_SIZE: tl.constexpr, SCALE_SIZE: tl.constexpr, RANKS: tl.constexpr, OWN_RANK: tl.constexpr,
                  DIVIDE: tl.constexpr, FUSED: tl.constexpr, BYTEWISE: tl.constexpr, OUTPUT: tl.constexpr,
                  RAW: tl.constexpr, SINGLE: tl.constexpr):  # fmt: skip
    """Row r of `out` from row r of `data`, or one row from the sum of `ranks` rows."""
    row, tile, group, start, limit = locate(
        tiles, first_tile, chunks, block, numel, GROUPS, BLOCK, WIDTH, CHUNKED, ALIGN, EDGE, SINGLE
    )
    base = row * row_bytes
    codes_at = tl.multiple_of(start // 8 * BITS if BITS < 8 else start * (BITS // 8), ALIGN * BITS // 8)
    total = sum_ranks(codes + (base + codes_at) // CODE_SIZE, scales + (base + scales_at) // SCALE_SIZE + group,
                      data + base + zeros_at + group, levels, own + start, limit, groups - group, row_bytes, ranks,
                      divisor, ELEMENT, BITS, SCALE, GROUPS, BLOCK, WIDTH, MASKED, EDGE, WORDS, FP8, RANKS, OWN_RANK,
                      DIVIDE, FUSED, CODE_SIZE, SCALE_SIZE, BYTEWISE)  # fmt: skip
    bits = to_output(total, OUTPUT, RAW)
    store_floats(out + row * out_stride + start, bits, limit, GROUPS, BLOCK, WIDTH, MASKED)


@triton.jit(do_not_specialize=[*_COUNTS, *_OFFSETS, "ranks"])
def reduce_kernel(to_codes, to_scales, out, codes, scales, data, levels, own, cells, row_bytes, stride,
                  numel, tiles, first_tile, block, groups, last_size, codes_end, scales_at, zeros_at, end, ranks,
                  divisor, step, top_scale, seed, slope, middle, bend, reach,
                  ELEMENT: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr,
                  SIGNED: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
                  MASKED: tl.constexpr, ALIGN: tl.constexpr, EDGE: tl.constexpr, WORDS: tl.constexpr,
                  STORE_WORDS: tl.constexpr, FP8: tl.constexpr, CELLS: tl.constexpr, STEPS: tl.constexpr,
                  SEARCHED: tl.constexpr, CODE_SIZE: tl.constexpr, TO_SIZE: tl.constexpr,
                  SCALE_SIZE: tl.constexpr, RANKS: tl.constexpr, OWN_RANK: tl.constexpr, DIVIDE: tl.constexpr,
                  FUSED: tl.constexpr, BYTEWISE: tl.constexpr):  # fmt: skip
    """One row from the sum of `ranks` rows, for blocks that fit in a tile."""
    row, tile, group, start, limit = locate(
        tiles, first_tile, 1, block, numel, GROUPS, BLOCK, WIDTH, False, ALIGN, EDGE, True
    )
    codes_at = tl.multiple_of(start // 8 * BITS if BITS < 8 else start * (BITS // 8), ALIGN * BITS // 8)
    total = sum_ranks(codes + codes_at // CODE_SIZE, scales + scales_at // SCALE_SIZE + group, data + zeros_at + group,
                      levels, own + start, limit, groups - group, stride, ranks, divisor, ELEMENT, BITS, SCALE, GROUPS,
                      BLOCK, WIDTH, MASKED, EDGE, WORDS, FP8, RANKS, OWN_RANK, DIVIDE, FUSED, CODE_SIZE,
                      SCALE_SIZE, BYTEWISE)  # fmt: skip
    if ELEMENT == FP32:
        total = as_float(tl.where(total != total, NAN_BITS, as_bits(total)))
    if MASKED:
        place, real = places(GROUPS * WIDTH, WIDTH, BLOCK)
        total = tl.where((real & (place < limit)).reshape([GROUPS, WIDTH]), total, 0.0)
    encode_tile(total, to_codes + codes_at // TO_SIZE, to_scales + scales_at // SCALE_SIZE + group,
                out + zeros_at + group, 0, 0, row, group, start, limit, groups - group, block, last_size, step,
                top_scale, seed, cells, slope, middle, bend, reach, ELEMENT, BITS, SCALE, STOCHASTIC, SIGNED, GROUPS,
                BLOCK, WIDTH, MASKED, EDGE, STORE_WORDS, FP8, CELLS, STEPS, SEARCHED, False)  # fmt: skip
    if tile == 0:
        store_padding(out, codes_end, scales_at, end, row_bytes)
