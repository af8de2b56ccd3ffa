"""Launches of the kernels of this folder, on the current stream of x's device."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.cuda import nvrtc
from narrowcast.kernels.cuda.cuts import Cut
from narrowcast.kernels.cuda.formats import KINDS, levels_of, numbers_of, sources
from narrowcast.kernels.cuda.nvrtc import Boxes, Int
from narrowcast.kernels.cuda.slices import Slices
from narrowcast.kernels.cuda.wide import Wide, line_bytes
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


def launch_wide(wide: Wide, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    """Multiply with wide.cu, and add up with join.cu."""
    n, k = len(data), x.shape[1]
    in_fp32 = dict(wide.defines)["SCALING"] == 2
    levels = numbers_of(recipe, x.device) if in_fp32 else levels_of(recipe, x.dtype, x.device)
    width, height, divided = wide.shape.width, wide.shape.height, wide.tiles - wide.whole
    sums = torch.empty(divided * wide.parts * width * height, dtype=torch.float32, device=x.device) if divided else None
    codes_end, line = k * recipe.format.bits // 8, line_bytes(dict(wide.defines)["CODES"], wide.shape.step)
    codes, inputs = Boxes(data, codes_end, line, height), Boxes(x, k * x.element_size(), 128, width)
    places = (data.stride(0) if n > 1 else 0, layout(recipe.format, k).scales_offset)
    sizes = (len(x), n, k, *places, wide.columns, wide.whole, wide.parts)
    kernel = nvrtc.function(sources("wide"), "wide", wide.defines + reading(), x.device.index, early=True)
    given = (codes, inputs, out, bias, levels, sums, data, *(Int(size) for size in sizes))
    kernel(wide.grid, wide.shape.threads, wide.shared, given)
    if divided:
        shape = {"TILES": wide.shape.tiles, "TEAMS": wide.shape.teams}
        defines = {"PARTS": wide.parts, **shape, "X": KINDS[x.dtype], "SCALE": 0, "BLOCK": 0}
        defines |= {"BIAS": -1 if bias is None else KINDS[bias.dtype], "UNROLL": 1}
        add = nvrtc.function(sources("join"), "join", tuple(defines.items()), x.device.index, early=True)
        tiles = (Int(wide.columns), Int(wide.whole))
        add(divided * width * height // 1024, 256, 0, (sums, bias, out, Int(len(x)), Int(n), *tiles))


def reading() -> tuple[tuple[str, int], ...]:
    """What a product is compiled with, by when it may read its weights."""
    return (("READ_WEIGHTS_EARLY", int(may_read_weights_early())),)
