"""A tensor without its mean, and its standard deviation.

With c = x - mean and s = |c| / sqrt(n), the gradient of x is g_c - mean(g_c) + g_s c / (n s), since the c sum to zero.
Where mean and deviation count as constants, it is g_c alone. A constant tensor has s = 0, and no gradient through it.

The derivative is written out because autograd takes twice the time, which matters beside the product of a small layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels import operators


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """x without its mean, and its deviation."""
    centred = x - x.mean()
    return centred, torch.linalg.vector_norm(centred) / math.sqrt(max(x.numel(), 1))


def through_moments(of_centred: Tensor, of_deviation: Tensor, centred: Tensor, deviation: Tensor) -> Tensor:
    """The gradient of x."""
    factor = torch.where(deviation > 0, of_deviation / (deviation * centred.numel()), 0.0)
    return torch.addcmul(of_centred - of_centred.mean(), centred, factor)


def normalized(x: Tensor, through: bool) -> tuple[Tensor, Tensor]:
    """x without its mean, and its deviation; differentiable through both if `through`."""
    if not operators.transformed():
        return Normalize.apply(x, through)  # type: ignore[no-any-return,no-untyped-call]
    if through:  # torch's own operations, which have every derivative
        return moments(x)
    return x - x.mean().detach(), moments(x)[1].detach()


def standardized(x: Tensor) -> Tensor:
    """(x - mean) / deviation in fp32, as the paper's own code has it: dividing by n - 1, both constants of the batch.

    A constant tensor becomes zeros.
    """
    values = x.float()
    fixed = values.detach()
    deviation = fixed.std() if fixed.numel() > 1 else fixed.new_ones(())
    return (values - fixed.mean()) / torch.where(deviation > 0, deviation, 1.0)


class Normalize(torch.autograd.Function):
    """x to (x - mean, deviation); differentiable through both if `through`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, through: bool) -> tuple[Tensor, Tensor]:
        centred, deviation = moments(x)
        ctx.through = through
        ctx.save_for_backward(centred, deviation)
        return centred, deviation

    @staticmethod
    def backward(ctx: Any, of_centred: Tensor, of_deviation: Tensor) -> tuple[Tensor, None]:
        if not ctx.through:
            return of_centred, None
        return through_moments(of_centred, of_deviation, *ctx.saved_tensors), None
