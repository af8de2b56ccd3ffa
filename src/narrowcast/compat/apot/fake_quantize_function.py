"""Fake quantization with PyTorch's gradient: straight through where |x| <= alpha, zero beyond.

On an unsigned grid that lets the gradient of negative numbers pass, though they all become 0: test_fake_quantize.py
wants it so. `narrowcast.nn.FakeQuantize` passes it only where the grid reaches, and learns alpha, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from narrowcast.compat.apot.apot_utils import as_floats, clipped, quant_dequant_util


class fake_quantize_function(torch.autograd.Function):
    """`fake_quantize_function.apply(x, alpha, gamma, quantization_levels, level_indices)`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, alpha: Tensor, gamma: Tensor, quantization_levels: Tensor, level_indices: Tensor
    ) -> Tensor:
        values = as_floats("x", x)
        within = clipped(values, alpha)
        ctx.save_for_backward(within == values)  # which a NaN is not
        return quant_dequant_util(within, quantization_levels)

    @staticmethod
    def backward(ctx, grad_output: Tensor):  # type: ignore[no-untyped-def]
        (mask,) = ctx.saved_tensors
        return grad_output * mask, None, None, None, None
