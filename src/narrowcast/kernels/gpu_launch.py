"""Triton: which kernel runs on which grid.

Arguments are trusted, as everywhere below codecs. Bytes that no codec of that name wrote (scales out of all range)
decode as in the reference; sums of such rows may differ from it where a product overflows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels import draws, gpu_kernels, gpu_plan
from narrowcast.kernels.gpu_codes import INTERPRETED
from narrowcast.kernels.gpu_plan import Cut, Tile, cut, launches, tile_for
from narrowcast.kernels.gpu_tables import cells
from narrowcast.kernels.layout import SCALE_BYTES, Element, Format, Recipe, Scale, layout, scaling

UNROLLED = 16
"""Up to so many ranks, a sum's loop is unrolled, so that the loads of several ranks are in flight."""

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OUTPUTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class Triton:
    """The operations of `ops.Kernel` on CUDA tensors (on CPU tensors in Triton's interpreter)."""

    name = "triton"

    def encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        if rows.numel() == 0:
            return
        rows = rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()
        with _aligned(out) as target, _on(rows.device):
            _encode(target, rows, recipe, seed)

    def decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        if out.numel() == 0:
            return
        with _contiguous(out) as target, _on(data.device):
            _decode(target, data, recipe, 1, None, -1, 1)

    def decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        if out.numel() == 0:
            return
        rank = own_rank if own is not None else -1
        with _contiguous(out) as target, _on(data.device):
            _decode(target.view(1, -1), data, recipe, len(data), own, rank, divisor)

    def reduce(
        self,
        out: Tensor,
        data: Tensor,
        numel: int,
        recipe: Recipe,
        own: Tensor | None,
        own_rank: int,
        divisor: int,
        seed: int,
    ) -> None:
        if numel == 0:
            return
        tile = tile_for("reduce", recipe.format.bits)
        if cut(recipe.format, numel, tile.elements, gpu_plan.ONE_PASS).chunked:
            total = torch.empty(numel, device=data.device)
            self.decode_sum(total, data, recipe, own, own_rank, divisor)
            self.encode(out.view(1, -1), total.view(1, -1), recipe, seed)
            return
        rank = own_rank if own is not None else -1
        with _aligned(out) as target, _on(data.device):
            _reduce(target, data, numel, recipe, own, rank, divisor, seed, tile)


# -- launches: arguments go by name, in groups that several kernels share ------------------------------------------


