"""Plain torch: a step of AdamW on moments that are held in rows. kernels/moments.py says what the bytes mean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels.layout import Format, Recipe, layout
from narrowcast.kernels.moments import (
    LEAST_EXPONENT,
    MANTISSA,
    MOST_EXPONENT,
    SHIFT,
    TOP,
    Step,
    second_format,
    second_recipe,
)
from narrowcast.kernels.reference.casts import NAN, cast_output, to_float32
from narrowcast.kernels.reference.draws import uniform
from narrowcast.kernels.reference.rows import decode_float32, encode
from narrowcast.kernels.reference.scales import magnitude_bits


def adamw(
    parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor, recipe: Recipe, seed: int, takes_momentum: bool,
    step: Step,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The parameter [rows, numel] and the rows of both moments after a step."""
    numel = parameter.shape[1]
    p, g = to_float32(parameter), to_float32(grad)
    m, v = g, decode_float32(second, numel, second_recipe(recipe.format, second.device))
    if not takes_momentum:
        m = decode_float32(first, numel, recipe) * step.beta1 + g * step.take1
        v = v * step.beta2 + (g * step.take2) * g
        second = encode_second(v, second_format(recipe.format), ~seed)
    m = torch.where(m.isnan(), NAN, m)
    root = v.double().sqrt().float()  # correctly rounded; torch's of fp32 is not, where MKL computes it
    p = p * step.decay - (m / (root * step.correction + step.eps)) * step.size
    return cast_output(torch.where(p.isnan(), NAN, p), parameter.dtype), encode(m, recipe, seed), second


def encode_second(v: Tensor, format: Format, seed: int) -> Tensor:
    """Second moments [rows, numel], none of them negative, as rows."""
    count, numel = v.shape
    where = layout(format, numel)
    out = torch.zeros(count, where.row_bytes, dtype=torch.uint8, device=v.device)
    if v.numel() == 0:
        return out
    blocks = pad(v, (0, where.blocks * where.block_size - numel)).view(count, where.blocks, -1)
    top = magnitude_bits(blocks).amax(-1, keepdim=True)
    finite = top < 0x7F800000
    exponent = ((top >> 23) + 1).clamp(LEAST_EXPONENT, MOST_EXPONENT)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    blocks = torch.where(finite, blocks, 0.0)
    y = blocks * inverse
    draws = uniform(seed, count, where.blocks, where.block_size, v.device)
    bits = (y.view(torch.int32) + (draws * 2**SHIFT).to(torch.int32)) >> SHIFT
    codes = (bits + (TOP - (127 << MANTISSA))).clamp(1, TOP)
    codes = torch.where(blocks > 0, codes, 0).to(torch.uint8)
    out[:, :numel] = codes.view(count, -1)[:, :numel]
    out[:, where.scales_offset : where.zeros_offset] = torch.where(finite, exponent, 255).squeeze(-1).to(torch.uint8)
    return out
