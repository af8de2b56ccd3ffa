"""Triton: which kernel runs on which grid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.contract import Kernel
from narrowcast.kernels.cuda import choose
from narrowcast.kernels.layout import Element, Grid, Recipe, layout
from narrowcast.kernels.triton import cuts, fake_quantize, integer, kernels, linear
from narrowcast.kernels.triton.arguments import (
    OUTPUTS,
    encoding,
    ends,
    form_of,
    loadable,
    on,
    options,
    places,
    scale_size,
    seen,
    summing,
)
from narrowcast.kernels.triton.codes import INTERPRETED
from narrowcast.kernels.triton.cuts import Cut, Tile, cut, launches, tile_for
from narrowcast.kernels.windows import Window


class Triton(Kernel):
    """The operations on CUDA tensors (on CPU tensors in Triton's interpreter)."""

    name = "triton"

    def runs(self, operation: str, recipe: Recipe, device: torch.device) -> str:
        in_cuda = operation == "linear" and not INTERPRETED and choose.takes(recipe, device)
        return "cuda" if in_cuda else self.name

    def _encode(self, out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
        if rows.numel() == 0:
            return
        rows = rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()
        with _writable(out, 16) as target, on(rows.device):
            _encode(target, rows, recipe, seed)

    def _decode(self, out: Tensor, data: Tensor, recipe: Recipe) -> None:
        if out.numel() == 0:
            return
        with _writable(out, 1) as target, on(data.device):
            _decode(target, data, recipe, 1, None, -1, 1)

    def _decode_sum(
        self, out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
    ) -> None:
        if out.numel() == 0:
            return
        rank = own_rank if own is not None else -1
        with _writable(out, 1) as target, on(data.device):
            _decode(target.view(1, -1), data, recipe, len(data), own, rank, divisor)

    def _decode_sum_encode(
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
        format = recipe.format
        tile = tile_for("decode_sum_encode", format)
        tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
        if tiles.chunked:
            total = torch.empty(numel, dtype=torch.float32, device=data.device)
            self.decode_sum(total, data, recipe, own, own_rank, divisor)
            self.encode(out.view(1, -1), total.view(1, -1), recipe, seed)
            return
        rank = own_rank if own is not None else -1
        sums = summing(data, recipe, numel, tiles, len(data), own, rank, divisor)
        stride = sums.pop("row_bytes")
        with _writable(out, 16) as target, on(data.device):
            for launch in launches(tiles):
                # A word at a row's end would overwrite what follows the codes.
                words = tiles.words(format.bits) and not launch["TILE"].masked
                size = 4 if words else max(format.bits // 8, 1)
                kernels.decode_sum_encode_kernel[(launch["tiles"],)](
                    to_codes=seen(target, size),
                    to_scales=seen(target, scale_size(format)),
                    out=target,
                    stride=stride,
                    STORE_WORDS=words,
                    TO_SIZE=size,
                    FORM=form_of(format, data.device),
                    **launch,
                    **places(format, numel),
                    **ends(format, numel),
                    **encoding(recipe, seed, data),
                    **sums,
                    **options(tiles, tile),
                )

    def _linear(self, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
        if not INTERPRETED and choose.linear(out, x, data, recipe, bias):
            return True
        return linear.linear(out, x, data, recipe, bias)

    def _fake_quantize(self, out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
        fake_quantize.fake_quantize(out, x, scale, grid)

    def _fake_quantize_backward(
        self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid
    ) -> None:
        fake_quantize.fake_quantize_backward(dx, dscale, grad, x, scale, grid)

    def _integer_linear(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        integer.integer_linear(out, x, weight)

    def _integer_conv(
        self,
        out: Tensor,
        x: Tensor,
        scale: Tensor,
        grid: Grid,
        weight: Tensor,
        factor: Tensor,
        bias: Tensor | None,
        window: Window,
    ) -> None:
        values = torch.empty_like(x)
        fake_quantize.fake_quantize(values.view(1, 1, -1), x.view(1, 1, -1), scale, grid)
        integer.integer_conv(out, (values / scale).round(), grid.levels[-1], weight, factor, bias, window)


# -- launches -------------------------------------------------------------------------------------------------------


def _encode(out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
    format = recipe.format
    count, numel = rows.shape
    tile = tile_for("encode", format)
    tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
    code_size = max(format.bits // 8, 1)
    x = loadable(rows)
    source = {"x": x, "x_stride": rows.stride(0) if count > 1 else numel}
    first = second = x
    if tiles.chunked:
        first, second = _measure(source, recipe, numel, count, tiles, tile)
    for launch in launches(tiles):
        kernels.encode_kernel[(launch["tiles"] * count,)](
            codes=seen(out, code_size),
            scales=seen(out, scale_size(format)),
            out=out,
            first=first,
            second=second,
            chunks=tiles.chunks,
            SINGLE=count == 1,
            CODE_SIZE=code_size,
            **source,
            **launch,
            **places(format, numel),
            **ends(format, numel),
            FORM=form_of(format, x.device),
            **encoding(recipe, seed, x),
            **options(tiles, tile),
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

    measured = room(tiles.chunks)
    for launch in launches(tiles._replace(full=tiles.full if tiles.full == tiles.tiles else 0)):
        kernels.measure_kernel[(launch["tiles"] * count,)](
            first=measured[0],
            second=measured[1],
            numel=numel,
            chunks=tiles.chunks,
            block=where.group_size,
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
        kernels.fold_kernel[(count * where.groups * parts,)](
            *folded, *measured, count=left, parts=parts, ELEMENT=int(element), enable_fp_fusion=False
        )
        measured, left = folded, parts
    return measured


def _decode(
    out: Tensor, data: Tensor, recipe: Recipe, ranks: int, own: Tensor | None, own_rank: int, divisor: int
) -> None:
    format = recipe.format
    count, numel = out.shape
    tile = tile_for("decode", format)
    tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
    raw = ranks == 1 and own is None and format.element == Element.FP32
    for launch in launches(tiles):
        kernels.decode_kernel[(launch["tiles"] * count,)](
            out=seen(out, out.element_size()),
            out_stride=numel,
            chunks=tiles.chunks,
            SINGLE=count == 1,
            OUTPUT=OUTPUTS[out.dtype],
            RAW=raw,
            **launch,
            **places(format, numel),
            FORM=form_of(format, data.device),
            **summing(data, recipe, numel, tiles, ranks, own, own_rank, divisor),
            **options(tiles, tile),
        )


# -- tensors --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _writable(out: Tensor, alignment: int) -> Iterator[Tensor]:
    """`out`, or a contiguous copy of its shape that starts at a multiple of so many bytes and is copied back."""
    fits = out.is_contiguous() and out.data_ptr() % alignment == 0
    target = out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)
    yield target
    if target is not out:
        out.copy_(target)
