"""Triton: rows of a codec, which kernel runs on which grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.layout import Element, Recipe, layout
from narrowcast.kernels.triton import cuts, kernels
from narrowcast.kernels.triton.arguments import (
    OUTPUTS,
    encoding,
    ends,
    form_of,
    loadable,
    on,
    options,
    places,
    readable,
    scale_size,
    seen,
    summing,
)
from narrowcast.kernels.triton.cuts import Cut, Tile, cut, launches, tile_for
from narrowcast.kernels.triton.repeat import Launches, kind, remember, repeated

_ENCODE_VIEWS = {"codes": "out", "scales": "out", "out": "out", "x": "x", "first": "x", "second": "x", "cells": "x"}
_DECODE_VIEWS = {"out": "out", "codes": "data", "scales": "data", "data": "data", "levels": "data", "own": "own"}
_SUM_VIEWS = {**_DECODE_VIEWS, "to_codes": "out", "to_scales": "out", "cells": "data"}
"""The caller's tensor of which each pointer of a kernel is a view; those of a table are the table's own."""


def encode(out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
    """Encode `rows`, whose elements are side by side, into `out`."""
    format = recipe.format
    count, numel = rows.shape
    x, stride = loadable(rows), rows.stride(0) if count > 1 else numel
    key = ("encode", count, numel, stride, *kind(recipe, x.device, out, x))
    if repeated(key, x.device, {"out": out.data_ptr(), "x": x.data_ptr()}):
        return
    tile = tile_for("encode", format)
    tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
    code_size = max(format.bits // 8, 1)
    source = {"x": x, "x_stride": stride}
    first = second = x
    recorded = Launches(recipe)
    with on(x.device):
        if tiles.chunked:
            first, second = _measure(source, recipe, numel, count, tiles, tile)
        for launch in launches(tiles):
            arguments = {
                "codes": seen(out, code_size),
                "scales": seen(out, scale_size(format)),
                "out": out,
                "first": first,
                "second": second,
                "chunks": tiles.chunks,
                "SINGLE": count == 1,
                "CODE_SIZE": code_size,
                **source,
                **launch,
                **places(format, numel),
                **ends(format, numel),
                "FORM": form_of(format, x.device),
                **encoding(recipe, seed, x),
                **options(tiles, tile),
            }
            recorded.launch(kernels.encode_kernel, launch["tiles"] * count, arguments, _views(_ENCODE_VIEWS, recipe))
    if not tiles.chunked and not format.stochastic:
        remember(key, recorded)


def _measure(
    source: dict[str, Any], recipe: Recipe, numel: int, count: int, tiles: Cut, tile: Tile
) -> tuple[Tensor, Tensor]:
    """The statistics of blocks larger than a tile, one per block: of chunks first, then of ever more chunks."""
    element = recipe.format.element
    kind = torch.float64 if element == Element.SIGN else torch.int32
    where = layout(recipe.format, numel)

    def room(parts: int) -> tuple[Tensor, Tensor]:
        first = torch.empty(count * where.blocks * parts, dtype=kind, device=source["x"].device)
        return first, torch.empty_like(first) if element == Element.AFFINE else first

    measured = room(tiles.chunks)
    for launch in launches(tiles._replace(full=tiles.full if tiles.full == tiles.tiles else 0)):
        kernels.measure_kernel[(launch["tiles"] * count,)](
            first=measured[0],
            second=measured[1],
            numel=numel,
            chunks=tiles.chunks,
            block=where.block_size,
            ELEMENT=int(element),
            SINGLE=count == 1,
            **source,
            **launch,
            **options(tiles, tile),
        )
    left = tiles.chunks
    while left > 1:
        parts = -(-left // kernels.FOLD.value)
        folded = room(parts)
        kernels.fold_kernel[(count * where.blocks * parts,)](
            *folded, *measured, count=left, parts=parts, ELEMENT=int(element), enable_fp_fusion=False
        )
        measured, left = folded, parts
    return measured


def decode(
    out: Tensor, data: Tensor, recipe: Recipe, ranks: int, own: Tensor | None, own_rank: int, divisor: int
) -> None:
    """Decode each row of `data` into a row of `out`, or the sum of `ranks` rows into one."""
    format = recipe.format
    count, numel = out.shape
    data, stride = readable(data)
    own = data if own is None else loadable(own.contiguous())
    how = ranks, own_rank, divisor
    key = ("decode", count, numel, stride, *how, own is data, *kind(recipe, data.device, out, data, own))
    if repeated(key, data.device, {"out": out.data_ptr(), "data": data.data_ptr(), "own": own.data_ptr()}):
        return
    tile = tile_for("decode", format)
    tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
    recorded = Launches(recipe)
    with on(data.device):
        for launch in launches(tiles):
            arguments = {
                "out": seen(out, out.element_size()),
                "out_stride": numel,
                "chunks": tiles.chunks,
                "SINGLE": count == 1,
                "OUTPUT": OUTPUTS[out.dtype],
                "RAW": ranks == 1 and own is data and format.element == Element.FP32,
                **launch,
                **places(format, numel),
                "FORM": form_of(format, data.device),
                **summing(data, stride, recipe, tiles, own, *how),
                **options(tiles, tile),
            }
            recorded.launch(kernels.decode_kernel, launch["tiles"] * count, arguments, _views(_DECODE_VIEWS, recipe))
    remember(key, recorded)


def decode_sum_encode(
    out: Tensor,
    data: Tensor,
    numel: int,
    recipe: Recipe,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
    seed: int,
) -> bool:
    """Encode the sum of rows in one pass; whether blocks are small enough for that."""
    format = recipe.format
    tile = tile_for("decode_sum_encode", format)
    tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
    if tiles.chunked:
        return False
    ranks = len(data)
    data, stride = readable(data)
    own = data if own is None else loadable(own.contiguous())
    how = ranks, own_rank, divisor
    key = ("decode_sum_encode", numel, stride, *how, own is data, *kind(recipe, data.device, out, data, own))
    if repeated(key, data.device, {"out": out.data_ptr(), "data": data.data_ptr(), "own": own.data_ptr()}):
        return True
    recorded = Launches(recipe)
    with on(data.device):
        for launch in launches(tiles):
            # A word at a row's end would overwrite what follows the codes.
            words = tiles.words(format.bits) and not launch["TILE"].masked
            size = 4 if words else max(format.bits // 8, 1)
            arguments = {
                "to_codes": seen(out, size),
                "to_scales": seen(out, scale_size(format)),
                "out": out,
                "STORE_WORDS": words,
                "TO_SIZE": size,
                "FORM": form_of(format, data.device),
                **launch,
                **places(format, numel),
                **encoding(recipe, seed, data),
                **summing(data, stride, recipe, tiles, own, *how),
                "stride": stride,
                **ends(format, numel),
                **options(tiles, tile),
            }
            recorded.launch(kernels.decode_sum_encode_kernel, launch["tiles"], arguments, _views(_SUM_VIEWS, recipe))
    if not format.stochastic:
        remember(key, recorded)
    return True


def _views(views: dict[str, str], recipe: Recipe) -> dict[str, str]:
    if recipe.table is None:
        return views
    return {name: tensor for name, tensor in views.items() if name not in ("cells", "levels")}
