"""Triton: a block's statistics, its scale and its zero point. What reference/scales.py says of blocks.

No result depends on the order of a reduction: maxima are of integers, and the only sum has its order spelled out.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import triton
import triton.language as tl

from narrowcast.kernels.layout import Scale
from narrowcast.kernels.triton.codes import (
    AFFINE,
    INF_BITS,
    INT,
    NAN_BITS,
    NATIVE,
    SIGN,
    WHOLE,
    WHOLE_BITS,
    as_bits,
    as_float,
)

SCALE_NONE, SCALE_FP32 = tl.constexpr(Scale.NONE.value), tl.constexpr(Scale.FP32.value)
SCALE_BF16, SCALE_FP16 = tl.constexpr(Scale.BF16.value), tl.constexpr(Scale.FP16.value)
SCALE_E8M0 = tl.constexpr(Scale.E8M0.value)

FLT_MIN = tl.constexpr(2.0**-126)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def measure(x, ELEMENT: tl.constexpr, WIDTH: tl.constexpr):
    """What the scale of each row of x [groups, WIDTH] depends on, as two numbers of which some need only one.

    - sign codes: the fp64 sum of magnitudes, added in the reference's order;
    - affine codes: the largest and the smallest element, as integers that order like them;
    - others: the bits of the largest magnitude, with its sign below them.

    Zeros change nothing, so short blocks are padded with them, and parts of a block combine by `combine`.
    """
    if ELEMENT == SIGN:
        first = sum_in_order(tl.abs(x).to(tl.float64), WIDTH)
        second = first
    elif ELEMENT == AFFINE:
        bits = as_bits(x)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        first, second = tl.max(order, 1), tl.min(order, 1)
    elif ELEMENT != INT and NATIVE:
        # Only INT asks for the sign. The instruction takes magnitudes for nothing, and keeps a NaN.
        first = as_bits(tl.reduce(tl.abs(x), 1, larger)) << 1
        second = first
    else:
        # The largest magnitude is that of the largest bits, read either without a sign (then a negative one is found if
        # there is any) or with one (then a positive one). That spares the rotation of every element.
        low = tl.max(x.to(tl.uint32, bitcast=True), 1)
        high = tl.max(as_bits(x), 1).to(tl.uint32, bitcast=True)
        first = as_bits(tl.maximum((low << 1) | (low >> 31), (high << 1) | (high >> 31)))
        second = first
    return first, second


@triton.jit
def sum_in_order(sums, WIDTH: tl.constexpr):
    """`mean_magnitude` of reference/scales.py before its division: leaves of 64 fold in halves, then neighbours add up.

    Every `tl.sum` here adds two numbers, so that no order is left to the compiler.
    """
    groups: tl.constexpr = sums.shape[0]
    leaf: tl.constexpr = 64 if WIDTH > 64 else WIDTH
    leaves: tl.constexpr = WIDTH // leaf
    sums = sums.reshape([groups * leaves, leaf])
    for level in tl.static_range(6):
        if (leaf >> level) > 1:
            sums = tl.sum(sums.reshape([groups * leaves, 2, leaf >> (level + 1)]), 1)
    return sum_neighbours(sums.reshape([groups, leaves]), leaves)


@triton.jit
def sum_neighbours(sums, COUNT: tl.constexpr):
    """The sum of each row of [groups, COUNT], adjacent pairs first."""
    groups: tl.constexpr = sums.shape[0]
    for level in tl.static_range(16):
        if (COUNT >> level) > 1:
            sums = tl.sum(sums.reshape([groups, COUNT >> (level + 1), 2]), 2)
    return sums.reshape([groups])


@triton.jit
def combine(first, second, ELEMENT: tl.constexpr, COUNT: tl.constexpr):
    """The statistics of whole blocks, from [groups, COUNT] statistics of their parts, in order."""
    if ELEMENT == SIGN:
        first = sum_neighbours(first, COUNT)
        second = first
    elif ELEMENT == AFFINE:
        first, second = tl.max(first, 1), tl.min(second, 1)
    else:
        first = as_bits(tl.max(first.to(tl.uint32, bitcast=True), 1))
        second = first
    return first, second


@triton.jit
def choose_scale(first, second, sizes, step, limit, ELEMENT: tl.constexpr, SCALE: tl.constexpr, SIGNED: tl.constexpr):
    """Each block's scale as it is stored, and whether the block is finite. Like reference/."""
    if ELEMENT == SIGN:
        finite = first < float("inf")
        spread = (first / sizes.to(tl.float64)).to(tl.float32)
    elif ELEMENT == AFFINE:
        finite = (first < INF_BITS) & (second > -INF_BITS - 1)
        low = as_float(second ^ ((second >> 31) & 0x7FFFFFFF))
        spread = as_float(tl.maximum(first, 0)) * step - tl.minimum(low, 0.0) * step
        spread = tl.maximum(spread, FLT_MIN)
    else:
        finite = first.to(tl.uint32, bitcast=True) < 0xFF000000
        spread = tl.maximum(as_float((first >> 1) & 0x7FFFFFFF) * step, FLT_MIN)
    scale = round_up(spread, limit, SCALE)
    if SIGNED:
        scale = tl.where((first & 1) == 1, scale, -scale)
    return scale, finite


