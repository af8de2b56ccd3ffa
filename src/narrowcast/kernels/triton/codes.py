"""Triton: numbers and their codes. What reference/ says of elements, on tiles in registers.

Everything here is elementwise, one rounding at a time, so the bits are the reference's on any GPU, under any tile
size, and in Triton's interpreter. Where the hardware has one instruction for what plain arithmetic takes several for,
it is used (`NATIVE`); the interpreter cannot check those, bench/gpu.py does.

Kernels that call these functions must be launched with `enable_fp_fusion=False`: the reference rounds after
every operation.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import os

import torch
import triton
import triton.language as tl

from narrowcast.kernels.layout import Element

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in Triton's interpreter (numpy). Triton reads this variable when a kernel is defined."""

NATIVE = tl.constexpr(not INTERPRETED and torch.version.hip is None)
"""Whether PTX can be written inline."""

FP32, FP16, BF16 = tl.constexpr(Element.FP32.value), tl.constexpr(Element.FP16.value), tl.constexpr(Element.BF16.value)
E4M3, E5M2, SIGN = tl.constexpr(Element.E4M3.value), tl.constexpr(Element.E5M2.value), tl.constexpr(Element.SIGN.value)
INT, AFFINE = tl.constexpr(Element.INT.value), tl.constexpr(Element.AFFINE.value)
LEVELS = tl.constexpr(Element.LEVELS.value)

FLT_MAX = tl.constexpr(3.4028234663852886e38)
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


# -- what PTX says in one instruction --------------------------------------------------------------------------------


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded."""
    if NATIVE:
        x = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = tl.div_rn(1.0, x)
    return x


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

    Finite values saturate, a NaN is the one of `casts.cast_output`; `RAW` keeps the payload that a NaN came with.
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
    """fp32 as the bits of a narrower float, in an integer. Like `casts.cast_bits`."""
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


# -- elements and their codes ---------------------------------------------------------------------------------------


@triton.jit
def round_whole(y, LOW: tl.constexpr, HIGH: tl.constexpr, OPEN: tl.constexpr):
    """y rounded half to even, within LOW..HIGH, as an integer. A NaN gives any integer. OPEN: y rounds to no less."""
    if not OPEN:
        y = tl.maximum(y, LOW * 1.0)
    return as_bits(tl.minimum(y, HIGH * 1.0) + WHOLE) - WHOLE_BITS


@triton.jit
def quantize(y, zeros, draws, ELEMENT: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr, STOCHASTIC: tl.constexpr,
             OPEN: tl.constexpr):  # fmt: skip
    """Codes of scaled elements, for INT (lowest code LOW) and AFFINE, as integers from 0 to 2**BITS - 1.

    INT codes come out with their top bit flipped, so that they need no mask: see `FLIPPED` in packing.
    """
    half: tl.constexpr = 1 << (BITS - 1)
    top: tl.constexpr = (1 << BITS) - 1
    if STOCHASTIC:
        # PTX's floor takes a denormal for zero. That changes no code: -1 and a sure step up, or 0 and none, are both 0.
        whole = tl.floor(y)
        y = whole + tl.where(draws < y - whole, 1.0, 0.0)
    if ELEMENT == AFFINE:
        code = tl.minimum(tl.maximum(round_whole(y, -top, top, False) + zeros, 0), top)
    else:
        code = round_whole(y, LOW, half - 1, OPEN) + half
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
    """One number of 24 bits in [0, 1) per element `start + index` of the row. Like `draws.uniform`."""
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
