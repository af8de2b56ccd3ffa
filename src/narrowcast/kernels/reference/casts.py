"""Plain torch: fp32 and the other floats.

Every cast rounds half to even, saturates finite values and keeps infinities and NaN (fp8 e4m3 has no infinity: NaN).
Every NaN that a cast touches becomes the one canonical NaN of its format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.layout import FLT_MAX, Element

NAN = float("nan")
CAST_DTYPE = {
    Element.FP16: torch.float16,
    Element.BF16: torch.bfloat16,
    Element.E4M3: torch.float8_e4m3fn,
    Element.E5M2: torch.float8_e5m2,
}
CAST_NAN = {Element.FP16: 0x7E00, Element.BF16: 0x7FC0, Element.E4M3: 0x7F, Element.E5M2: 0x7F}


def cast_bits(x: Tensor, element: int) -> Tensor:
    """fp32 as the bits of a narrower float; every NaN becomes the one in CAST_NAN."""
    if element == Element.FP32:
        return x.contiguous().view(torch.int32)
    dtype = CAST_DTYPE[Element(element)]
    narrow = saturate(x, dtype)
    bits = narrow.view(torch.uint8 if narrow.element_size() == 1 else torch.int16).long()
    lost = x.isnan() if element != Element.E4M3 else ~x.isfinite()
    return torch.where(lost, CAST_NAN[Element(element)], bits)


def cast_value(codes: Tensor, element: int) -> Tensor:
    """Inverse of `cast_bits`."""
    if element == Element.FP32:
        return codes.to(torch.int32).view(torch.float32)
    narrow = torch.uint8 if element in (Element.E4M3, Element.E5M2) else torch.int16
    value = codes.to(narrow).view(CAST_DTYPE[Element(element)]).float()
    return torch.where(value.isnan(), NAN, value)


def cast_output(value: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 results in the dtype that was asked for."""
    if dtype in (torch.float32, torch.float64):
        return value.to(dtype)
    return torch.where(value.isnan(), NAN, saturate(value, dtype))


def to_float32(x: Tensor) -> Tensor:
    """Any float dtype as fp32; fp32 itself is not touched, not even its NaNs."""
    if x.dtype == torch.float32:
        return x
    y = torch.where(x.isinf(), x, x.clamp(-FLT_MAX, FLT_MAX)) if x.dtype == torch.float64 else x
    return torch.where(y.isnan(), NAN, y.float())


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-top, top)).to(dtype)
