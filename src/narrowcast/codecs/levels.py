"""Tables of levels: additive powers of two, powers of two, normal float, a user's own.

A table is sorted; a code is a level's place in it. Each block is scaled so that its largest magnitude meets the
table's, and every element goes to the nearest level, ties to the lower one.

APoT levels (Li, Dong, Wang: Additive Powers-of-Two Quantization, ICLR 2020) are a sign bit and sums of a few powers
of two: small integers times one scale, and that is how their tables hold them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.options import default_block, default_scale, non_default, parse_block, parse_scale
from narrowcast.errors import SpecError
from narrowcast.kernels.layout import Element, Format, before_float32, to_float32

# The 16 levels of QLoRA's normal float (Dettmers et al. 2023, appendix E): a published constant, not ours to derive.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Levels(Codec):
    """A user's own sorted table of 2 to 256 levels."""

    options: ClassVar[tuple[str, ...]] = ("table", "block", "scale")

    def __init__(
        self,
        table: Sequence[float] | Tensor,
        *,
        block: int | str | None = None,
        scale: str | None = None,
        name: str = "levels",
        given: dict[str, object] | None = None,
    ) -> None:
        levels = _check_table(table, name)
        bits = max(1, math.ceil(math.log2(len(levels))))
        block = default_block(bits) if block is None else block
        scale = default_scale(bits) if scale is None else scale
        format = Format(Element.LEVELS, bits, parse_block(block, name), parse_scale(scale, name))
        named: dict[str, object] = {"table": levels} if given is None else given
        options = non_default(block=(block, default_block(bits)), scale=(scale, default_scale(bits)))
        peak = max(abs(level) for level in levels)
        super().__init__(name, format, peak, {**named, **options}, _kernel_table(levels, bits))

    @property
    def levels(self) -> Tensor:
        """The levels in ascending order, fp32; a code is an index into them."""
        table = self._tables[torch.device("cpu")][0]
        return table[: int(table.isfinite().sum())].clone()

    def _bound(self, value: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        levels = self.levels.double().to(value.device)
        place = torch.searchsorted(levels, (value / scale).contiguous()).clamp(1, len(levels) - 1)
        half_gap = (levels[place] - levels[place - 1]) / 2
        clipping = torch.maximum(value - levels[-1] * scale, levels[0] * scale - value)
        # value / scale rounds to a multiple of 2**-149, which matters where gaps are that small.
        return torch.maximum((half_gap + 2.0**-149) * scale, clipping)


class APoT(Levels):
    """Additive powers of two: a sign bit and a grid of sums of powers of two in the other bits."""

    options: ClassVar[tuple[str, ...]] = ("k", "block", "scale")

    def __init__(self, bits: int, *, k: int = 2, block: int | str | None = None, scale: str | None = None) -> None:
        table = _table(_apot_integers(bits - 1, k, bits))
        super().__init__(table, block=block, scale=scale, name=f"apot{bits}", given=non_default(k=(k, 2)))


class PoT(Levels):
    """Powers of two: a sign bit, zero, and 2**0, 2**-1, ... in the other bits."""

    options: ClassVar[tuple[str, ...]] = ("block", "scale")

    def __init__(self, bits: int, *, block: int | str | None = None, scale: str | None = None) -> None:
        table = _table(_apot_integers(bits - 1, bits - 1, bits))
        super().__init__(table, block=block, scale=scale, name=f"pot{bits}", given={})


class NormalFloat(Levels):
    """`nf4`: the quantiles of a normal distribution, as QLoRA defines them."""

    options: ClassVar[tuple[str, ...]] = ("block", "scale")

    def __init__(self, *, block: int | str | None = None, scale: str | None = None) -> None:
        super().__init__(NF4, block=block, scale=scale, name="nf4", given={})


def apot_levels(bits: int, k: int = 2, signed: bool = True) -> Tensor:
    """The levels of additive powers of two, ascending, in float64, with the largest at 1.

    Signed grids (weights) are a sign bit and a (bits - 1)-bit grid: 2**bits - 1 levels. Unsigned ones (activations)
    use every bit. k=1 is uniform, k=bits powers of two.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise SpecError(f"bits={bits!r}: additive powers of two have 2 to 8 bits.")
    grid = _apot_integers(bits - 1 if signed else bits, k, bits)
    levels = _signed(grid) if signed else grid
    return torch.tensor([level / grid[-1] for level in levels], dtype=torch.float64, device="cpu")


def _signed(grid: list[int]) -> list[int]:
    return [-level for level in reversed(grid[1:])] + grid


def _table(grid: list[int]) -> list[float]:
    """A signed grid as floats: the integers themselves, or, past 2**16, a power of two times them."""
    return [math.ldexp(level, -max(0, grid[-1].bit_length() - 16)) for level in _signed(grid)]


def _apot_integers(width: int, k: int, bits: int) -> list[int]:
    """The unsigned grid of `width` bits, ascending, as integers.

    Term t of `terms` = width / k takes 0 or one of 2**k - 1 powers of two; exponents are dealt to the terms in turn.
    With k=2 and an odd width the last term has one bit, and its only power comes before the last round, as
    in the paper: 3 bits are {0, 1/2, 1/4, 1/16} + {0, 1/8}.
    """
    valid = [n for n in range(1, width) if width % n == 0 or n == 2] + [bits]
    if k == bits:
        k = width
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= width or (width % k and k != 2):
        raise SpecError(
            f"k={k!r} makes no grid of {bits} bits: {width} bits of magnitude split into terms of k bits for "
            f"k = {', '.join(map(str, sorted(set(valid))))} (1 is uniform, {bits} powers of two)."
        )
    terms: list[list[int]] = [[] for _ in range(width // k)]
    exponent = itertools.count()
    rounds = 2**k - 1
    single: list[list[int]] = []
    for turn in range(rounds):
        if width % k and turn == rounds - 1:
            single = [[0, -next(exponent)]]
        for term in terms:
            term.append(-next(exponent))
    smallest = next(exponent) - 1
    choices = [[0, *(1 << (smallest + e) for e in term)] for term in terms]
    choices += [[0, 1 << (smallest + term[1])] for term in single]
    return sorted(sum(choice) for choice in itertools.product(*choices))


def _check_table(table: Sequence[float] | Tensor, name: str) -> list[float]:
    """A user's table as fp32 values; refused with the reason if it is not one."""
    try:
        values = torch.as_tensor(table, dtype=torch.float64, device="cpu").flatten().tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"table={table!r} of codec {name!r}: a table is a list of numbers, as in Levels([-1, 0, 1]) "
            'or "levels:table=-1|0|1".'
        ) from error
    levels = [to_float32(value) if abs(value) < 1e38 else value for value in values]
    if not 2 <= len(levels) <= 256:
        raise SpecError(f"table of codec {name!r}: needs 2 to 256 levels, has {len(levels)}.")
    if not all(math.isfinite(level) for level in levels):
        raise SpecError(f"table of codec {name!r}: every level must be finite; got {levels}.")
    for lower, upper in itertools.pairwise(levels):
        if lower >= upper:
            raise SpecError(
                f"table of codec {name!r}: levels must ascend without repeats in fp32, but {lower!r} comes before "
                f"{upper!r}. Pass sorted(set(table))."
            )
    peak = max(abs(level) for level in levels)
    if not 2.0**-16 <= peak <= 2.0**16:
        raise SpecError(
            f"table of codec {name!r}: the largest magnitude is {peak!r}, outside 2**-16 to 2**16. Every block has "
            "its own scale, so only ratios count: divide the table by its largest magnitude."
        )
    return levels


def _kernel_table(levels: list[float], bits: int) -> Tensor:
    """Levels and thresholds as kernels take them: fp32 [2, 2**bits]."""
    table = torch.full((2, 2**bits), math.nan, dtype=torch.float32, device="cpu")
    table[1] = math.inf
    thresholds = [threshold_between(*pair) for pair in itertools.pairwise(levels)]
    table[0, : len(levels)] = torch.tensor(levels, dtype=torch.float32, device="cpu")
    table[1, : len(thresholds)] = torch.tensor(thresholds, dtype=torch.float32, device="cpu")
    return table


def threshold_between(lower: float, upper: float) -> float:
    """The largest fp32 number not above the middle: an fp32 y exceeds one if and only if it exceeds the other."""
    middle = (Fraction(lower) + Fraction(upper)) / 2
    nearest = to_float32(float(middle))
    if Fraction(nearest) > middle:
        nearest = before_float32(nearest)
    return nearest
