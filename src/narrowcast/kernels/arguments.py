"""What an operation may be given: dtypes, shapes, devices and strides, checked in one place.

Kernels get addresses and sizes, and trust them: a bias that is too short would be read past its end. So `Kernel`
(contract.py) calls these functions before every operation, on every machine, whoever calls. Codecs and modules say the
same earlier in their own words; a message from here names the operation's argument and the rule.

There is one function for each operation, with the operation's own arguments. It checks what is read and returns the
shape and the dtype of the result; `out` then checks what is written. A check looks at a few attributes, because a call
on a thousand floats is to take a few microseconds. What does not fit is looked at again, to say why. Numbers (peaks,
seeds, the values of scales) are trusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from narrowcast.errors import DtypeError, ShapeError
from narrowcast.kernels.layout import Count, Element, Grid, Recipe, layout
from narrowcast.kernels.windows import Window

Result = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a result."""

FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
BYTES = frozenset((torch.uint8,))
FLOAT32 = frozenset((torch.float32,))
INTS = frozenset((torch.int8,))
MOST_LEVELS = 256
_UINT8, _FLOAT32, _INT8, _INT32 = torch.uint8, torch.float32, torch.int8, torch.int32
_LEVELS = Element.LEVELS.value


def encode(rows: Tensor, recipe: Recipe, seed: int) -> Result:
    """`rows` [rows, numel] to [rows, row_bytes]."""
    size = rows.shape
    if len(size) != 2 or rows.dtype not in FLOATS:
        _matrix("rows", rows)
        _fit("rows", rows, FLOATS, tuple(size), rows.device)
    _table(recipe, rows.device)
    return (size[0], layout(recipe.format, size[1]).row_bytes), _UINT8


def encode_searched(rows: Tensor, importance: Tensor | None, gain: float, recipe: Recipe) -> Result:
    """`rows` [rows, numel] and fp32 `importance` [numel] to [rows, row_bytes]."""
    result = encode(rows, recipe, 0)
    if importance is not None:
        _dense_vector("importance", importance, rows.shape[1], rows.device)
    return result


def decode(data: Tensor, numel: Count, dtype: torch.dtype, recipe: Recipe) -> Result:
    """`data` [rows, row_bytes] to [rows, numel]."""
    size, row_bytes = data.shape, layout(recipe.format, numel).row_bytes
    if len(size) != 2 or size[1] != row_bytes or data.dtype is not _UINT8 or dtype not in FLOATS:
        _matrix("data", data)
        _fit("data", data, BYTES, (size[0], row_bytes), data.device)
        _float(dtype)
    _table(recipe, data.device)
    return (size[0], numel), dtype


def decode_sum(
    data: Tensor,
    numel: Count,
    dtype: torch.dtype,
    recipe: Recipe,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
) -> Result:
    """`data` [ranks, row_bytes] and `own` [numel] to [numel]."""
    if dtype not in FLOATS:
        _float(dtype)
    _summands(data, numel, recipe, own, own_rank, divisor)
    return (numel,), dtype


def decode_sum_encode(
    data: Tensor, numel: Count, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int, seed: int
) -> Result:
    """`data` [ranks, row_bytes] and `own` [numel] to [row_bytes]."""
    return (_summands(data, numel, recipe, own, own_rank, divisor),), _UINT8


