"""Casts: every element becomes a narrower float on its own.

`raw` keeps fp32 bits. The others round half to even, saturate finite values and keep infinities and NaN (`fp8_e4m3` has
no infinity and stores NaN). The two fp8 formats have a narrow range (about 2**-9 to 448, and 2**-16 to 57344), below
which small weights and gradients become zero. So they have a scale per block, and behave like every block-scaled codec;
`scale=none` is the plain cast.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from narrowcast.codecs.base import Codec
from narrowcast.codecs.options import non_default, parse_block, parse_scale
from narrowcast.errors import SpecError
from narrowcast.kernels.layout import FLT_MAX, Element, Format


class _Float(NamedTuple):
    element: Element
    bits: int
    top: float
    unit: float
    """Half the spacing of numbers, relative to the number."""
    tiny: float
    """Half the spacing of numbers below the smallest normal one."""


FLOATS = {
    "raw": _Float(Element.FP32, 32, FLT_MAX, 0.0, 0.0),
    "fp16": _Float(Element.FP16, 16, 65504.0, 2.0**-11, 2.0**-25),
    "bf16": _Float(Element.BF16, 16, 3.3895313892515355e38, 2.0**-8, 2.0**-134),
    "fp8_e4m3": _Float(Element.E4M3, 8, 448.0, 2.0**-4, 2.0**-10),
    "fp8_e5m2": _Float(Element.E5M2, 8, 57344.0, 2.0**-3, 2.0**-17),
}


FP8_BLOCK = 128
"""As many bytes as int8. Larger blocks save at most 3%, smaller ones gain no accuracy (bench/defaults.py)."""


class Cast(Codec):
    """fp32 bits, or a narrower float per element."""

    def __init__(self, name: str) -> None:
        self._float = FLOATS[name]
        super().__init__(name, Format(self._float.element, self._float.bits), self._float.top, {})

    def _bound(self, value: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        kind = self._float
        rounding = (value.abs() * kind.unit).clamp(min=scale * kind.tiny)
        return torch.maximum(rounding, value.abs() - scale * kind.top)


class Float8(Cast):
    """An fp8 format with a scale per block, or plain (`scale="none"`).

    The spec always says which of the two. A bare name in a file comes from a version in which the plain cast was the
    default, and means that (`registry.codec_in_file`).
    """

    options: ClassVar[tuple[str, ...]] = ("block", "scale")

    def __init__(self, name: str, *, block: int | str | None = None, scale: str | None = None) -> None:
        super().__init__(name)
        if scale == "none":
            if block is not None:
                raise SpecError(
                    f"block={block!r} of codec {name!r} with scale='none': a plain cast has no blocks. Drop one of the "
                    f'two: "{name}:block={block}", or "{name}:scale=none".'
                )
            Codec.__init__(self, name, self.format, self._float.top, {"scale": "none"})
            return
        block, scale = FP8_BLOCK if block is None else block, "fp32" if scale is None else scale
        format = Format(self._float.element, 8, parse_block(block, name), parse_scale(scale, name))
        given = non_default(block=(block, None), scale=(scale, "fp32"))
        Codec.__init__(self, name, format, self._float.top, given)
