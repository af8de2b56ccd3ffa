"""Launches of the kernels of this folder, on the current stream of x's device."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.cuda import nvrtc
from narrowcast.kernels.cuda.cuts import Cut
from narrowcast.kernels.cuda.formats import KINDS, levels_of, sources
from narrowcast.kernels.cuda.nvrtc import Int
from narrowcast.kernels.cuda.slices import Slices
from narrowcast.kernels.early import may_read_weights_early
from narrowcast.kernels.layout import Recipe, layout


def launch_cut(cut: Cut, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    """Multiply with dot.cu or tile.cu."""
    n, k = len(data), x.shape[1]
    scales = Int(layout(recipe.format, k).scales_offset)
    with torch.cuda.device(x.device):
        kernel = nvrtc.function(sources(cut.name), cut.name, cut.defines + reading(), x.device.index, early=True)
        sizes = (Int(n), Int(k), data.stride(0) if n > 1 else 0, scales)
        if cut.name == "dot":
            kernel(cut.grid, cut.threads, cut.shared, (data, x, out, bias, *sizes))
        else:
            levels = levels_of(recipe, x.dtype, x.device)
            kernel(cut.grid, cut.threads, cut.shared, (data, x, out, bias, levels, Int(len(x)), *sizes, x.stride(0)))


def launch_slices(slices: Slices, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    """Multiply with slices.cu, and add up with total.cu."""
    levels = levels_of(recipe, x.dtype, x.device)
    n, k = len(data), x.shape[1]
    parts = slices.parts
    stride = data.stride(0) if n > 1 else 0
    sizes = (Int(len(x)), Int(n), Int(k), stride, Int(layout(recipe.format, k).scales_offset), x.stride(0), Int(parts))
    sums = out if parts == 1 else torch.empty(parts, len(x), n, dtype=torch.float32, device=x.device)
    kernel = nvrtc.function(sources("slices"), "slices", slices.defines + reading(), x.device.index, early=True)
    kernel(slices.grid, slices.threads, slices.shared, (data, x, sums, bias, levels, *sizes))
    if parts > 1:
        wide = 4 if n % 4 == 0 else 1
        defines = {"PARTS": parts, "WIDE": wide, "X": KINDS[x.dtype], "BIAS": -1 if bias is None else KINDS[bias.dtype]}
        defines |= {"SCALE": 0, "BLOCK": 0, "UNROLL": 1}
        add = nvrtc.function(sources("total"), "total", tuple(defines.items()), x.device.index, early=True)
        add(-(-out.numel() // (256 * wide)), 256, 0, (sums, bias, out, out.numel(), Int(n)))


def reading() -> tuple[tuple[str, int], ...]:
    """What a product is compiled with, by when it may read its weights."""
    return (("READ_WEIGHTS_EARLY", int(may_read_weights_early())),)
