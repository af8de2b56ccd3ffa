"""Plain torch: products with encoded weights, and products and convolutions with integers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowcast.kernels.layout import Grid, Recipe
from narrowcast.kernels.reference.casts import NAN
from narrowcast.kernels.reference.grids import fake_quantize
from narrowcast.kernels.reference.rows import decode_float32
from narrowcast.kernels.windows import Window, from_words


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


def integer_conv(
    x: Tensor, scale: Tensor, grid: Grid, weight: Tensor, factor: Tensor, bias: Tensor | None, window: Window
) -> Tensor:
    """`x` [images, channels, y, x] at its levels, convolved with int8 weights: exact sums times `factor`, plus `bias`.

    The sums become fp32; the product and the bias are one rounding each. `weight` lies in words (windows.py). An output
    whose window holds a NaN is NaN.
    """
    levels = fake_quantize(x.view(1, 1, -1), scale, grid).view_as(x)
    # A level times the scale, divided by it, is within two roundings of the level, which is at most 255.
    return convolve_levels((levels / scale).round(), weight, factor, bias, window, _sums)


def convolve_levels(
    levels: Tensor,
    weight: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    window: Window,
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The same, from levels as fp32; `multiply` gives the exact products of [windows, k] and [outputs, k]."""
    images, channels, *size = levels.shape
    groups, kernel = window.groups, weight.shape[2:4]
    height, width = window.outputs(size[0], size[1], kernel)
    around = (window.left, window.right, window.top, window.bottom)
    dilation, stride = (window.dilation_y, window.dilation_x), (window.stride_y, window.stride_x)
    columns = F.unfold(F.pad(levels, around), tuple(kernel), dilation, 0, stride).transpose(1, 2)
    rows = from_words(weight, channels // groups).flatten(1)
    results = []
    for part, of_group in zip(columns.chunk(groups, 2), rows.chunk(groups), strict=True):
        windows = part.reshape(-1, part.shape[2])
        unknown = windows.isnan()
        sums = multiply(torch.where(unknown, 0.0, windows), of_group).float()
        results.append(torch.where(unknown.any(1, keepdim=True), NAN, sums))
    out = torch.cat(results, 1) * factor
    out = out if bias is None else out + bias
    return out.view(images, height, width, -1).permute(0, 3, 1, 2)


def _sums(windows: Tensor, weight: Tensor) -> Tensor:
    return windows.double() @ weight.double().t()