def linear(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Result:
    """`x` [batch, numel], `data` [rows, row_bytes] and `bias` [rows] to [batch, rows]."""
    size, shape, device = x.shape, data.shape, x.device
    if (
        len(size) != 2
        or len(shape) != 2
        or shape[1] != layout(recipe.format, size[1]).row_bytes
        or x.dtype not in FLOATS
        or data.dtype is not _UINT8
        or data.device != device
    ):
        _matrix("x", x)
        _matrix("data", data)
        _fit("x", x, FLOATS, tuple(size), device)
        _fit("data", data, BYTES, (shape[0], layout(recipe.format, size[1]).row_bytes), device)
    if bias is not None and (bias.shape != shape[:1] or bias.dtype not in FLOATS or bias.device != device):
        _fit("bias", bias, FLOATS, (shape[0],), device)
    _table(recipe, device)
    return (size[0], shape[0]), x.dtype


def fake_quantize(x: Tensor, scale: Tensor, grid: Grid) -> Result:
    """`x` [outer, channels, inner] and `scale` [channels] to the shape of x."""
    size, device = x.shape, x.device
    if len(size) != 3 or x.dtype not in FLOATS or not x.is_contiguous():
        _dense("x", x, FLOATS, (1, 1, x.numel()) if len(size) != 3 else tuple(size), device)
    _dense_vector("scale", scale, size[1], device)
    _grid(grid, device)
    return size, x.dtype


def fake_quantize_backward(grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> Result:
    """`grad` and x [outer, channels, inner] and `scale` [channels] to the shape of x."""
    result = fake_quantize(x, scale, grid)
    if grad.shape != x.shape or grad.dtype is not x.dtype or grad.device != x.device or not grad.is_contiguous():
        _dense("grad", grad, frozenset((x.dtype,)), tuple(x.shape), x.device)
    return result


def integer_linear(x: Tensor, weight: Tensor) -> Result:
    """int8 `x` [batch, k] and `weight` [rows, k] to int32 [batch, rows]."""
    size, shape, device = x.shape, weight.shape, x.device
    if (
        len(size) != 2
        or len(shape) != 2
        or shape[1] != size[1]
        or x.dtype is not _INT8
        or weight.dtype is not _INT8
        or weight.device != device
    ):
        _matrix("x", x)
        _matrix("weight", weight)
        _fit("x", x, INTS, tuple(size), device)
        _fit("weight", weight, INTS, (shape[0], size[1]), device)
    return (size[0], shape[0]), _INT32


def integer_conv(
    x: Tensor, scale: Tensor, grid: Grid, weight: Tensor, factor: Tensor, bias: Tensor | None, window: Window
) -> Result:
    """fp32 `x` [images, channels, y, x] and int8 `weight` [outputs, words, y, x, 4] to fp32 [images, outputs, y, x]."""
    size, shape, device = x.shape, weight.shape, x.device
    if len(size) != 4 or x.dtype is not _FLOAT32 or not x.is_contiguous():
        _dense("x", x, FLOAT32, tuple(size) if len(size) == 4 else (1, 1, 1, x.numel()), device)
    if min(window[:4]) < 1 or min(window[4:8]) < 0 or window.groups < 1 or size[1] % window.groups:
        raise ShapeError(f"window: {window} does not fit {size[1]} channels, or has a number below its least.")
    words = -(-size[1] // window.groups // 4)
    fits = len(shape) == 5 and shape[1] == words and shape[4] == 4 and shape[0] % window.groups == 0
    if not fits or weight.dtype is not _INT8 or weight.device != device or not weight.is_contiguous():
        _dense("weight", weight, INTS, (shape[0], words, *shape[2:4], 4), device)
    _dense_vector("scale", scale, 1, device)
    _dense_vector("factor", factor, shape[0], device)
    if bias is not None:
        _dense_vector("bias", bias, shape[0], device)
    _grid(grid, device)
    height, width = window.outputs(size[2], size[3], shape[2:4])
    if height < 1 or width < 1:
        raise ShapeError(f"x: {tuple(size[2:])} is smaller than the kernel, {tuple(shape[2:4])} with {window}.")
    return (size[0], shape[0], height, width), _FLOAT32


def out(tensor: Tensor, result: Result, device: torch.device, name: str = "out") -> None:
    """What is written: each row of a matrix in one piece and none over another, anything else contiguous."""
    shape, dtype = result
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        or tensor.device != device
        or not (tensor.is_contiguous() or _rows_apart(tensor))
    ):
        _fit(name, tensor, frozenset((dtype,)), tuple(shape), device)
        if len(shape) != 2:
            _dense(name, tensor, frozenset((dtype,)), tuple(shape), device)
        raise ShapeError(
            f"{name}: the elements of a row lie side by side, and rows not over each other; its strides are "
            f"{tensor.stride()} for shape {tuple(tensor.shape)}. Pass a contiguous tensor."
        )


# -- parts of several operations ---------------------------------------------------------------------------------------


def _table(recipe: Recipe, device: torch.device) -> None:
    """A codec has a table if and only if its codes are places in one; kernels read it whole."""
    table = recipe.table
    if table is None and recipe.format.element != _LEVELS:
        return
    wanted = recipe.format.element == _LEVELS
    if table is None or not wanted:
        raise ShapeError(
            f"table: a recipe of {Element(recipe.format.element).name} codes {'lacks' if wanted else 'has'} one."
        )
    levels = 1 << recipe.format.bits
    fits = table.numel() == 2 * levels and table.dtype is _FLOAT32 and table.device == device
    if not fits or not table.is_contiguous():
        _dense("table", table, FLOAT32, (2, levels), device)


def _summands(data: Tensor, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int) -> int:
    """Check the terms of a sum; returns the bytes of a row."""
    size, device = data.shape, data.device
    row_bytes = layout(recipe.format, numel).row_bytes
    if len(size) != 2 or size[0] < 1 or size[1] != row_bytes or data.dtype is not _UINT8:
        _matrix("data", data)
        _fit("data", data, BYTES, (max(size[0], 1), row_bytes), device)
    if own is not None and (
        own.shape != (numel,) or own.dtype not in FLOATS or own.device != device or not own.is_contiguous()
    ):
        _dense("own", own, FLOATS, (numel,), device)
    if divisor < 1 or (own is not None and not 0 <= own_rank < size[0]):
        raise ShapeError(
            f"divisor={divisor}, own_rank={own_rank}: a sum of {size[0]} rows is divided by 1 or more, and "
            f"its own row is one of them."
        )
    _table(recipe, device)
    return row_bytes


def _grid(grid: Grid, device: torch.device) -> None:
    levels, thresholds, uniform = grid
    count = levels.numel()
    _dense_vector("levels", levels, max(count, 1), device)
    if uniform:
        return
    if count > MOST_LEVELS:
        raise ShapeError(f"levels: {count} of them, and a table has at most {MOST_LEVELS}: codes have 8 bits.")
    _dense_vector("thresholds", thresholds, count - 1, device)


def _dense_vector(name: str, vector: Tensor, numel: int, device: torch.device) -> None:
    fits = vector.shape == (numel,) and vector.dtype is _FLOAT32 and vector.device == device
    if not fits or not vector.is_contiguous():
        _dense(name, vector, FLOAT32, (numel,), device)


def _rows_apart(matrix: Tensor) -> bool:
    """Whether a tensor is a matrix of which each row lies in one piece, and none over another."""
    if matrix.dim() != 2:
        return False
    (first, second), (count, width) = matrix.stride(), matrix.shape
    return (second == 1 or width <= 1) and (first >= width or count <= 1)


# -- why something does not fit ----------------------------------------------------------------------------------------


def _matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ShapeError(f"{name}: expected a matrix, got shape {tuple(tensor.shape)}.")


def _float(dtype: torch.dtype) -> NoReturn:
    raise DtypeError(f"dtype, or that of out: expected {_spell(FLOATS)}, got {_spell((dtype,))}.")


def _spell(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _fit(
    name: str, tensor: Tensor, dtypes: frozenset[torch.dtype], shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        raise DtypeError(f"{name}: expected {_spell(dtypes)}, got {_spell((tensor.dtype,))}.")
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}.")
    if tensor.device != device:
        raise ShapeError(f"{name}: is on {tensor.device}, the others on {device}. Move it there first.")


def _dense(
    name: str, tensor: Tensor, dtypes: frozenset[torch.dtype], shape: tuple[int, ...], device: torch.device
) -> NoReturn:
    """Says why a tensor, which must be contiguous besides, does not fit."""
    _fit(name, tensor, dtypes, shape, device)
    raise ShapeError(f"{name}: must be contiguous, has strides {tensor.stride()}. Pass {name}.contiguous().")
