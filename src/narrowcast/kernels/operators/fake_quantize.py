"""Fake quantization: floats in, floats out, each at a level of a fixed grid times a scale.

`torch.ops.narrowcast.fake_quantize` takes x of any shape and one scale for all of it (axis -1) or one for each slice
along `axis`. With v = x * (1 / scale), both operations rounded to fp32, and q the level of v, y = q * scale in x's
dtype: bit for bit what a codec with these scales, levels and thresholds decodes. Infinities are clipped like every
other number beyond the outermost levels; a NaN stays one.

Gradients are straight-through: of x, the gradient where levels[0] <= v <= levels[-1] and zero beyond; of a scale, the
sum over its slice of grad * (q - v) inside and grad * q beyond: LSQ's step and APoT's reparameterized clipping, in
units of the grid. The terms are fp32, their sum is fp64 in an order that depends on the shape and the machine alone,
never on threads; a NaN in x makes it NaN. Forward-mode tangents follow the same rule. Neither has gradients of its own.

Scales are trusted to be finite and at least FLT_MIN in magnitude. fp64 is computed in fp32, as codecs do. Results lie
in memory as x does; autocast does not touch any of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from narrowcast.errors import DtypeError, GradientError, ShapeError
from narrowcast.kernels.arguments import FLOATS, MOST_LEVELS
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators.declare import declare, schema_of
from narrowcast.kernels.operators.derivatives import Rule, batched, differentiable, remember_tensors
from narrowcast.kernels.operators.dispatch import kernel_for, unwatched


def fake_quantize(x: Tensor, scale: Tensor, grid: Grid, axis: int | None) -> Tensor:
    """`x` at the levels of `grid` times `scale`: one for all of x (axis None), or one per slice along `axis`."""
    place = _check(x, scale, axis)
    if not grid.uniform and grid.levels.shape[0] > MOST_LEVELS:
        raise ShapeError(f"grid: {len(grid.levels)} levels, and a table has at most {MOST_LEVELS}: codes have 8 bits.")
    scale = scale.float()
    if unwatched(x) and unwatched(scale):
        if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad):
            return _StraightThrough.apply(x, scale, *grid, place)  # type: ignore[no-any-return, no-untyped-call]
        return forward(x, scale, *grid, place)
    return torch.ops.narrowcast.fake_quantize(x, scale, *grid, place)  # type: ignore[no-any-return]


def _check(x: Tensor, scale: Tensor, axis: int | None) -> int:
    """The axis as operators take it: never negative, but -1 for None."""
    if x.dtype not in FLOATS:
        raise DtypeError(
            f"x has dtype {x.dtype}: fake quantization takes float32, float16, bfloat16 and float64. "
            "Integers have no gradient; convert first with x.float()."
        )
    if axis is not None and not -x.dim() <= axis < x.dim():
        raise ShapeError(
            f"axis={axis}: x has {x.dim()} dimensions, shape {tuple(x.shape)}, so an axis is in "
            f"[{-x.dim()}, {x.dim()}). Pass axis=None for one scale for all of x."
        )
    place = -1 if axis is None else axis % x.dim()
    wanted = 1 if place < 0 else x.shape[place]
    if scale.numel() != wanted:
        raise ShapeError(
            f"scale has {scale.numel()} elements, shape {tuple(scale.shape)}: axis={axis} of x, shape "
            f"{tuple(x.shape)}, needs {wanted}, one for each slice. Was it made for another axis?"
        )
    return place


# -- implementations: any dense layout is [outer, channels, inner] in memory order -------------------------------------


def forward(x: Tensor, scale: Tensor, levels: Tensor, thresholds: Tensor, uniform: bool, axis: int) -> Tensor:
    """y. Arguments are trusted; axis is -1 for one scale. No gradient: see `fake_quantize`."""
    out = torch.empty_like(x)
    if x.numel():
        kernel, shape = kernel_for(x.device.type), _slice_shape(out, axis)
        kernel.fresh(out)
        kernel.fake_quantize(
            _view_slices(out, shape),
            _view_slices(_match_layout(x, out), shape),
            _flatten_scale(scale),
            Grid(levels, thresholds, uniform),
        )
    return out


def backward(
    grad: Tensor, x: Tensor, scale: Tensor, levels: Tensor, thresholds: Tensor, uniform: bool, axis: int
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the scale, from that of y."""
    dx, dscale = torch.empty_like(x), torch.empty_like(scale, memory_format=torch.contiguous_format)
    if not x.numel():
        dscale.zero_()
    else:
        kernel, shape = kernel_for(x.device.type), _slice_shape(dx, axis)
        kernel.fresh(dx)
        sources = _view_slices(_match_layout(grad, dx), shape), _view_slices(_match_layout(x, dx), shape)
        grid = Grid(levels, thresholds, uniform)
        kernel.fake_quantize_backward(
            _view_slices(dx, shape), _flatten_scale(dscale), *sources, _flatten_scale(scale), grid
        )
    return dx, dscale


