"""Which kernel multiplies by encoded rows on a GPU, and how its work is cut.

    cuda/dot.cu, tile.cu  4- and 8-bit codes, a few rows of x: CUDA, compiled on first use (nvrtc.py)
    cuda/slices.cu        more rows of x, up to 128: gpu_linear_slices.py
    linear.py   other formats, and x in fp32, up to 64: Triton
    kernels/linear.py     larger batches: tiles are decoded and multiplied by cuBLAS

Where NVRTC is missing, Triton takes its calls, and the first says so in a `KernelWarning`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.errors import KernelWarning
from narrowcast.kernels.cuda import nvrtc
from narrowcast.kernels.cuda import slices as gpu_linear_slices
from narrowcast.kernels.cuda.formats import BYTES, INT4, INT8, KINDS, PAIRS, codes_of, levels_of, sources
from narrowcast.kernels.cuda.nvrtc import Int
from narrowcast.kernels.cuda.slices import Slices
from narrowcast.kernels.layout import ROW, Format, Recipe, layout
from narrowcast.kernels.triton import linear as any_format
from narrowcast.kernels.triton.arguments import on, readable
from narrowcast.kernels.triton.codes import INTERPRETED

LARGE = 60_000_000
"""Weights that make a layer large: most of its time is reading them."""

TILED = {8: 16, 4: 32}
"""Of what slices.cu cannot do, the largest batch that tile.cu takes at once, by bits: 4-bit codes go twice."""

BATCH = 64
"""The largest batch that tile.cu and Triton are for."""

MANY = 128
"""The largest batch that is multiplied without decoding first: slices.cu, twice."""

SHARED = 200 << 10
"""Shared memory that a block may ask for, with some to spare."""


class Cut(NamedTuple):
    """How a kernel of cuda/ divides the work: macros, grid, threads and shared memory."""

    name: str
    defines: tuple[tuple[str, int], ...]
    grid: int
    threads: int
    shared: int


def linear(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """`Kernel.linear` on CUDA tensors, or on CPU tensors in Triton's interpreter."""
    if len(x) > MANY or x.dtype not in KINDS or (bias is not None and bias.dtype not in KINDS):
        return False
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    if not INTERPRETED and _in_cuda(out, x, data, recipe, bias):
        return True
    if len(x) > BATCH:
        return False
    _launch_tiles(out, x, data, recipe, bias)
    return True


