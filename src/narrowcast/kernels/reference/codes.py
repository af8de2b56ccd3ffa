"""Plain torch: elements of blocks and their codes, and codes in a stream of bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import FLT_MAX, Element, Recipe
from narrowcast.kernels.reference.casts import cast_bits, cast_value


def quantize(blocks: Tensor, scale: Tensor, zeros: Tensor, recipe: Recipe, draws: Tensor | None) -> Tensor:
    """The code of every element, as an integer tensor; only the low `bits` bits count."""
    format, table = recipe.format, recipe.table
    if format.element == Element.SIGN:
        return blocks.view(torch.int32) < 0
    y = blocks * (1.0 / scale)
    if format.element in (Element.E4M3, Element.E5M2):
        return cast_bits(y, format.element)
    if format.element == Element.LEVELS:
        assert table is not None
        return torch.searchsorted(table[1].contiguous(), y.contiguous())
    if draws is None:
        whole = y.round()
    else:
        whole = y.floor()
        whole = whole + (draws < y - whole)
    if format.affine:
        top = 2**format.bits - 1
        return (whole.clamp(-top, top).long() + zeros).clamp(0, top)
    top = 2 ** (format.bits - 1) - 1
    return whole.clamp(-top - 1 if format.signed_scale else -top, top).long()


def dequantize(codes: Tensor, scale: Tensor, zeros: Tensor | None, recipe: Recipe) -> Tensor:
    """What codes decode to in fp32: inverse of `quantize`. Integer codes come with their sign."""
    format, table = recipe.format, recipe.table
    if format.element == Element.SIGN:
        return torch.where(codes == 1, -scale, scale)
    if format.element == Element.INT:
        return codes.float() * scale + 0.0  # a zero times a negative scale is a zero all the same
    if format.affine:
        assert zeros is not None
        return ((codes - zeros).float() * scale).clamp(-FLT_MAX, FLT_MAX)
    if format.element == Element.LEVELS:
        assert table is not None
        return table[0][codes] * scale
    return cast_value(codes, format.element) * scale


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] as the little-endian bit stream [rows, ceil(n * bits / 8)]."""
    rows, n = codes.shape
    if bits >= 8:
        return codes.to({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]).contiguous().view(torch.uint8)
    codes = pad(codes.long() & (2**bits - 1), (0, -n % 8)).view(rows, -1, 8)
    steps = torch.arange(8, dtype=torch.int64, device=codes.device)
    words = (codes << (steps * bits)).sum(-1, keepdim=True)
    packed = (words >> (steps[:bits] * 8)) & 0xFF
    return packed.to(torch.uint8).view(rows, -1)[:, : -(-n * bits // 8)]


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """Inverse of `pack`: codes [rows, n] as non-negative int64 (16- and 32-bit codes keep their sign)."""
    rows = data.shape[0]
    data = data.clone(memory_format=torch.contiguous_format)  # aligned, whatever `data` is a view of
    if bits >= 8:
        return data.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]).long()
    groups = -(-n // 8)
    data = pad(data, (0, groups * bits - data.shape[1])).view(rows, groups, bits).long()
    steps = torch.arange(8, dtype=torch.int64, device=data.device)
    words = (data << (steps[:bits] * 8)).sum(-1, keepdim=True)
    codes: Tensor = (words >> (steps * bits)) & (2**bits - 1)
    return codes.view(rows, -1)[:, :n]
