"""What the compiled core is told of a row, its format and where its bytes lie, and of a convolution, its sizes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import lru_cache

from narrowcast.kernels.layout import Format, Recipe, layout, scaling
from narrowcast.kernels.windows import Window


class Spec(ctypes.Structure):
    """Mirrors `Spec` in core/core.h."""

    _fields_ = (
        ("element", c_int32),
        ("bits", c_int32),
        ("scale", c_int32),
        ("stochastic", c_int32),
        ("signed_scale", c_int32),
        ("reserved", c_int32),
        ("step", c_float),
        ("limit", c_float),
        ("numel", c_int64),
        ("blocks", c_int64),
        ("block_size", c_int64),
        ("codes_bytes", c_int64),
        ("scales_offset", c_int64),
        ("zeros_offset", c_int64),
        ("row_bytes", c_int64),
        ("levels", c_void_p),
        ("thresholds", c_void_p),
    )


@lru_cache(maxsize=4096)
def spec(format: Format, peak: float, numel: int, table: int) -> object:
    """A pointer to the `Spec` of a row; `table` is the address of the codec's table, or 0."""
    where = layout(format, numel)
    described = Spec(
        format.element,
        format.bits,
        format.scale,
        format.stochastic,
        format.signed_scale,
        0,
        *scaling(format, peak),
        numel,
        where.blocks,
        where.block_size,
        where.codes_bytes,
        where.scales_offset,
        where.zeros_offset,
        where.row_bytes,
        table or None,
        table + 4 * 2**format.bits if table else None,
    )
    return ctypes.pointer(described)


def spec_of(recipe: Recipe, numel: int) -> object:
    """A pointer to the `Spec` of rows of a codec."""
    format, peak, table = recipe
    return spec(format, peak, numel, 0 if table is None else table.data_ptr())


@lru_cache(maxsize=4096)
def conv_sizes(x: Sequence[int], weight: Sequence[int], out: Sequence[int], window: Window) -> tuple[object, int]:
    """`ConvSizes` of core/conv_layout.h, for these shapes; and the words of a window."""
    outputs, words, *kernel, _ = weight
    steps, around = window[:4], (window.left, window.top)
    sizes = (c_int64 * 16)(*x, outputs, *kernel, *steps, *around, *out[2:], window.groups)
    return sizes, words * math.prod(kernel)
