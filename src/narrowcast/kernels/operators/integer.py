"""Exact products and convolutions of integers: int8 x int8 -> int32.

`torch.ops.narrowcast.integer_linear` takes x [batch, k] and weights [rows, k], both int8, and returns int32
[batch, rows], each element the sum of k products. It is exact on every machine, in any order of sums: k is at most
131071, for which even -128 times -128 throughout fits into an int32. Integers have no gradient.

`torch.ops.narrowcast.integer_conv` takes fp32 x [images, channels, y, x], quantizes it to the levels of a grid, which
are integers, convolves them with int8 weights, and multiplies the exact sums by a factor for each output.

On a CPU it does not use `torch._int_mm`: without AVX-512 VNNI, oneDNN adds pairs of products in 16 bits, which
saturate, and the result is wrong by thousands (torch 2.13; ONEDNN_MAX_CPU_ISA=AVX2 shows it on any machine).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.errors import DtypeError, ShapeError
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators.declare import declare, schema_of
from narrowcast.kernels.operators.derivatives import batched
from narrowcast.kernels.operators.dispatch import kernel_for, unwatched
from narrowcast.kernels.windows import Window

LONGEST = 2**17 - 1
"""The largest k: 2**17 products of 2**14 would be 2**31, one too many for an int32."""


def integer_linear(x: Tensor, weight: Tensor) -> Tensor:
    """int8 `x` [batch, k] times int8 `weight` [rows, k]: int32 [batch, rows], exact."""
    if not (x.dtype == weight.dtype == torch.int8) or x.dim() != 2 or weight.dim() != 2:
        raise _explain(x, weight)
    k = x.shape[1]
    if k != weight.shape[1] or k > LONGEST:
        raise _explain(x, weight)
    if unwatched(x):
        return _multiply(x, weight)
    return torch.ops.narrowcast.integer_linear(x, weight)  # type: ignore[no-any-return]


def _explain(x: Tensor, weight: Tensor) -> DtypeError | ShapeError:
    """The error that says what is wrong with the two. Not in the caller, where every call of a small layer waits."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != torch.int8:
            return DtypeError(
                f"{name} has dtype {tensor.dtype}: integer_linear multiplies int8 codes. If its values lie in "
                f"[-128, 127], pass {name}.to(torch.int8)."
            )
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return ShapeError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: integer_linear takes [batch, k] and "
            "[rows, k] with the same k. Flatten the leading dimensions of x, as in x.flatten(0, -2)."
        )
    return ShapeError(
        f"x has k={x.shape[1]}: a sum of more than {LONGEST} products of int8 may overflow int32. "
        "Multiply in parts along k and add them up in int64."
    )


def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    out = _new_product(x, weight)
    if not x.shape[1]:
        return out.zero_()
    if out.numel():
        kernel_for(x.device.type).integer_linear(out, x, weight)
    return out


def _new_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)


declare("integer_linear", schema_of(_multiply), _multiply, _new_product)


def integer_conv(
    x: Tensor, scale: Tensor, grid: Grid, weight: Tensor, factor: Tensor, bias: Tensor | None, window: Window
) -> Tensor:
    """`x` at its levels times `weight`, whose bytes lie in words (kernels/windows.py): fp32 [images, outputs, y, x].

    Arguments are checked by the kernel: modules say what is wrong with an input in their own words.
    """
    if unwatched(x):
        return _run(x, scale, grid, weight, factor, bias, window)
    steps = list(window)  # torch 2.11's compiler gives an operator no tuple with names
    return torch.ops.narrowcast.integer_conv(x, scale, *grid, weight, factor, bias, steps)  # type: ignore[no-any-return]


def _run(
    x: Tensor, scale: Tensor, grid: Grid, weight: Tensor, factor: Tensor, bias: Tensor | None, window: Window
) -> Tensor:
    size = window.outputs(x.shape[2], x.shape[3], weight.shape[2:4])
    out = torch.empty(x.shape[0], weight.shape[0], *size, dtype=torch.float32, device=x.device)
    if out.numel():
        kernel_for(x.device.type).integer_conv(out, x.contiguous(), scale, grid, weight, factor, bias, window)
    return out


def _convolve(
    x: Tensor,
    scale: Tensor,
    levels: Tensor,
    thresholds: Tensor,
    uniform: bool,
    weight: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    window: Sequence[int],
) -> Tensor:
    return _run(x, scale, Grid(levels, thresholds, uniform), weight, factor, bias, Window(*window))


def _new_image(
    x: Tensor,
    scale: Tensor,
    levels: Tensor,
    thresholds: Tensor,
    uniform: bool,
    weight: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    window: Sequence[int],
) -> Tensor:
    size = Window(*window).outputs(x.shape[2], x.shape[3], weight.shape[2:4])
    return torch.empty(x.shape[0], weight.shape[0], *size, dtype=torch.float32, device=x.device)


def _batch_of_images(x: Tensor, *rest: object) -> Tensor:
    out: Tensor = torch.ops.narrowcast.integer_conv(x.flatten(0, 1), *rest)
    return out.view(*x.shape[:2], *out.shape[1:])


declare("integer_conv", schema_of(_convolve), _convolve, _new_image)
batched("integer_conv", _batch_of_images)
