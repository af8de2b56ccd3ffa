"""y = x W^T + b, with W as encoded rows.

`torch.ops.narrowcast.linear` takes x [..., numel] and W as uint8 [out, row_bytes(numel)], each row one output's
weights. Its meaning: decode W to fp32, multiply and add the bias in fp32, round once to x's dtype. It is an operator of
its own, so that torch.compile neither breaks the graph there nor rewrites it, and it is differentiable in x and bias.

A kernel may decline a call: `Kernel.linear` returns False for a format or a batch that it is not made for. Then W is
decoded and multiplied tile by tile, never whole, in x's own dtype, or in fp32 where torch is faster so (`_tile_dtype`).
The result is the same but for one more rounding of each weight where that is fp16 or bf16, as in kernels that multiply
in bf16. The order of sums depends on shapes, dtypes and the machine alone, so the same call gives the same bits; where
torch multiplies on a CPU, it depends on the number of threads, too.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import ShapeError
from narrowcast.kernels.layout import Count, Recipe
from narrowcast.kernels.operators.declare import declare, schema_of
from narrowcast.kernels.operators.derivatives import Rule, batched, differentiable, remember_tensors
from narrowcast.kernels.operators.dispatch import kernel_for, unwatched

TILES = {"cpu": 1 << 21, "cuda": 1 << 25}
"""Weights decoded at a time where no kernel multiplies them as they are. On a GPU small tiles cost launches. On a CPU a
tile should stay in the cache, while torch's product wants many rows, above all for two threads (bench/linear_batches.py
with 2^18 to 2^23 on a Zen 5 as AVX2, in rows of 4096 and 14336)."""


def linear(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    """What modules call: the kernel directly where nobody watches, else the operator.

    A bias of one element counts for every output, as in torch's own `linear`.
    """
    if bias is not None and bias.shape != data.shape[:1]:
        bias = _spread_bias(bias, data.shape[0])
    wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if not wanted and unwatched(x) and not (bias is not None and bias.is_neg()):
        return _multiply(x, data, recipe, bias)
    return torch.ops.narrowcast.linear(x, data, *recipe, bias)  # type: ignore[no-any-return]


def _spread_bias(bias: Tensor, outputs: int) -> Tensor:
    if bias.dim() > 1 or bias.numel() != 1:
        raise ShapeError(
            f"bias: expected one element for each of the {outputs} outputs, or one for all of them, got shape "
            f"{tuple(bias.shape)}. A bias of more dimensions is added afterwards: linear(x) + bias."
        )
    return bias.reshape(1).expand(outputs)


def _multiply(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    out = _new_product(x, data)
    if out.numel() == 0:
        return out
    flat, matrix = x.resolve_neg() if x.is_neg() else x, out
    if x.dim() != 2:
        flat, matrix = flat.reshape(-1, x.shape[-1]), out.view(-1, data.shape[0])
    if bias is not None and bias.is_neg():
        bias = bias.resolve_neg()
    if not kernel_for(x.device.type).linear(matrix, flat, data, recipe, bias):
        _multiply_tiles(matrix, flat, data, recipe, bias)
    return out


def _multiply_tiles(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    x = x.to(_tile_dtype(x))
    for first, weight in _decode_tiles(data, x.shape[1], x.dtype, recipe):
        some = out[:, first : first + len(weight)]
        target = some if some.dtype == x.dtype else some.to(x.dtype)
        if bias is None:
            torch.mm(x, weight.t(), out=target)
        else:
            torch.addmm(bias[first : first + len(weight)].to(x.dtype), x, weight.t(), out=target)
        if target is not some:
            some.copy_(target)


def _tile_dtype(x: Tensor) -> torch.dtype:
    """What tiles are decoded to and multiplied in: torch multiplies fp16 on a CPU at a third of the speed of fp32."""
    slow = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not _multiplies_bf16())
    return torch.float32 if slow and x.device.type == "cpu" else x.dtype


@functools.cache
def _multiplies_bf16() -> bool:
    """Whether torch multiplies bf16 faster than fp32 on this CPU.

    On x86 without AVX512-BF16 it takes 1.3 times as long as in fp32 with AVX-512, 3.4 times with AVX2 (256 rows by 64
    vectors of 4096, one core of a Zen 5 that was told to do without). Other CPUs were not measured.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()


