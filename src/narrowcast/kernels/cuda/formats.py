"""What the kernels of this folder are told of a format: what its codes are, and the halves that they stand for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from narrowcast.kernels import reference
from narrowcast.kernels.lasting import lasting
from narrowcast.kernels.layout import ROW, Element, Format, Recipe, Scale

HERE = Path(__file__).parent
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""`X` and `BIAS` in the kernels."""

INT8, INT4, BYTES, PAIRS = range(4)
"""`CODES` in the kernels."""

TABLE = 32 << 10
"""Shared memory that a table of BYTES or PAIRS takes."""


def sources(name: str) -> tuple[Path, ...]:
    """The files that make up a kernel, in order."""
    pairs = ("codes", "pairs")
    parts = {"tile": pairs, "slices": pairs, "wide": (*pairs, "lanes"), "ring": ("codes", "direct")}.get(name, ())
    return (*(HERE / f"{part}.cuh" for part in ("instructions", "numbers", *parts)), HERE / f"{name}.cu")


def codes_of(format: Format) -> int | None:
    """`CODES`, or None where the kernels know no such codes."""
    if format.element == Element.INT:
        return {8: INT8, 4: INT4}.get(format.bits)
    if format.element in (Element.LEVELS, Element.E4M3, Element.E5M2):
        return {8: BYTES, 4: PAIRS}.get(format.bits)
    return None


def fp8_of(format: Format) -> int:
    """`FP8` of wide.cu."""
    return 1 if format.element == Element.E4M3 else 2 if format.element == Element.E5M2 else 0


def block_of(format: Format, k: int) -> int:
    """`BLOCK` in the kernels: 0 where a row has one scale or none."""
    return 0 if format.block in (0, ROW) or format.block >= k else format.block


_tables: dict[object, tuple[Tensor | None, Tensor | None]] = {}
"""What a codec's table became, and the table: it keeps the memory whose address is part of the key."""


def levels_of(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What each byte of codes stands for, in two halves of 32 bits; None where halves cannot hold it."""
    format, table = recipe.format, recipe.table
    if format.element == Element.INT:
        return None
    key = (format.element, format.bits, dtype, device, None if table is None else table.data_ptr())
    if key not in _tables:
        _tables[key] = lasting(lambda: _make_levels(recipe, dtype, device), device), table
    return _tables[key][0]


def scaling_of(recipe: Recipe, dtype: torch.dtype, k: int) -> int:
    """`SCALING` of wide.cu: 0 where sums are scaled, 1 where products of codes and scales may be taken in halves."""
    format = recipe.format
    if block_of(format, k) == 0:
        return 0
    alike = format.scale == {torch.float16: Scale.FP16, torch.bfloat16: Scale.BF16}.get(dtype)
    return 1 if alike and (recipe.table is None or _exact(recipe.table, dtype)) else 2


_exact_tables: dict[tuple[int, torch.dtype], tuple[bool, Tensor]] = {}


def _exact(table: Tensor, dtype: torch.dtype) -> bool:
    """Whether all levels are numbers of this dtype; asked once, since it waits for the GPU."""
    key = (table.data_ptr(), dtype)
    if key not in _exact_tables:
        levels = table[0]
        _exact_tables[key] = bool((levels.to(dtype).float().eq(levels) | levels.isnan()).all()), table
    return _exact_tables[key][0]


def numbers_of(recipe: Recipe, device: torch.device) -> Tensor | None:
    """What each byte of codes stands for, in fp32: one number, or two where codes have 4 bits."""
    if recipe.format.element == Element.INT:
        return None
    key = (recipe.format.element, recipe.format.bits, device, None if recipe.table is None else recipe.table.data_ptr())
    if key not in _tables:
        numbers = lasting(lambda: _make_numbers(recipe, device), device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return numbers  # which the graph writes, each time it runs: no other call may read them
        _tables[key] = numbers, recipe.table
    return _tables[key][0]


def _make_numbers(recipe: Recipe, device: torch.device) -> Tensor:
    low, high = _numbers(recipe, device)
    return (low if recipe.format.bits == 8 else torch.stack([low, high], 1)).contiguous()


def _numbers(recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of the first and the second code of each byte, alike where it has one."""
    byte = torch.arange(256, dtype=torch.int64, device=device)
    if recipe.table is None:
        plain = Recipe(Format(recipe.format.element, 8, 0, Scale.NONE), 1.0, None)
        exact = reference.decode(byte.to(torch.uint8)[None], 256, torch.float32, plain)[0]
        return exact, exact
    exact = recipe.table[0].to(device)
    return (exact, exact) if recipe.format.bits == 8 else (exact[byte & 15], exact[byte >> 4])


def _make_levels(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    low, high = _numbers(recipe, device)
    exact = torch.cat([low, high])
    rounded = exact.to(dtype).float()
    off = (rounded - exact).abs() > exact.abs() * 2.0**-8
    if bool((off & exact.isfinite()).any()) or bool((rounded.isinf() & exact.isfinite()).any()):
        return None
    bits = [half.to(dtype).view(torch.int16).int() & 0xFFFF for half in (low, high)]
    return (bits[0] | (bits[1] << 16)).contiguous()
