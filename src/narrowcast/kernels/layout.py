"""Where the bytes of an encoded row lie, and the constants that fix its arithmetic.

A row of `numel` floats becomes

    [codes][scales][zero points][padding]

- codes: element i takes bits [i * bits, (i + 1) * bits) of a little-endian bit stream;
- scales: one per block, aligned to its own size; absent for plain casts;
- zero points: one byte per block, only for affine codes;
- padding: zeros up to a multiple of 16 bytes.

A `Recipe` is all that a kernel needs to know of a codec: a `Format` (plain integers, so that it can be an argument
of a torch operator), the largest magnitude a code stands for, and a table of levels where there is one.
docs/format.md says the same in full.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

Count = int
"""A number of elements. Under torch.compile it may be symbolic: an operator's schema has SymInt for it."""

ROW = -1
"""`Format.block` of a codec with one scale for the whole row."""

ALIGNMENT = 16
"""Rows are padded to this many bytes, so that every row of a matrix of rows starts aligned."""

FLT_MAX = 3.4028234663852886e38
FLT_MIN = 2.0**-126
"""The smallest normal fp32 number: no scale that divides is below it."""


class Element(IntEnum):
    """What one code stands for."""

    FP32 = 0
    FP16 = 1
    BF16 = 2
    E4M3 = 3
    E5M2 = 4
    SIGN = 5
    INT = 6
    AFFINE = 7
    LEVELS = 8


class Scale(IntEnum):
    """How one block's scale is stored."""

    NONE = 0
    FP32 = 1
    BF16 = 2
    FP16 = 3
    E8M0 = 4


SCALE_BYTES = {Scale.NONE: 0, Scale.FP32: 4, Scale.BF16: 2, Scale.FP16: 2, Scale.E8M0: 1}

SCALE_MAX = {
    Scale.FP32: FLT_MAX,
    Scale.BF16: 3.3895313892515355e38,
    Scale.FP16: 65504.0,
    Scale.E8M0: 2.0**127,
}


class Format(NamedTuple):
    """How a kernel must read and write a row: a tuple of plain integers."""

    element: int
    bits: int
    block: int = 0
    scale: int = Scale.NONE
    stochastic: int = 0

    @property
    def affine(self) -> bool:
        """Whether blocks have a zero point."""
        return self.element == Element.AFFINE

    @property
    def signed_scale(self) -> bool:
        """Whether a block's scale takes the sign that gives its largest element the lowest code.

        Two's complement has one more code below zero than above; this way the largest element uses it, and the step
        is 2**(bits - 1) to the magnitude instead of one less. Stochastic rounding does without, since it must
        not clip, and e8m0 has no sign.
        """
        return self.element == Element.INT and not self.stochastic and self.scale != Scale.E8M0


class Recipe(NamedTuple):
    """A format with the numbers behind its codes.

    `table` is fp32 [2, 2**bits] for `Element.LEVELS`: the levels in ascending order, then the thresholds between
    them (the code of y is how many thresholds lie below y). Codes without a level are NaN, thresholds that do
    not exist infinity.
    """

    format: Format
    peak: float
    table: Tensor | None


class Grid(NamedTuple):
    """A fixed set of levels, in units of a scale: what training quantizes to."""

    levels: Tensor
    """fp32 [n], ascending, finite."""
    thresholds: Tensor
    """fp32 [n - 1]: the code of v is how many thresholds lie below v, so that ties go to the lower level."""
    uniform: bool
    """Levels are consecutive integers: v is rounded half to even, as integer codecs do, and thresholds do not count."""


class Layout(NamedTuple):
    """Byte offsets inside one row of `numel` elements."""

    blocks: int
    block_size: int
    codes_bytes: int
    scales_offset: int
    zeros_offset: int
    row_bytes: int


def layout(format: Format, numel: int) -> Layout:
    """Where everything lies in a row of `numel` elements."""
    # Not while compiling: a symbolic size cannot be hashed, and dynamo warns of caches.
    if type(numel) is not int or is_compiling():
        return _layout(format, numel)
    return _remembered_layout(format, numel)


@lru_cache(maxsize=4096)
def _remembered_layout(format: Format, numel: int) -> Layout:
    return _layout(format, numel)


def _layout(format: Format, numel: int) -> Layout:
    block_size = numel if format.block == ROW else format.block
    blocks = 0 if block_size == 0 else -(-numel // block_size)
    codes_bytes = -(-numel * format.bits // 8)
    size = SCALE_BYTES[Scale(format.scale)]
    scales_offset = _align(codes_bytes, max(size, 1))
    zeros_offset = scales_offset + blocks * size
    end = zeros_offset + (blocks if format.affine else 0)
    return Layout(blocks, block_size, codes_bytes, scales_offset, zeros_offset, _align(end, ALIGNMENT))


class Scaling(NamedTuple):
    """A block's scale is its magnitude times `step`, at least FLT_MIN, rounded up and then cut at `limit`."""

    step: float
    limit: float


@lru_cache(maxsize=1024)
def scaling(format: Format, peak: float) -> Scaling:
    """The constants that turn a block's largest magnitude into its scale.

    `peak` is the largest magnitude that a code stands for, or the codes that an affine block spreads over. `step` is
    1/peak in fp32. `limit` is the largest scale for which `peak * scale` is still finite, so that a block of FLT_MAX
    never decodes to infinity; an affine block may span twice FLT_MAX, and what decodes beyond is cut there.
    """
    if format.scale == Scale.NONE:
        return Scaling(1.0, FLT_MAX)
    limit = min(SCALE_MAX[Scale(format.scale)], (2 if format.affine else 1) * (FLT_MAX / peak))
    return Scaling(to_float32(1.0 / peak), _round_down(limit, Scale(format.scale)))


def to_float32(value: float) -> float:
    """The nearest fp32 number, as a Python float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def before_float32(value: float) -> float:
    """The largest fp32 number below an fp32 number."""
    if value == 0:
        return -(2.0**-149)
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return float(struct.unpack("<f", struct.pack("<I", bits - 1 if value > 0 else bits + 1))[0])


def _round_down(value: float, scale: Scale) -> float:
    """The largest number of the scale's format that is not above `value`, for 2**-14 <= value <= FLT_MAX."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if to_float32(value) > value:
        bits -= 1
    dropped = {Scale.FP32: 0, Scale.BF16: 16, Scale.FP16: 13, Scale.E8M0: 23}[scale]
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits >> dropped << dropped))
    return float(rounded)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