@triton.jit
def round_up(spread, limit, SCALE: tl.constexpr):
    """The smallest number of the stored format that is not below `spread`, at most `limit`."""
    scale = spread
    if SCALE == SCALE_BF16:
        scale = as_float(((as_bits(spread) + 0xFFFF) >> 16) << 16)
    elif SCALE == SCALE_E8M0:
        scale = as_float(((as_bits(spread) + 0x7FFFFF) >> 23) << 23)
    elif SCALE == SCALE_FP16:
        scale = tl.minimum(spread, limit)
        half = scale.to(tl.float16)
        above = half.to(tl.int16, bitcast=True) + (half.to(tl.float32) < scale).to(tl.int16)
        scale = above.to(tl.float16, bitcast=True).to(tl.float32)
    return tl.minimum(scale, limit)


@triton.jit
def scale_bits(scale, finite, SCALE: tl.constexpr):
    """Scales as integers of the size they are stored in."""
    bits = tl.where(finite, as_bits(scale), NAN_BITS)
    if SCALE == SCALE_FP16:
        stored = tl.where(finite, scale.to(tl.float16).to(tl.int16, bitcast=True), 0x7E00).to(tl.int16)
    elif SCALE == SCALE_BF16:
        stored = (bits >> 16).to(tl.int16)
    elif SCALE == SCALE_E8M0:
        stored = (bits >> 23).to(tl.uint8)
    else:
        stored = bits
    return stored


@triton.jit
def load_scales(at):
    """What lies at these addresses. The compiler would take a `tl.load` of as many scales as there are threads through
    shared memory, so that no thread loads twice; here each loads what it needs.
    """
    if NATIVE and at.dtype.element_ty == tl.int16:
        stored = tl.inline_asm_elementwise(
            "ld.global.b16 $0, [$1];", "=h,l", [at.to(tl.int64)], dtype=tl.int16, is_pure=True, pack=1
        )
    else:
        stored = tl.load(at)
    return stored


@triton.jit
def scale_value(stored, SCALE: tl.constexpr):
    """Inverse of `scale_bits`; which NaN comes out is left open."""
    if SCALE == SCALE_FP16:
        scale = stored.to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALE == SCALE_BF16:
        scale = as_float(stored.to(tl.int32) << 16)
    elif SCALE == SCALE_E8M0:
        bits = stored.to(tl.int32) << 23
        scale = as_float(tl.where(bits == INF_BITS, NAN_BITS, bits))
    else:
        scale = as_float(stored)
    return scale


@triton.jit
def zero_points(second, inverse, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code that stands for zero in each block of affine codes."""
    low = tl.minimum(as_float(second ^ ((second >> 31) & 0x7FFFFFFF)), 0.0)
    top: tl.constexpr = (1 << BITS) - 1
    exact = tl.minimum(tl.maximum(-low * inverse, 0.0), top * 1.0)
    code = as_bits(exact + WHOLE) - WHOLE_BITS
    if STOCHASTIC:
        # Rounded up. PTX's own ceiling takes a denormal for zero.
        code += (exact > code.to(tl.float32)).to(tl.int32)
    return code
