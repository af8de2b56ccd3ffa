"""Triton: numbers and their codes. What `reference.py` says of one block, on tiles held in registers.

Everything here is elementwise or a reduction whose result does not depend on its order, so the bits are the
reference's on any GPU, under any tile size, and in Triton's interpreter. Where the hardware has an instruction for
what integer arithmetic spells out, it is used (`NATIVE`), and bench/gpu.py compares the two.

Kernels that call these functions must be launched with `enable_fp_fusion=False`: the reference rounds after
every operation.
"""

# Triton reads annotations: no `from __future__ import annotations` here.
import os

import torch
import triton
import triton.language as tl

from narrowcast.kernels.layout import Element, Scale

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter (numpy). Triton reads this variable when a kernel is defined."""

NATIVE = tl.constexpr(not INTERPRETED and torch.version.hip is None)
"""Whether PTX can be written inline."""

FP32, FP16, BF16 = tl.constexpr(Element.FP32.value), tl.constexpr(Element.FP16.value), tl.constexpr(Element.BF16.value)
E4M3, E5M2, SIGN = tl.constexpr(Element.E4M3.value), tl.constexpr(Element.E5M2.value), tl.constexpr(Element.SIGN.value)
INT, AFFINE = tl.constexpr(Element.INT.value), tl.constexpr(Element.AFFINE.value)
LEVELS = tl.constexpr(Element.LEVELS.value)

SCALE_NONE, SCALE_FP32 = tl.constexpr(Scale.NONE.value), tl.constexpr(Scale.FP32.value)
SCALE_BF16, SCALE_FP16 = tl.constexpr(Scale.BF16.value), tl.constexpr(Scale.FP16.value)
SCALE_E8M0 = tl.constexpr(Scale.E8M0.value)

FLT_MAX = tl.constexpr(3.4028234663852886e38)
FLT_MIN = tl.constexpr(2.0**-126)
NAN_BITS = tl.constexpr(0x7FC00000)
INF_BITS = tl.constexpr(0x7F800000)
WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, half to even, kept in the low bits
WHOLE_BITS = tl.constexpr(0x4B400000)


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


# -- floats in and out: bf16 and the outputs travel as integers, so that no conversion can touch a NaN ----------------


@triton.jit
def to_float32(x, EXACT_NAN: tl.constexpr):
    """What was loaded (fp32, fp16, fp64, or the bits of bf16 as int16) as fp32.

    `EXACT_NAN` gives NaNs of other dtypes their one bit pattern; blocks only need to know that one is there.
    """
    if x.dtype == tl.float32:
        y = x
    elif x.dtype == tl.int16:
        y = as_float(x.to(tl.int32) << 16)
    elif x.dtype == tl.float64:
        finite = tl.abs(x) < float("inf")
        y = tl.where(finite, tl.minimum(tl.maximum(x, -FLT_MAX), FLT_MAX), x).to(tl.float32)
    else:
        y = x.to(tl.float32)
    if EXACT_NAN and x.dtype != tl.float32:
        y = as_float(tl.where(y != y, NAN_BITS, as_bits(y)))
    return y


@triton.jit
def to_output(value, KIND: tl.constexpr, RAW: tl.constexpr):
    """fp32 as the bits of an output dtype (KIND is the Element of that dtype, or "fp64").

    Finite values saturate, a NaN is the one of `reference.cast_output`; `RAW` keeps the payload that a NaN came with.
    """
    nan = value != value
    bits = as_bits(value)
    if KIND == "fp64":
        wide = value.to(tl.float64).to(tl.int64, bitcast=True)
        if RAW:
            sign = ((bits >> 31) & 1).to(tl.int64) << 63
            lost = sign | 0x7FF8000000000000 | ((bits & 0x7FFFFF).to(tl.int64) << 29)
        else:
            lost = tl.full(wide.shape, 0x7FF8000000000000, tl.int64)
        result = tl.where(nan, lost, wide)
    elif KIND == "fp32":
        result = bits if RAW else tl.where(nan, NAN_BITS, bits)
    else:
        result = cast_bits(value, FP16 if KIND == "fp16" else BF16, False)
    return result


# -- casts ----------------------------------------------------------------------------------------------------------


@triton.jit
def cast_bits(x, ELEMENT: tl.constexpr, FP8: tl.constexpr):
    """fp32 as the bits of a narrower float, in an integer. Like `reference.cast_bits`."""
    bits = as_bits(x)
    magnitude = bits & 0x7FFFFFFF
    if ELEMENT == FP32:
        code = bits
    elif ELEMENT == FP16:
        narrow = tl.where(magnitude == INF_BITS, x, tl.minimum(tl.maximum(x, -65504.0), 65504.0))
        code = narrow.to(tl.float16).to(tl.int16, bitcast=True)
        code = tl.where(magnitude > INF_BITS, 0x7E00, code)
    elif ELEMENT == BF16:
        code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        top = (bits >> 31) << 15 | 0x7F7F
        code = tl.where((magnitude > 0x7F7F0000) & (magnitude < INF_BITS), top, code)
        code = tl.where(magnitude > INF_BITS, 0x7FC0, code).to(tl.int16)
    elif ELEMENT == E4M3 and FP8:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        code = tl.where(magnitude >= INF_BITS, 0x7F, code)
    elif ELEMENT == E4M3:
        code = fp8_bits(magnitude, 448.0, 0.015625, 16384.0, 20, 120) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude >= INF_BITS, 0x7F, code)
    else:
        code = fp8_bits(magnitude, 57344.0, 6.103515625e-05, 128.0, 21, 112)
        code = tl.where(magnitude == INF_BITS, 0x7C, code) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude > INF_BITS, 0x7F, code)
    return code


@triton.jit
def fp8_bits(
    magnitude, TOP: tl.constexpr, NORMAL: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr
):
    """A finite |x|, given as bits, rounded half to even to an fp8 magnitude; above TOP it saturates.

    Below the smallest normal number, the addition of UNIT (whose last bit is fp8's) rounds; above, integers do.
    """
    size = tl.minimum(as_float(magnitude), TOP)
    bits = as_bits(size)
    small = as_bits(size + UNIT) - as_bits(tl.full(size.shape, UNIT, tl.float32))
    large = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - (BIAS << (23 - SHIFT))
    return tl.where(size < NORMAL, small, large)


@triton.jit
def cast_value(code, ELEMENT: tl.constexpr, FP8: tl.constexpr):
    """Inverse of `cast_bits`; which NaN comes out is left open, except for FP32."""
    if ELEMENT == FP32:
        value = as_float(code)
    elif ELEMENT == FP16:
        value = code.to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEMENT == BF16:
        value = as_float(code.to(tl.int32) << 16)
    elif ELEMENT == E5M2:
        value = (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FP8:
        value = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The fields of e4m3 at their places in fp32, denormals too; only the exponents' bias differs, by 120.
        value = as_float(((code & 0x80) << 24) | ((code & 0x7F) << 20)) * 1.329227995784916e36
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


# -- a block's statistics and its scale -----------------------------------------------------------------------------


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
    else:
        bits = x.to(tl.uint32, bitcast=True)
        first = as_bits(tl.max((bits << 1) | (bits >> 31), 1))
        second = first
    return first, second


@triton.jit
def sum_in_order(sums, WIDTH: tl.constexpr):
    """`reference.mean_magnitude` before its division: leaves of 64 fold in halves, then pairs of neighbours add.

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
    """Each block's scale as it is stored, and whether the block is finite. Like `reference.choose_scale`."""
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
def zero_points(second, inverse, BITS: tl.constexpr):
    """The code that stands for zero in each block of affine codes."""
    low = tl.minimum(as_float(second ^ ((second >> 31) & 0x7FFFFFFF)), 0.0)
    top: tl.constexpr = (1 << BITS) - 1
    return as_bits(tl.minimum(tl.maximum(-low * inverse, 0.0), top * 1.0) + WHOLE) - WHOLE_BITS


# -- elements and their codes ---------------------------------------------------------------------------------------


@triton.jit
def round_whole(y, LOW: tl.constexpr, HIGH: tl.constexpr):
    """y rounded half to even, within LOW..HIGH, as an integer. A NaN gives any integer."""
    return as_bits(tl.minimum(tl.maximum(y, LOW * 1.0), HIGH * 1.0) + WHOLE) - WHOLE_BITS


@triton.jit
def quantize(y, zeros, draws, ELEMENT: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes of scaled elements, for INT (lowest code LOW) and AFFINE, as integers from 0 to 2**BITS - 1.

    INT codes come out in offset binary, LOW's two's complement with its top bit flipped: see `FLIPPED` in packing.
    """
    half: tl.constexpr = 1 << (BITS - 1)
    top: tl.constexpr = (1 << BITS) - 1
    if STOCHASTIC:
        whole = tl.floor(y)
        y = whole + tl.where(draws < y - whole, 1.0, 0.0)
    if ELEMENT == AFFINE:
        code = tl.minimum(tl.maximum(round_whole(y, -top, top) + zeros, 0), top)
    else:
        code = round_whole(y, LOW, half - 1) + half
    return code


@triton.jit
def count_below(y, cells, thresholds, slope, middle, CELLS: tl.constexpr, STEPS: tl.constexpr):
    """How many thresholds lie below y: the code of y in a table of levels.

    y's cell, a monotone function of y, says how many lie in the cells before; at most 2**STEPS - 1 lie in its own, and
    a few comparisons count those. `gpu_tables.py` lays the cells out with the same arithmetic.
    """
    cell = as_bits(tl.minimum(tl.maximum(y * slope + middle, 0.0), (CELLS - 1) * 1.0) + WHOLE) - WHOLE_BITS
    # Whatever a NaN became, the load stays inside; its block's codes are thrown away later.
    entry = tl.load(cells + (cell & (CELLS - 1)))
    code = (entry >> 32).to(tl.int32)
    if STEPS == 1:
        code += (y > as_float(entry.to(tl.int32))).to(tl.int32)
    else:
        for step in tl.static_range(STEPS):
            ahead = tl.load(thresholds + code + ((1 << (STEPS - 1 - step)) - 1))
            code += tl.where(y > ahead, 1 << (STEPS - 1 - step), 0)
    return code


# -- stochastic rounding ----------------------------------------------------------------------------------------------


@triton.jit
def mix64(z):
    """The finalizer of splitmix64, on uint64."""
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(row_key, start, index):
    """One number of 24 bits in [0, 1) per element `start + index` of the row. Like `reference.uniform`."""
    low = start.to(tl.uint32) + index.to(tl.uint32)
    carry = low < start.to(tl.uint32)
    high = (start >> 32).to(tl.uint64)
    here, after = mix64(row_key + high), mix64(row_key + high + 1)
    x = low ^ tl.where(carry, after.to(tl.uint32), here.to(tl.uint32))
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ tl.where(carry, (after >> 32).to(tl.uint32), (here >> 32).to(tl.uint32))
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