def _in_cuda(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """Multiply with cuda/, or say that it is not made for this."""
    codes = _codes(x, data, recipe)
    if codes is None:
        return False
    if _sliced(len(x), recipe.format.bits, len(data) * x.shape[1]) and _in_slices(out, x, data, recipe, bias):
        return True
    few = TILED[recipe.format.bits]
    if len(x) > BATCH or (len(x) > few and recipe.format.bits == 8):
        return False
    for first in range(0, len(x), few):
        some = x[first : first + few]
        cut = _cut(some, data, recipe, bias)
        if cut is None:
            return False
        _launch(cut, out[first : first + few], some, data, recipe, bias)
    return True


def _in_slices(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """Multiply with slices.cu, in parts of the batch that are alike, or say that it is not made for this."""
    step = -(-len(x) // (8 * -(-len(x) // gpu_linear_slices.WIDEST))) * 8
    levels = levels_of(recipe, x.dtype, x.device)
    for first in range(0, len(x), step):
        some = x[first : first + step]
        slices = _slices(some, data, recipe, bias)
        if slices is None:
            return False
        with torch.cuda.device(x.device):
            gpu_linear_slices.launch(slices, out[first : first + step], some, data, recipe, levels, bias)
    return True


def _sliced(batch: int, bits: int, weights: int) -> bool:
    """Whether slices.cu is faster than dot.cu and tile.cu, by bench/gpu_linear.py on an H200."""
    return batch > 16 or (batch > 8 and bits == 4) or (weights >= LARGE and batch > (1 if bits == 4 else 8))


def _codes(x: Tensor, data: Tensor, recipe: Recipe) -> int | None:
    """`CODES` of cuda/ for this call, or None if it is not made for it."""
    codes = codes_of(recipe.format)
    aligned = all(address % 16 == 0 for address in (x.data_ptr(), data.data_ptr(), data.stride(0)))
    whole = data.stride(1) == 1 and x.shape[1] * recipe.format.bits % 128 == 0
    if codes is None or not aligned or not whole or not _compiles(x.device):
        return None
    if codes in (BYTES, PAIRS) and (x.dtype == torch.float32 or levels_of(recipe, x.dtype, x.device) is None):
        return None
    return codes


def _cut(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Cut | None:
    """How dot.cu or tile.cu does this call, or None if they do not."""
    codes, kind = _codes(x, data, recipe), -1 if bias is None else KINDS[bias.dtype]
    if codes is None:
        return None
    return plan(codes, recipe.format, len(x), len(data), x.shape[1], KINDS[x.dtype], kind, _processors(x.device))


def _slices(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Slices | None:
    """How slices.cu does this call, or None if it does not."""
    codes, kind = _codes(x, data, recipe), -1 if bias is None else KINDS[bias.dtype]
    if codes is None:
        return None
    block, scale = _block(recipe.format, x.shape[1]), int(recipe.format.scale)
    sizes = (len(x), len(data), x.shape[1], KINDS[x.dtype], kind, _processors(x.device))
    return gpu_linear_slices.plan(codes, block, scale, *sizes, *_chip(x.device))


def _block(format: Format, k: int) -> int:
    """`BLOCK` of cuda/: 0 where a row has one scale or none."""
    return 0 if format.block in (0, ROW) or format.block >= k else format.block


@cache
def plan(codes: int, format: Format, batch: int, n: int, k: int, kind: int, bias: int, processors: int) -> Cut | None:
    """How a multiplication of these sizes is cut. Constants: the best of bench/gpu_linear.py --sweep on an H200."""
    block = _block(format, k)
    common = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": int(format.scale), "BLOCK": block, "UNROLL": 1}
    if codes == INT8 and batch == 1 and block % 16 == 0 and -(-k // 512) * 2048 <= SHARED:
        rows, teams, parts, waves = (2, 8, 2, 1 << 20) if n * k < LARGE else (4, 4, 2, 8)
        defines = common | {"ROWS": rows, "TEAMS": teams, "KS": parts, "RESIDENT": 1024}
        grid = min(processors * waves, -(-n // (rows * teams)))
        return Cut("dot", tuple(defines.items()), grid, 32 * teams * parts, -(-k // 512) * 2048)
    if kind == 0 or batch > max(TILED.values()):
        return None
    tiles = 0 if batch == 1 else next(count for count in (1, 2, 4) if batch <= 8 * count)
    wide = next((width for width in (16, 8, 4) if _fits(codes, block, tiles, width)), None)
    if wide is None:
        return None
    table, small = codes in (BYTES, PAIRS), n * k < LARGE
    parts, tall, resident = 16, 1, 1024
    if not small and tiles == 0:
        parts = 4 if not table else 16 if n * k < 100_000_000 else 8
        common["UNROLL"] = 2 if codes == INT4 and block >= 128 else 1
    elif tiles == 4:
        parts, tall, resident = 4, 2, 512
    elif not small:
        parts, tall, resident = (8, 1, 1024) if tiles == 1 else (8, 2, 512)
    grid = processors * resident // (32 * parts) if table or (tiles == 2 and tall == 2) else n
    return tile_cut(common, codes, wide, tiles, tall, parts, resident, n, k, grid)


def tile_cut(
    common: dict[str, int],
    codes: int,
    wide: int,
    tiles: int,
    tall: int,
    parts: int,
    resident: int,
    n: int,
    k: int,
    grid: int,
) -> Cut | None:
    """A cut for `tile` of cuda/."""
    defines = common | {"WIDE": wide, "TILES": tiles, "TALL": tall, "KS": parts, "RESIDENT": resident}
    chunk = 4 * wide * (2 if codes in (INT4, PAIRS) else 1)
    shared = 2 * 4 * parts * 16 * tall * max(1, 8 * tiles)  # sums
    shared += 0 if tiles else (-(-k // chunk) + 1) * chunk * 2  # x
    held = 32 << 10 if codes in (BYTES, PAIRS) else 0
    if shared + held > SHARED:
        return None
    return Cut("tile", tuple(defines.items()), min(grid, -(-n // (16 * tall))), 32 * parts, shared)


def _fits(codes: int, block: int, tiles: int, wide: int) -> bool:
    """Whether a chunk of four lanes of `wide` bytes is a part of one block, or, for one column, two or four blocks."""
    chunk = 4 * wide * (2 if codes in (INT4, PAIRS) else 1)
    if chunk < 32:
        return False
    return block == 0 or block % chunk == 0 or (tiles == 0 and chunk in (2 * block, 4 * block))


def _launch(cut: Cut, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    n, k = len(data), x.shape[1]
    scales = Int(layout(recipe.format, k).scales_offset)
    with torch.cuda.device(x.device):
        kernel = nvrtc.function(sources(cut.name), cut.name, cut.defines, x.device.index, early=True)
        sizes = (Int(n), Int(k), data.stride(0) if n > 1 else 0, scales)
        if cut.name == "dot":
            kernel(cut.grid, cut.threads, cut.shared, (data, x, out, bias, *sizes))
        else:
            levels = levels_of(recipe, x.dtype, x.device)
            kernel(cut.grid, cut.threads, cut.shared, (data, x, out, bias, levels, Int(len(x)), *sizes, x.stride(0)))


def _launch_tiles(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    bias = None if bias is None else bias.contiguous()
    data, _ = readable(data)
    with on(x.device):
        any_format.launch(out, x, data, recipe, bias)


@cache
def _compiles(device: torch.device) -> bool:
    """Whether cuda/ can run there; where not, the first call says why."""
    why = nvrtc.missing()
    if not why and torch.cuda.get_device_capability(device) < (8, 0):
        why = f"{torch.cuda.get_device_name(device)} has no tensor cores for bfloat16 (compute capability 8.0)"
    if why:
        warnings.warn(
            f"narrowcast multiplies by encoded weights with Triton, slower than with CUDA: {why}",
            KernelWarning,
            stacklevel=4,
        )
    return not why


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _chip(device: torch.device) -> tuple[int, bool]:
    """Shared memory that a block may ask for, and whether this is Hopper."""
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return int(room), torch.cuda.get_device_capability(device)[0] == 9
