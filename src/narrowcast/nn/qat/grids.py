"""The grid of a codec: what training rounds to, and what packing stores.

Training needs two things of a codec: its levels, in units of a scale, and the level that a number rounds to. A
`CodecGrid` has both, and the codec that stores the result: the same codes with one fp32 scale per row, since one clip
is learned per row or per tensor, never per block.

Signed grids are the codec's own. Unsigned ones, for activations that are never negative, spend every code above zero:
0 to 2**bits - 1 for integers, the unsigned tables of the paper for additive powers of two, and the upper half of an fp8
format. Fixed tables (nf4, levels) and `sign` have no unsigned form.

Not supported, with an error that says so: plain casts to 16 or 32 bits (no scale to learn), zero points, random
rounding, and blocks within a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs import Codec, apot_levels
from narrowcast.codecs import codec as as_codec
from narrowcast.codecs.levels import threshold_between
from narrowcast.codecs.rules import CodecLike
from narrowcast.errors import SpecError
from narrowcast.kernels.layout import Element, Grid, before_float32
from narrowcast.kernels.reference import casts


class CodecGrid(NamedTuple):
    """The levels of a codec, and how they are stored."""

    kernel: Grid
    """The levels and thresholds as kernels take them, on the CPU."""
    top: float
    """The level that the clip stands for: the largest, or of a lopsided table the largest magnitude."""
    codes: Tensor
    """int64 [levels]: the code that stands for each level in a row of `codec`. Empty for unsigned grids."""
    codec: Codec
    """What stores the result: one fp32 scale per row."""
    signed: bool

    @property
    def levels(self) -> Tensor:
        return self.kernel.levels

    def on(self, device: torch.device) -> Grid:
        """The levels and thresholds on a device."""
        return self.kernel._replace(levels=self.levels.to(device), thresholds=self.kernel.thresholds.to(device))

    def integer_offset(self) -> int | None:
        """What to subtract from every level to make it an int8; None if levels are not integers, or too large."""
        levels = self.levels
        low, high = float(levels[0]), float(levels[-1])
        if not bool((levels == levels.round()).all()):
            return None
        if low >= -128 and high <= 127:
            return 0
        return 128 if low >= 0 and high <= 255 else None


def codec_grid(codec: CodecLike, signed: bool = True) -> CodecGrid:
    """The signed or unsigned grid of a codec, or why it has none."""
    chosen = trainable(codec)
    element, bits = chosen.format.element, chosen.bits
    stored = stored_codec(chosen)
    if element == Element.INT:
        first = -(2 ** (bits - 1)) if signed else 0
        integers = torch.arange(first, first + 2**bits, dtype=torch.int64, device="cpu")
        levels = integers.float()
        grid = Grid(levels, (levels[1:] + levels[:-1]) / 2, True)
        return CodecGrid(grid, float(levels[-1]), integers if signed else _codes(0), stored, signed)
    if element in (Element.E4M3, Element.E5M2):
        levels, codes = _float8(element, signed)
        grid = _float8_table(levels, codes)
        return CodecGrid(grid, float(levels[-1]), codes if signed else _codes(0), stored, signed)
    if not signed:
        levels = _unsigned(chosen)
        return CodecGrid(_table(levels), float(levels[-1]), _codes(0), stored, False)
    if element == Element.LEVELS:
        levels = chosen.levels  # type: ignore[attr-defined]
        return CodecGrid(_table(levels), float(levels.abs().max()), _codes(len(levels)), stored, True)
    assert element == Element.SIGN  # zero counts as positive: only what is below zero is negative
    grid = Grid(_floats([-1.0, 1.0]), _floats([before_float32(0.0)]), False)
    return CodecGrid(grid, 1.0, _codes(2).flip(0), stored, True)


def has_unsigned(codec: Codec) -> bool:
    return codec.format.element in (Element.INT, Element.E4M3, Element.E5M2) or _family(codec) in ("apot", "pot")


def trainable(codec: CodecLike) -> Codec:
    """A codec that has a grid, or a SpecError that says why this one has none."""
    chosen = as_codec(codec)
    format, why = chosen.format, ""
    if format.element in (Element.FP32, Element.FP16, Element.BF16):
        why = "a plain cast has no scale to learn: train in that dtype, with autocast for example"
    elif format.affine:
        why = (
            'zero points are not trained; for inputs that are never negative the grid is unsigned anyway: write "int8"'
        )
    elif format.stochastic:
        why = "training rounds to nearest: drop stochastic=true"
    elif chosen.given.get("block", "row") != "row" and chosen != as_codec(chosen.name):
        why = f"a clip is learned per channel or per tensor, not per block: drop block={chosen.given['block']}"
    elif chosen.given.get("scale", "fp32") != "fp32":
        why = f"learned scales are stored as they are, in fp32: drop scale={chosen.given['scale']}"
    if why:
        raise SpecError(f"codec {chosen.spec!r} cannot be trained with: {why}.")
    return chosen


def stored_codec(codec: Codec) -> Codec:
    """The codec with the same codes and one fp32 scale per row."""
    return as_codec({**codec.config(), "block": "row", "scale": "fp32"})


def write_rows(values: Tensor, scale: Tensor, grid: CodecGrid) -> Tensor:
    """Encode `values` [rows, numel], each a level times its row's `scale` [rows], as rows of `grid.codec`.

    The scale is stored without rounding, so that decoding gives the same bits back.
    """
    levels = grid.levels.double().to(values.device)
    middles = (levels[1:] + levels[:-1]) / 2
    # A level times a scale, divided by it, is within a few roundings of the level: the nearest one is the one.
    place = torch.searchsorted(middles, values.double() / scale.double().view(-1, 1))
    return grid.codec.join(grid.codes.to(values.device)[place], scale.view(-1, 1))


# -- levels and the thresholds between them -------------------------------------------------------------------------


def _codes(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _floats(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _family(codec: Codec) -> str:
    return codec.name.rstrip("0123456789")


def _unsigned(codec: Codec) -> Tensor:
    family = _family(codec)
    if family not in ("apot", "pot"):
        raise SpecError(
            f"signed=False: codec {codec.spec!r} has no unsigned grid. int, apot, pot and fp8 codecs have one; leave "
            "signed= out, or pass signed=True."
        )
    k = codec.given.get("k", 2) if family == "apot" else codec.bits
    assert isinstance(k, int)
    exact = [Fraction(level) for level in apot_levels(codec.bits, k, signed=False).tolist()]
    # Levels are integers times the smallest step between powers of two: exact again, once multiplied by that.
    smallest = min(level for level in exact if level)
    whole = [round(level / smallest) for level in exact]
    shift = max(0, whole[-1].bit_length() - 16)
    if shift > 100:
        raise SpecError(
            f"signed=False: the unsigned grid of codec {codec.spec!r} spans 2**{whole[-1].bit_length() - 1}, more than "
            "fp32 does. Take fewer bits, or pass signed=True."
        )
    return _floats([math.ldexp(level, -shift) for level in whole])


def _table(levels: Tensor) -> Grid:
    """A table whose ties go to the lower level, as in the codecs with tables."""
    thresholds = [threshold_between(*pair) for pair in itertools.pairwise(levels.tolist())]
    return Grid(levels, _floats(thresholds), False)


def _float8(element: int, signed: bool) -> tuple[Tensor, Tensor]:
    """The finite numbers of an fp8 format, ascending, and their bits; of the two zeros the positive one."""
    codes = torch.cat([_codes(256)[129:].flip(0), _codes(128)]) if signed else _codes(128)
    values = casts.cast_value(codes, element)
    return values[values.isfinite()], codes[values.isfinite()]


def _float8_table(levels: Tensor, codes: Tensor) -> Grid:
    """Casts round half to even: a tie goes up, past a threshold just below the middle, where the upper code is even."""
    thresholds = []
    pairs: Sequence[tuple[float, float]] = list(itertools.pairwise(levels.tolist()))
    for (lower, upper), code in zip(pairs, codes[1:].tolist(), strict=True):
        middle = (lower + upper) / 2
        thresholds.append(before_float32(middle) if code % 2 == 0 else middle)
    return Grid(levels, _floats(thresholds), False)