def _slice_shape(x: Tensor, axis: int) -> tuple[int, int, int]:
    """A dense tensor's [outer, channels, inner]; the channels are the slices along `axis`, or all is one."""
    if axis < 0 or x.shape[axis] == 1:
        return 1, 1, x.numel()
    channels, inner = x.shape[axis], x.stride(axis)  # in a dense tensor, a stride is the size of what varies faster
    return x.numel() // (channels * inner), channels, inner


def _view_slices(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Dense memory as [outer, channels, inner]."""
    return x.as_strided(shape, (shape[1] * shape[2], shape[2], 1))


def _flatten_scale(scale: Tensor) -> Tensor:
    return scale.resolve_neg() if scale.dim() == 1 and scale.is_contiguous() else scale.reshape(-1).contiguous()


def _match_layout(x: Tensor, out: Tensor) -> Tensor:
    """`x` with the strides of `out`; copied where it has others, or where memory holds the opposite of what x shows."""
    return x if x.stride() == out.stride() and not x.is_neg() else torch.empty_like(out, dtype=x.dtype).copy_(x)


def _new_like(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)


def _new_gradients(grad: Tensor, x: Tensor, scale: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(scale.shape, dtype=torch.float32, device=scale.device)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
    *tensors, uniform, axis = inputs
    remember_tensors(ctx, *tensors)
    ctx.rest = uniform, axis


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_x, of_scale = torch.ops.narrowcast.fake_quantize_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return of_x, of_scale, None, None, None, None


def _tangents(ctx: Any, of_x: Tensor | None, of_scale: Tensor | None, *rest: None) -> Tensor:
    """The same rule the other way: of x inside the clips, of a scale q - v inside and q beyond."""
    (x, scale, levels, thresholds), (_, axis) = ctx.saved_tensors, ctx.rest
    each = scale.reshape(_scale_shape(x, axis))
    v = x.float() * (1 / each)
    inside = (levels[0] <= v) & (v <= levels[-1])
    total = torch.zeros_like(v) if of_x is None else torch.where(inside, of_x.float(), 0.0)
    if of_scale is not None:
        q = torch.ops.narrowcast.fake_quantize(x.float(), scale, levels, thresholds, *ctx.rest) / each
        total = total + torch.where(inside, q - v, q) * of_scale.float().reshape(_scale_shape(x, axis))
    return total.to(x.dtype)


def _scale_shape(x: Tensor, axis: int) -> list[int]:
    """The shape in which one scale for each slice along `axis` meets x."""
    return [-1 if place == axis else 1 for place in range(x.dim())]


def _refuse(ctx: Any, *grads: object) -> Any:
    raise GradientError(
        "fake_quantize was differentiated twice: its straight-through gradient is a rule, not a derivative, and has "
        "none of its own. Usual cause: a gradient penalty or create_graph=True over quantized layers. "
        "Compute the penalty on the float model, or detach() the first gradient."
    )


class _StraightThrough(torch.autograd.Function):
    """The operator without torch's dispatcher, which would take longer than the weights of a small layer."""

    @staticmethod
    def forward(ctx: FunctionCtx, *inputs: object) -> Tensor:
        _remember(ctx, inputs)
        return forward(*inputs)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # create_graph=True: the operator refuses a second derivative
            return _gradients(ctx, grad)
        return *backward(grad.resolve_neg(), *ctx.saved_tensors, *ctx.rest), None, None, None, None


def _remember_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """`_refuse` needs nothing."""


def _batch_of_x(x: Tensor, scale: Tensor, levels: Tensor, thresholds: Tensor, uniform: bool, axis: int) -> Tensor:
    place = axis if axis < 0 else axis + 1
    return torch.ops.narrowcast.fake_quantize(x, scale, levels, thresholds, uniform, place)  # type: ignore[no-any-return]


declare("fake_quantize", schema_of(forward), forward, _new_like)
declare("fake_quantize_backward", schema_of(backward), backward, _new_gradients)
differentiable("fake_quantize", Rule(_remember, _gradients, _tangents))
differentiable("fake_quantize_backward", Rule(_remember_nothing, _refuse, _refuse))
batched("fake_quantize", _batch_of_x)
batched("fake_quantize_backward", None)
