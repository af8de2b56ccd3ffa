"""Plain torch: elements of blocks and their codes, and codes in a stream of bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import Element, Recipe
from narrowcast.kernels.reference.casts import cast_bits


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