def _decode_tiles(data: Tensor, numel: int, dtype: torch.dtype, recipe: Recipe) -> Iterator[tuple[int, Tensor]]:
    """The decoded weights, a few rows at a time, each with the number of its first row."""
    step = max(1, TILES.get(data.device.type, TILES["cpu"]) // max(numel, 1))
    memory = torch.empty(min(step, len(data)), numel, dtype=dtype, device=data.device)
    for first in range(0, len(data), step):
        some = data[first : first + step]
        weight = memory[: len(some)]  # the same memory each time: new pages cost more than decoding
        kernel_for(data.device.type).decode(weight, some, recipe)
        yield first, weight


def _new_product(x: Tensor, data: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], data.shape[0]))


# -- the gradient of x: grad_x = grad_y W, summed over tiles in fp32 ------------------------------------------------


def _multiply_backward(grad: Tensor, data: Tensor, numel: Count, recipe: Recipe) -> Tensor:
    flat = grad.reshape(-1, grad.shape[-1])
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    total = torch.zeros(len(flat), numel, dtype=wide, device=grad.device)
    flat = flat.to(_tile_dtype(grad))
    product = torch.empty(len(flat), numel, dtype=flat.dtype, device=grad.device)
    for first, weight in _decode_tiles(data, numel, flat.dtype, recipe):
        torch.mm(flat[:, first : first + len(weight)], weight, out=product)  # autocast leaves alone what has an `out`
        total += product
    return total.to(grad.dtype).view(*grad.shape[:-1], numel)


def _new_gradient(grad: Tensor, data: Tensor, numel: int, *rest: object) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], numel))


# -- derivatives: y is linear in x and in the bias, and grad_x is linear in grad_y ----------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, data, format, peak, table, bias = inputs
    remember_tensors(ctx, data, table)
    ctx.recipe, ctx.numel = (format, peak), x.shape[-1]
    ctx.bias = None if bias is None else (bias.dtype, bias.shape)
    ctx.out = output.dtype, output.shape


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    data, table = ctx.saved_tensors
    of_x = of_bias = None
    if ctx.wanted[0]:
        of_x = torch.ops.narrowcast.linear_backward(grad, data, ctx.numel, *ctx.recipe, table)
    if ctx.wanted[5]:
        dtype, shape = ctx.bias
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0).sum_to_size(shape).to(dtype)
    return of_x, None, None, None, None, of_bias


def _tangents(ctx: Any, of_x: Tensor | None, *rest: Tensor | None) -> Tensor | None:
    (data, table), of_bias, (dtype, shape) = ctx.saved_tensors, rest[-1], ctx.out
    if of_x is None:
        return None if of_bias is None else of_bias.to(dtype).expand(shape).clone()
    y: Tensor = torch.ops.narrowcast.linear(of_x, data, *ctx.recipe, table, None)
    return y if of_bias is None else y + of_bias.to(dtype)


def _remember_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, data, numel, format, peak, table = inputs
    remember_tensors(ctx, data, table)
    ctx.recipe, ctx.numel = (format, peak), numel


def _gradients_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    data, table = ctx.saved_tensors
    return torch.ops.narrowcast.linear(grad, data, *ctx.recipe, table, None), None, None, None, None, None


def _tangents_backward(ctx: Any, of_grad: Tensor, *rest: None) -> Tensor:
    data, table = ctx.saved_tensors
    return torch.ops.narrowcast.linear_backward(of_grad, data, ctx.numel, *ctx.recipe, table)  # type: ignore[no-any-return]


declare("linear", schema_of(_multiply), _multiply, _new_product)
declare("linear_backward", schema_of(_multiply_backward), _multiply_backward, _new_gradient)
differentiable("linear", Rule(_remember, _gradients, _tangents))
differentiable("linear_backward", Rule(_remember_backward, _gradients_backward, _tangents_backward))
for _operator in (torch.ops.narrowcast.linear, torch.ops.narrowcast.linear_backward):
    batched(_operator.__name__, _operator)  # the dimensions in front of x's last are all a batch
