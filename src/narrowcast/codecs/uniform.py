"""Uniform codes: `sign` and `int2` to `int8`, with one scale per block.

`intN` stores round(x / scale), a two's complement integer; zero is exact. The scale's magnitude is max|x| / 2**(N-1),
and its sign the one that gives the block's largest element the code -2**(N-1), which has no positive counterpart: at
equal bytes that gains 5 dB at 2 bits, 1 dB at 4 and nothing at 8 over symmetric codes (docs/defaults.md).
`zero_point=true` spends the codes on [min, max] instead (stretched to hold zero, which stays exact).
`stochastic=true` rounds up with the probability that makes the error zero on average, with symmetric codes.
`sign` keeps one bit per element, and decodes to plus or minus the block's mean magnitude.

Defaults (block and scale) come from the measurement in docs/defaults.md.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.options import default_block, default_scale, non_default, parse_block, parse_flag, parse_scale
from narrowcast.kernels.layout import Element, Format


class Uniform(Codec):
    """`int2` to `int8`: integers times one scale per block."""

    options: ClassVar[tuple[str, ...]] = ("block", "scale", "zero_point", "stochastic")

    def __init__(
        self,
        bits: int,
        *,
        block: int | str | None = None,
        scale: str | None = None,
        zero_point: bool = False,
        stochastic: bool = False,
    ) -> None:
        name = f"int{bits}"
        block = default_block(bits) if block is None else block
        scale = default_scale(bits) if scale is None else scale
        affine = parse_flag(zero_point, "zero_point", name)
        random = parse_flag(stochastic, "stochastic", name)
        format = Format(
            Element.AFFINE if affine else Element.INT,
            bits,
            parse_block(block, name),
            parse_scale(scale, name),
            int(random),
        )
        given = non_default(
            block=(block, default_block(bits)),
            scale=(scale, default_scale(bits)),
            zero_point=(affine, False),
            stochastic=(random, False),
        )
        super().__init__(name, format, float(_peak(format)), given)

    def _bound(self, value: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        half = 2 ** (self.bits - 1)
        lowest = -zeros if self.format.affine else -zeros - (half if self.format.signed_scale else half - 1)
        highest = 2**self.bits - 1 - zeros if self.format.affine else zeros + (half - 1)
        code = value / scale
        clipping = torch.maximum(code - highest, lowest - code)
        return clipping.clamp(min=1.0 if self.stochastic else 0.5) * scale.abs()


def _peak(format: Format) -> int:
    """The largest magnitude that a code stands for; for affine codes, how many of them a block spreads over.

    Stochastic rounding may go up at both ends of a block, so an affine block leaves one code unused. With the zero
    point rounded up, ceil(a) + ceil(b) < a + b + 2 keeps every code in range: up to fp32 rounding, nothing is clipped.
    """
    if format.affine:
        return int(2**format.bits - (2 if format.stochastic else 1))
    half = int(2 ** (format.bits - 1))
    return half if format.signed_scale else half - 1


class Sign(Codec):
    """One bit per element; the scale is the block's mean magnitude."""

    options: ClassVar[tuple[str, ...]] = ("block", "scale")

    def __init__(self, *, block: int | str | None = None, scale: str | None = None) -> None:
        block = 64 if block is None else block
        scale = "bf16" if scale is None else scale
        format = Format(Element.SIGN, 1, parse_block(block, "sign"), parse_scale(scale, "sign"))
        super().__init__("sign", format, 1.0, non_default(block=(block, 64), scale=(scale, "bf16")))

    def _bound(self, value: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        return (value.abs() - scale).abs()
