"""Which kernel multiplies by encoded rows on a GPU, and how its work is cut.

    cuda/*.cu            4- and 8-bit codes, small batches: CUDA, compiled on first use (nvrtc.py)
    gpu_linear_tiles.py  everything else of batches of up to 64: Triton
    kernels/linear.py    larger batches: tiles are decoded and multiplied by cuBLAS

Where NVRTC is missing, Triton takes its calls, and the first says so in a `KernelWarning`.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.errors import KernelWarning
from narrowcast.kernels import gpu_linear_tiles, nvrtc, reference
from narrowcast.kernels.gpu_arguments import on, readable
from narrowcast.kernels.gpu_codes import INTERPRETED
from narrowcast.kernels.layout import ROW, Element, Format, Recipe, Scale, layout
from narrowcast.kernels.nvrtc import Int

CUDA = Path(__file__).parent / "cuda"
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BATCH = 64
"""The largest batch that is multiplied without decoding first."""

FEW = {8: 16, 4: 32}
"""The largest batch that cuda/ takes at once, by bits. Above, Triton is faster for 8-bit codes; 4-bit ones go twice."""

SHARED = 200 << 10
"""Shared memory that a block may ask for, with some to spare."""

INT8, INT4, BYTES, PAIRS = range(4)
"""`CODES` of cuda/."""


class Cut(NamedTuple):
    """How a kernel of cuda/ divides the work: macros, grid, threads and shared memory."""

    name: str
    defines: tuple[tuple[str, int], ...]
    grid: int
    threads: int
    shared: int


def linear(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """`Kernel.linear` on CUDA tensors, or on CPU tensors in Triton's interpreter."""
    if len(x) > BATCH or x.dtype not in KINDS or (bias is not None and bias.dtype not in KINDS):
        return False
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    if not INTERPRETED and _in_cuda(out, x, data, recipe, bias):
        return True
    _launch_tiles(out, x, data, recipe, bias)
    return True


def _in_cuda(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> bool:
    """Multiply with cuda/, or say that it is not made for this."""
    few = FEW.get(recipe.format.bits)
    if few is None or (len(x) > few and recipe.format.bits == 8):
        return False
    for first in range(0, len(x), few):
        some = x[first : first + few]
        cut = _cut(some, data, recipe, bias)
        if cut is None:
            return False
        _launch(cut, out[first : first + few], some, data, recipe, bias)
    return True


def _cut(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Cut | None:
    """How cuda/ does this call, or None if it does not."""
    format = recipe.format
    codes = _codes(format)
    aligned = all(address % 16 == 0 for address in (x.data_ptr(), data.data_ptr(), data.stride(0)))
    if codes is None or not aligned or data.stride(1) != 1 or x.shape[1] * format.bits % 128 or not _compiles(x.device):
        return None
    if codes in (BYTES, PAIRS) and (x.dtype == torch.float32 or _levels(recipe, x.dtype, x.device) is None):
        return None
    kind = -1 if bias is None else KINDS[bias.dtype]
    return plan(codes, format, len(x), len(data), x.shape[1], KINDS[x.dtype], kind, _processors(x.device))


@cache
def plan(codes: int, format: Format, batch: int, n: int, k: int, kind: int, bias: int, processors: int) -> Cut | None:
    """How a multiplication of these sizes is cut. Constants: the best of bench/gpu_linear.py --sweep on an H200."""
    block = 0 if format.block in (0, ROW) or format.block >= k else format.block
    common = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": int(format.scale), "BLOCK": block, "UNROLL": 1}
    if codes == INT8 and batch == 1 and block % 16 == 0 and -(-k // 512) * 2048 <= SHARED:
        rows, teams, parts, waves = (2, 8, 2, 1 << 20) if n * k < 60_000_000 else (4, 4, 2, 8)
        defines = common | {"ROWS": rows, "TEAMS": teams, "KS": parts, "RESIDENT": 1024}
        grid = min(processors * waves, -(-n // (rows * teams)))
        return Cut("dot", tuple(defines.items()), grid, 32 * teams * parts, -(-k // 512) * 2048)
    if kind == 0 or batch > max(FEW.values()):
        return None
    tiles = 0 if batch == 1 else next(count for count in (1, 2, 4) if batch <= 8 * count)
    wide = next((width for width in (16, 8, 4) if _fits(codes, block, tiles, width)), None)
    if wide is None:
        return None
    table, small = codes in (BYTES, PAIRS), n * k < 60_000_000
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


def sources(name: str) -> tuple[Path, ...]:
    """The files that make up a kernel, in order."""
    return CUDA / "instructions.cuh", CUDA / "numbers.cuh", CUDA / f"{name}.cu"


def _launch(cut: Cut, out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    n, k = len(data), x.shape[1]
    scales = Int(layout(recipe.format, k).scales_offset)
    with torch.cuda.device(x.device):
        kernel = nvrtc.function(sources(cut.name), cut.name, cut.defines, x.device.index, early=True)
        sizes = (Int(n), Int(k), data.stride(0) if n > 1 else 0, scales)
        if cut.name == "dot":
            kernel(cut.grid, cut.threads, cut.shared, (data, x, out, bias, *sizes))
        else:
            levels = _levels(recipe, x.dtype, x.device)
            kernel(cut.grid, cut.threads, cut.shared, (data, x, out, bias, levels, Int(len(x)), *sizes, x.stride(0)))


def _launch_tiles(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    bias = None if bias is None else bias.contiguous()
    data, _ = readable(data)
    with on(x.device):
        gpu_linear_tiles.launch(out, x, data, recipe, bias)


def _codes(format: Format) -> int | None:
    if format.element == Element.INT:
        return {8: INT8, 4: INT4}.get(format.bits)
    if format.element in (Element.LEVELS, Element.E4M3, Element.E5M2):
        return {8: BYTES, 4: PAIRS}.get(format.bits)
    return None


_tables: dict[object, tuple[Tensor | None, Tensor | None]] = {}
"""What a codec's table became, and the table: it keeps the memory whose address is part of the key."""


def _levels(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What each byte of codes stands for, in two halves of 32 bits; None where halves cannot hold it."""
    format, table = recipe.format, recipe.table
    if format.element == Element.INT:
        return None
    key = (format.element, format.bits, dtype, device, None if table is None else table.data_ptr())
    if key not in _tables:
        _tables[key] = _make_levels(recipe, dtype, device), table
    return _tables[key][0]


def _make_levels(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    byte = torch.arange(256, device=device)
    if recipe.table is None:
        plain = Recipe(Format(recipe.format.element, 8, 0, Scale.NONE), 1.0, None)
        exact = reference.decode(byte.to(torch.uint8)[None].expand(16, -1)[:1].contiguous(), 256, plain, torch.float32)[
            0
        ]
        low = high = exact
    elif recipe.format.bits == 8:
        exact = low = high = recipe.table[0].to(device)
    else:
        exact = recipe.table[0].to(device)
        low, high = exact[byte & 15], exact[byte >> 4]
    rounded = exact.to(dtype).float()
    off = (rounded - exact).abs() > exact.abs() * 2.0**-8
    if bool((off & exact.isfinite()).any()) or bool((rounded.isinf() & exact.isfinite()).any()):
        return None
    bits = [half.to(dtype).view(torch.int16).int() & 0xFFFF for half in (low, high)]
    return (bits[0] | (bits[1] << 16)).contiguous()


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
