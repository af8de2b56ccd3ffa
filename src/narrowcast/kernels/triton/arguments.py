"""Triton: the arguments of kernels, by name, as several kernels share them."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.layout import SCALE_BYTES, Element, Format, Recipe, Scale, layout, scaling
from narrowcast.kernels.reference import draws
from narrowcast.kernels.triton import cuts
from narrowcast.kernels.triton.codes import INTERPRETED
from narrowcast.kernels.triton.cuts import Cut, Tile
from narrowcast.kernels.triton.groups import Group, group
from narrowcast.kernels.triton.tables import cells

UNROLLED = 16
"""Up to so many ranks, a sum's loop is unrolled, so that the loads of several ranks are in flight."""

OUTPUTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def places(format: Format, numel: int) -> dict[str, Any]:
    """Where things lie in a row, for every kernel."""
    where = layout(format, numel)
    return {
        "numel": numel,
        "block": where.block_size,
        "groups": where.blocks,
        "scales_at": where.scales_offset,
        "zeros_at": where.zeros_offset,
    }


def ends(format: Format, numel: int) -> dict[str, Any]:
    """Where things end in a row, for kernels that write one."""
    where = layout(format, numel)
    return {
        "row_bytes": where.row_bytes,
        "last_size": numel - (where.blocks - 1) * where.block_size,
        "codes_end": where.codes_bytes,
        "end": where.zeros_offset + (where.blocks if format.affine else 0),
    }


def form_of(format: Format, device: torch.device) -> Group:
    """FORM."""
    return group(
        element=int(format.element),
        bits=format.bits,
        scale=int(format.scale),
        scale_size=scale_size(format),
        stochastic=bool(format.stochastic),
        signed=format.signed_scale,
        fp8=format.element == Element.E4M3 and has_fp8(device),
    )


def encoding(recipe: Recipe, seed: int, anything: Tensor) -> dict[str, Any]:
    """What numbers become codes with; `anything` stands for a table where there is none."""
    step, limit = scaling(recipe.format, recipe.peak)
    mixed = draws.mix64(torch.tensor(seed, dtype=torch.int64, device="cpu")) if recipe.format.stochastic else 0
    return {"step": step, "top_scale": limit, "seed": int(mixed), **searching(recipe.table, anything)}


def searching(table: Tensor | None, anything: Tensor) -> dict[str, Any]:
    if table is None:
        curve = {"slope": 0.0, "middle": 0.0, "bend": 0.0, "reach": 0.0}
        return {"cells": anything, **curve, "SEARCH": group(cells=0, steps=0, searched=0)}
    its = cells(table)
    curve = {"slope": its.slope, "middle": its.middle, "bend": its.bend, "reach": its.reach}
    search = group(cells=its.size, steps=its.steps, searched=its.searched)
    return {"cells": its.entries, **curve, "SEARCH": search}


def summing(
    data: Tensor, stride: int, recipe: Recipe, tiles: Cut, own: Tensor, ranks: int, own_rank: int, divisor: int
) -> dict[str, Any]:
    """The rows that are summed, `stride` bytes apart, and how. `own` is read where `own_rank` is a rank."""
    format = recipe.format
    words = tiles.words(format.bits)
    code_size = 4 if words else max(format.bits // 8, 1)
    divide = "no" if divisor == 1 else "multiply" if divisor & (divisor - 1) == 0 else "divide"
    # One multiplication by a power of two rounds like the division.
    factor = 1.0 / divisor if divide == "multiply" else float(divisor)
    fused = format.scale != Scale.FP32 and _whole_codes(recipe)
    bytewise = cuts.BYTEWISE if fused and words and format.bits == 4 and format.element == Element.INT else 0
    terms = {"ranks": ranks if ranks <= UNROLLED else 0, "own_rank": own_rank, "divide": divide}
    return {
        "codes": seen(data, code_size),
        "scales": seen(data, scale_size(format)),
        "data": data,
        "levels": data if recipe.table is None else cells(recipe.table).levels,
        "own": own,
        "row_bytes": stride,
        "ranks": ranks,
        "divisor": factor,
        "SUM": group(words=words, code_size=code_size, **terms, fused=fused, bytewise=bytewise),
    }


def _whole_codes(recipe: Recipe) -> bool:
    """Whether codes stand for whole numbers small enough that multiplying by a 16-bit scale is exact."""
    if recipe.table is not None:
        return cells(recipe.table).whole
    return recipe.format.element == Element.INT


def options(tiles: Cut, tile: Tile) -> dict[str, Any]:
    """How Triton compiles; without fusion, since the reference rounds after every operation."""
    elements = tiles.groups * tiles.width
    warps = max(1, min(16, tile.warps * elements // tile.elements))
    return {"num_warps": warps, "enable_fp_fusion": False}


def scale_size(format: Format) -> int:
    return max(SCALE_BYTES[Scale(format.scale)], 1)


def seen(data: Tensor, size: int) -> Tensor:
    """The same memory as integers of `size` bytes."""
    return data.view(INTS[size])


def loadable(x: Tensor) -> Tensor:
    """The same memory, bf16 as integers: no conversion can touch a NaN then."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def readable(data: Tensor) -> tuple[Tensor, int]:
    """Rows that start at multiples of 16 bytes, and the bytes from one to the next."""
    count, width = data.shape
    stride = data.stride(0) if count > 1 else width
    if (width > 1 and data.stride(1) != 1) or stride % 16 or data.data_ptr() % 16:
        data = data.clone(memory_format=torch.contiguous_format)
        stride = width
    return data, stride


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@cache
def has_fp8(device: torch.device) -> bool:
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