def _encode(out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
    format = recipe.format
    count, numel = rows.shape
    tile = tile_for("encode", format.bits)
    tiles = cut(format, numel, tile.elements, gpu_plan.ONE_PASS)
    code_size = max(format.bits // 8, 1)
    x = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
    source = {"x": x, "x_stride": rows.stride(0) if count > 1 else numel}
    first = second = x
    if tiles.chunked:
        first, second = _measure(source, recipe, numel, count, tiles, tile)
    for launch in launches(tiles):
        gpu_kernels.encode_kernel[(launch["tiles"] * count,)](
            codes=_seen(out, code_size),
            scales=_seen(out, _scale_size(format)),
            out=out,
            first=first,
            second=second,
            chunks=tiles.chunks,
            CHUNKED=tiles.chunked,
            SINGLE=count == 1,
            CODE_SIZE=code_size,
            **source,
            **launch,
            **_places(format, numel),
            **_ends(format, numel),
            **_format(format, tiles, x.device),
            **_encoding(recipe, seed, x),
            **_options(tiles, tile),
        )


def _measure(
    source: dict[str, Any], recipe: Recipe, numel: int, count: int, tiles: Cut, tile: Tile
) -> tuple[Tensor, Tensor]:
    """The statistics of blocks larger than a tile, one per block: of chunks first, then of ever more chunks."""
    element = recipe.format.element
    kind = torch.float64 if element == Element.SIGN else torch.int32
    where = layout(recipe.format, numel)

    def room(parts: int) -> tuple[Tensor, Tensor]:
        first = torch.empty(count * where.groups * parts, dtype=kind, device=source["x"].device)
        return first, torch.empty_like(first) if element == Element.AFFINE else first

    found = room(tiles.chunks)
    for launch in launches(tiles._replace(full=tiles.full if tiles.full == tiles.tiles else 0)):
        gpu_kernels.measure_kernel[(launch["tiles"] * count,)](
            first=found[0],
            second=found[1],
            numel=numel,
            chunks=tiles.chunks,
            block=where.group_size,
            ELEMENT=int(element),
            WIDTH=tiles.width,
            ALIGN=tiles.align,
            EDGE=tiles.edge,
            SINGLE=count == 1,
            **source,
            **launch,
            **_options(tiles, tile),
        )
    left = tiles.chunks
    while left > 1:
        parts = -(-left // gpu_kernels.FOLD.value)
        folded = room(parts)
        gpu_kernels.fold_kernel[(count * where.groups * parts,)](
            *folded, *found, count=left, parts=parts, ELEMENT=int(element), enable_fp_fusion=False
        )
        found, left = folded, parts
    return found


def _decode(
    out: Tensor, data: Tensor, recipe: Recipe, ranks: int, own: Tensor | None, own_rank: int, divisor: int
) -> None:
    format = recipe.format
    count, numel = out.shape
    tile = tile_for("decode", format.bits)
    tiles = cut(format, numel, tile.elements, gpu_plan.ONE_PASS)
    kept = ranks == 1 and own is None and format.element == Element.FP32
    for launch in launches(tiles):
        gpu_kernels.decode_kernel[(launch["tiles"] * count,)](
            out=_seen(out, out.element_size()),
            out_stride=numel,
            chunks=tiles.chunks,
            CHUNKED=tiles.chunked,
            SINGLE=count == 1,
            OUTPUT=OUTPUTS[out.dtype],
            RAW=kept,
            **launch,
            **_places(format, numel),
            **_format(format, tiles, data.device),
            **_summing(data, recipe, numel, tiles, ranks, own, own_rank, divisor),
            **_options(tiles, tile),
        )


def _reduce(
    out: Tensor,
    data: Tensor,
    numel: int,
    recipe: Recipe,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
    seed: int,
    tile: Tile,
) -> None:
    format = recipe.format
    tiles = cut(format, numel, tile.elements, gpu_plan.ONE_PASS)
    summing = _summing(data, recipe, numel, tiles, len(data), own, own_rank, divisor)
    stride = summing.pop("row_bytes")
    for launch in launches(tiles):
        # A word at a row's end would overwrite what follows the codes.
        words = tiles.words(format.bits) and not launch["MASKED"]
        to_size = 4 if words else max(format.bits // 8, 1)
        gpu_kernels.reduce_kernel[(launch["tiles"],)](
            to_codes=_seen(out, to_size),
            to_scales=_seen(out, _scale_size(format)),
            out=out,
            stride=stride,
            STORE_WORDS=words,
            TO_SIZE=to_size,
            **launch,
            **_places(format, numel),
            **_ends(format, numel),
            **_format(format, tiles, data.device),
            **_encoding(recipe, seed, data),
            **summing,
            **_options(tiles, tile),
        )


def _places(format: Format, numel: int) -> dict[str, Any]:
    where = layout(format, numel)
    return {
        "numel": numel,
        "block": where.group_size,
        "groups": where.groups,
        "scales_at": where.scales_offset,
        "zeros_at": where.zeros_offset,
        "SCALE_SIZE": _scale_size(format),
    }


def _ends(format: Format, numel: int) -> dict[str, Any]:
    where = layout(format, numel)
    return {
        "row_bytes": where.row_bytes,
        "last_size": numel - (where.groups - 1) * where.group_size,
        "codes_end": where.codes_bytes,
        "end": where.zeros_offset + (where.groups if format.affine else 0),
    }


def _format(format: Format, tiles: Cut, device: torch.device) -> dict[str, Any]:
    return {
        "ELEMENT": int(format.element),
        "BITS": format.bits,
        "SCALE": int(format.scale),
        "GROUPS": tiles.groups,
        "BLOCK": tiles.block,
        "WIDTH": tiles.width,
        "ALIGN": tiles.align,
        "EDGE": tiles.edge,
        "FP8": format.element == Element.E4M3 and _has_fp8(device),
    }


def _encoding(recipe: Recipe, seed: int, anything: Tensor) -> dict[str, Any]:
    format = recipe.format
    step, limit = scaling(format, recipe.peak)
    found: dict[str, Any] = {"cells": anything, "slope": 0.0, "middle": 0.0, "bend": 0.0, "reach": 0.0}
    found |= {"CELLS": 0, "STEPS": 0, "SEARCHED": 0}
    if recipe.table is not None:
        its = cells(recipe.table)
        found = {"cells": its.entries, "slope": its.slope, "middle": its.middle, "bend": its.bend, "reach": its.reach}
        found |= {"CELLS": its.size, "STEPS": its.steps, "SEARCHED": its.searched}
    return found | {
        "step": step,
        "top_scale": limit,
        "seed": int(draws.mix64(torch.tensor(seed))) if format.stochastic else 0,
        "STOCHASTIC": bool(format.stochastic),
        "SIGNED": format.signed_scale,
    }


def _summing(
    data: Tensor,
    recipe: Recipe,
    numel: int,
    tiles: Cut,
    ranks: int,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
) -> dict[str, Any]:
    format = recipe.format
    data, stride = _readable(data)
    words = tiles.words(format.bits)
    code_size = 4 if words else max(format.bits // 8, 1)
    divide = "no" if divisor == 1 else "multiply" if divisor & (divisor - 1) == 0 else "divide"
    # One multiplication by a power of two rounds like the division.
    factor = 1.0 / divisor if divide == "multiply" else float(divisor)
    mine = data if own is None else own.contiguous()
    fused = format.scale != Scale.FP32 and _whole_codes(recipe)
    bytewise = fused and words and format.bits == 4 and (recipe.table is None or cells(recipe.table).small)
    return {
        "codes": _seen(data, code_size),
        "scales": _seen(data, _scale_size(format)),
        "data": data,
        "levels": data if recipe.table is None else cells(recipe.table).levels,
        "own": mine.view(torch.int16) if mine.dtype == torch.bfloat16 else mine,
        "row_bytes": stride,
        "ranks": ranks,
        "divisor": factor,
        "WORDS": words,
        "CODE_SIZE": code_size,
        "RANKS": ranks if ranks <= UNROLLED else 0,
        "OWN_RANK": own_rank,
        "DIVIDE": divide,
        "FUSED": fused,
        "BYTEWISE": gpu_plan.BYTEWISE.get(format.element, 0) if bytewise else 0,
    }


def _whole_codes(recipe: Recipe) -> bool:
    """Whether codes stand for whole numbers small enough that multiplying by a 16-bit scale is exact."""
    if recipe.table is not None:
        return cells(recipe.table).whole
    return recipe.format.element == Element.INT


def _options(tiles: Cut, tile: Tile) -> dict[str, Any]:
    """How Triton compiles; without fusion, since the reference rounds after every operation."""
    elements = tiles.groups * tiles.width
    warps = max(1, min(16, tile.warps * elements // tile.elements))
    return {"num_warps": warps, "enable_fp_fusion": False}


# -- tensors ----------------------------------------------------------------------------------------------------------


def _scale_size(format: Format) -> int:
    return max(SCALE_BYTES[Scale(format.scale)], 1)


def _seen(data: Tensor, size: int) -> Tensor:
    """The same memory as integers of `size` bytes."""
    return data.view(INTS[size])


def _readable(data: Tensor) -> tuple[Tensor, int]:
    """Rows that start at multiples of 16 bytes, and the bytes from one to the next."""
    count, width = data.shape
    stride = data.stride(0) if count > 1 else width
    if (width > 1 and data.stride(1) != 1) or stride % 16 or data.data_ptr() % 16:
        data = data.clone(memory_format=torch.contiguous_format)
        stride = width
    return data, stride


@contextlib.contextmanager
def _aligned(out: Tensor) -> Iterator[Tensor]:
    """`out`, or a copy of its shape that starts at a multiple of 16 bytes and is copied back."""
    fits = out.is_contiguous() and out.data_ptr() % 16 == 0
    target = out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)
    yield target
    if target is not out:
        out.copy_(target)


@contextlib.contextmanager
def _contiguous(out: Tensor) -> Iterator[Tensor]:
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    yield target
    if target is not out:
        out.copy_(target)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@cache
def _has_fp8(device: torch.device) -> bool:
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
