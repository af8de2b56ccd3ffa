"""Plain torch: products with encoded weights, and with integers."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.layout import Recipe
from narrowcast.kernels.reference.rows import decode_float32


def linear(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    """`x` [batch, numel] times the transpose of the decoded rows, plus `bias` [rows], in fp32; rounded once.

    The one operation whose sums have no fixed order: other kernels come as near as fp32 sums in another order do.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = decode_float32(data, x.shape[1], recipe).to(wide)
    out = torch.empty(len(x), len(weight), dtype=wide, device=x.device)
    torch.mm(x.to(wide), weight.t(), out=out)  # autocast leaves alone what is written into `out`
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


def integer_linear(x: Tensor, weight: Tensor) -> Tensor:
    """int8 `x` [batch, k] times the transpose of int8 `weight` [rows, k], in int32: fp64 holds every sum exactly."""
    return (x.double() @ weight.double().t()).to(torch.int32)
