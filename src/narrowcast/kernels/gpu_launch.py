"""Triton: which kernel runs on which grid.

A row is cut into tiles (`Cut`). Those that are full run without masks; a last one that is not runs in a launch of its
own when the row is long, else all run masked. Sizes of tiles are fixed (`TILES`): nothing is tuned when a user
calls, so the first call compiles and no more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from narrowcast.kernels import gpu_kernels, reference
from narrowcast.kernels.gpu_codes import INTERPRETED
from narrowcast.kernels.gpu_tables import cells
from narrowcast.kernels.layout import SCALE_BYTES, Element, Format, Recipe, Scale, layout, scaling


class Tile(NamedTuple):
    """Elements that one program takes, and the warps it runs on."""

    elements: int
    warps: int


TILES: dict[tuple[str, int], Tile] = {
    ("encode", 32): Tile(2048, 4),
    ("decode", 32): Tile(2048, 4),
    ("reduce", 32): Tile(2048, 4),
    ("reduce", 8): Tile(2048, 4),
    ("reduce", 4): Tile(4096, 4),
}
"""Per operation and bits per code, at most so many; bench/gpu.py --sweep tries others."""

ONE_PASS = 8192
"""Blocks up to this size are measured and encoded by one program; larger ones take two passes over the input."""

UNROLLED = 16
"""Up to so many ranks, a sum's loop is unrolled, so that the loads of several ranks are in flight."""

SPLIT = 16
"""Rows of at least so many full tiles get a launch without masks."""

INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OUTPUTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


class Cut(NamedTuple):
    """How a row is cut into tiles."""

    groups: int
    """Blocks per tile; 1 where a tile is a chunk of a block."""
    block: int
    width: int
    chunked: bool
    chunks: int
    tiles: int
    full: int
    """Leading tiles that need no mask."""
    align: int
    """A power of two that divides every tile's first element."""
    edge: int
    """A power of two that divides every tile's number of elements."""

    def words(self, bits: int) -> bool:
        """Whether the codes of every tile start at a 32-bit word."""
        whole = bits in (1, 2, 4, 8) and self.width * bits >= 32 and self.align * bits % 32 == 0
        return whole and self.block == self.width


@lru_cache(maxsize=4096)
def cut(format: Format, numel: int, elements: int, one_pass: int) -> Cut:
    """Cut a row of `numel` elements into tiles of about `elements`."""
    where = layout(format, numel)
    size = where.group_size if format.scale != Scale.NONE else elements
    count = -(-numel // size)
    if format.scale != Scale.NONE and size > one_pass and numel > one_pass:
        chunks = -(-size // elements)
        starts = elements if count == 1 else math.gcd(elements, size)
        even = size % elements == 0 and numel % size == 0
        full = count * chunks if even else numel // elements if count == 1 else 0
        edge = math.gcd(128, elements, numel, size)
        return Cut(1, elements, elements, True, chunks, count * chunks, full, math.gcd(128, starts), edge)
    width = triton.next_power_of_2(max(min(size, numel), 8))
    block = width if count == 1 else size
    groups = min(max(elements // width, 1), triton.next_power_of_2(count))
    tile = groups * block
    full = numel // tile if block == width else 0
    align = math.gcd(128, tile)
    return Cut(groups, block, width, False, 1, -(-count // groups), full, align, math.gcd(align, numel))


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
        tile = _tile("reduce", recipe.format.bits)
        if cut(recipe.format, numel, tile.elements, ONE_PASS).chunked:
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
    tile = _tile("encode", format.bits)
    tiles = cut(format, numel, tile.elements, ONE_PASS)
    code_size = max(format.bits // 8, 1)
    x = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
    source = {"x": x, "x_stride": rows.stride(0) if count > 1 else numel}
    first = second = x
    if tiles.chunked:
        first, second = _measure(source, recipe, numel, count, tiles, tile)
    for launch in _launches(tiles):
        gpu_kernels.encode_kernel[(launch["tiles"] * count,)](
            codes=_seen(out, code_size),
            scales=_seen(out, _scale_size(format)),
            out=out,
            first=first,
            second=second,
            chunks=tiles.chunks,
            CHUNKED=tiles.chunked,
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
    for launch in _launches(tiles._replace(full=tiles.full if tiles.full == tiles.tiles else 0)):
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
    tile = _tile("decode", format.bits)
    tiles = cut(format, numel, tile.elements, ONE_PASS)
    kept = ranks == 1 and own is None and format.element == Element.FP32
    for launch in _launches(tiles):
        gpu_kernels.decode_kernel[(launch["tiles"] * count,)](
            out=_seen(out, out.element_size()),
            out_stride=numel,
            chunks=tiles.chunks,
            CHUNKED=tiles.chunked,
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
    tiles = cut(format, numel, tile.elements, ONE_PASS)
    summing = _summing(data, recipe, numel, tiles, len(data), own, own_rank, divisor)
    stride = summing.pop("row_bytes")
    for launch in _launches(tiles):
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


def _launches(tiles: Cut) -> Iterator[dict[str, Any]]:
    """The parts of a grid: all tiles at once, or the full ones without masks and then the rest."""
    if tiles.full == tiles.tiles:
        parts = [(0, tiles.tiles, False)]
    elif tiles.full >= SPLIT:
        parts = [(0, tiles.full, False), (tiles.full, tiles.tiles, True)]
    else:
        parts = [(0, tiles.tiles, True)]
    for start, stop, masked in parts:
        yield {"first_tile": start, "tiles": stop - start, "MASKED": masked}


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
    found: dict[str, Any] = {"cells": anything, "thresholds": anything, "slope": 0.0, "middle": 0.0}
    found |= {"CELLS": 0, "STEPS": 0}
    if recipe.table is not None:
        entries, thresholds, slope, middle, steps, _ = cells(recipe.table)
        found = {"cells": entries, "thresholds": thresholds, "slope": slope, "middle": middle}
        found |= {"CELLS": len(entries), "STEPS": steps}
    return found | {
        "step": step,
        "top_scale": limit,
        "seed": int(reference.mix64(torch.tensor(seed))) if format.stochastic else 0,
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
    return {
        "codes": _seen(data, code_size),
        "scales": _seen(data, _scale_size(format)),
        "data": data,
        "levels": data if recipe.table is None else recipe.table,
        "own": mine.view(torch.int16) if mine.dtype == torch.bfloat16 else mine,
        "row_bytes": stride,
        "ranks": ranks,
        "divisor": factor,
        "WORDS": words,
        "CODE_SIZE": code_size,
        "RANKS": ranks if ranks <= UNROLLED else 0,
        "OWN_RANK": own_rank,
        "DIVIDE": divide,
        "FUSED": format.element in (Element.INT, Element.AFFINE) and format.scale != Scale.FP32,
    }


def _options(tiles: Cut, tile: Tile) -> dict[str, Any]:
    """How Triton compiles; without fusion, since the reference rounds after every operation."""
    elements = tiles.groups * tiles.width
    warps = max(1, min(16, tile.warps * elements // tile.elements))
    return {"num_warps": warps, "enable_fp_fusion": False}


# -- tensors ----------------------------------------------------------------------------------------------------------


def _tile(operation: str, bits: int) -> Tile:
    """The tile of an operation on codes of so many bits: the entry of the fewest bits that are enough."""
    return TILES[operation, min(wide for name, wide in TILES if name == operation and wide >= bits)]


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


@lru_cache(maxsize=None)
def _has_fp8(device: torch.device) -> bool:
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
