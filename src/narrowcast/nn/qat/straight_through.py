"""A quantizer's forward and backward pass as one autograd node.

Beside the rounding itself, FakeQuantize takes half a dozen small operations: the scale from the clip, the gradient's
factor, the mean and the deviation. Recorded one by one they take longer than the rounding of a small layer's weights.
`Quantize` does the same operations in the same order, so that its results and gradients have the same bits, and records
one node. It needs a clip above FLOOR, plain tensors, and no transform or mode that must see single operations;
`quantize_in_one_node` returns None where that does not hold.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.kernels import operators
from narrowcast.kernels.arguments import FLOAT32, FLOATS
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators import fake_quantize as fake
from narrowcast.nn.qat.clips import scale_of
from narrowcast.nn.qat.normalize import moments, through_moments

FLOOR = 2.0**-64
"""The smallest clip: far below any weight, and far above where fp32 loses digits."""


class Way(NamedTuple):
    """The grid and the options by which a quantizer computes its result from x and alpha."""

    grid: Grid
    axis: int | None
    top: float
    factor: float
    """Of the gradient of alpha."""
    normalize: str | None


def quantize_in_one_node(x: Tensor, alpha: Tensor, way: Way) -> Tensor | None:
    """x on the grid of `way`, in x's own dtype; None if this takes more than one node."""
    plain = type(x) is Tensor or type(x) is nn.Parameter
    dtypes = FLOATS if way.normalize is None else FLOAT32
    fixed = alpha.detach()
    plain = plain and x.dtype in dtypes and x.numel() > 0
    if not plain or not operators.unwatched(fixed) or x.is_neg() or not surely_good(fixed):
        return None
    return Quantize.apply(x, alpha, way)  # type: ignore[no-any-return,no-untyped-call]


def surely_good(sizes: Tensor) -> bool:
    """Whether clips or deviations are in range, where asking costs little: on a CPU, not compiled, not transformed."""
    if torch.compiler.is_compiling() or sizes.device.type != "cpu" or not sizes.numel() or operators.transformed():
        return False
    low, high = torch.aminmax(sizes)
    return low.item() >= FLOOR and high.item() < math.inf  # neither holds of a NaN


def prepare(x: Tensor, alpha: Tensor, way: Way) -> tuple[Tensor, ...]:
    """The tensor to round and its scale; if normalized, also the clip's scale, the deviation and the divisor."""
    scale = scale_of(alpha, way.top)
    if way.normalize is None:
        return x, scale
    centred, deviation = moments(x)
    # A constant tensor equals its mean: what remains is zero, whatever it is divided by.
    counts = deviation if surely_good(deviation) else torch.where(deviation >= FLOOR, deviation, 1.0)
    return centred, scale * counts, scale, deviation, counts


class Quantize(torch.autograd.Function):
    """x and alpha to x on the grid, with gradients of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, way: Way) -> Tensor:
        parts = prepare(x, alpha, way)
        ctx.save_for_backward(x, alpha, *parts)
        ctx.flat = way.normalize is not None and parts[4] is not parts[3]
        ctx.way, ctx.axis = way, -1 if way.axis is None else way.axis % x.dim()
        return fake.forward(parts[0], parts[1], *way.grid, ctx.axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        way: Way = ctx.way
        x, alpha, *parts = ctx.saved_tensors
        gradients = fake.backward
        if torch.is_grad_enabled():  # create_graph=True: the operator refuses to be differentiated a second time
            parts, gradients = list(prepare(x, alpha, way)), torch.ops.narrowcast.fake_quantize_backward
        shifted, scale, *normalized = parts
        of_x, of_scale = gradients(grad.resolve_neg(), shifted, scale, *way.grid, ctx.axis)
        if normalized:
            plain, deviation, counts = normalized
            if way.normalize == "through":
                of_counts = (of_scale * plain).sum()
                of_deviation = torch.where(deviation >= FLOOR, of_counts, 0.0) if ctx.flat else of_counts
                of_x = through_moments(of_x, of_deviation, shifted, deviation)
            of_scale = of_scale * counts
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        of_alpha = scale_of(of_scale, way.top)
        return of_x, of_alpha if way.factor == 1.0 else of_alpha * way.factor, None
