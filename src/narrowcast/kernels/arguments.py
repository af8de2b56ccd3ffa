"""What an operation of a kernel may be given: dtypes, shapes, devices and strides, in one place.

Kernels get addresses and sizes, and believe them: a bias that is too short would be read past its end. So `Kernel`
(contract.py) asks here before every operation, on every machine, whoever calls. Codecs and modules say the same earlier
in their own words; a message from here names the operation's argument and the rule.

A check looks at a few attributes, for a call on a thousand floats is to take a few microseconds. What does not fit is
looked at again, to say why. Numbers (peaks, seeds, the values of scales) are trusted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.errors import DtypeError, ShapeError
from narrowcast.kernels.layout import Element, Grid, Recipe, layout

FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
BYTES = frozenset((torch.uint8,))
FLOAT32 = frozenset((torch.float32,))
MOST_LEVELS = 256
_UINT8, _FLOAT32, _INT8, _INT32 = torch.uint8, torch.float32, torch.int8, torch.int32


def encoded_shape(rows: Tensor, recipe: Recipe) -> tuple[int, int]:
    """The shape of what `rows` [rows, numel] become."""
    size = rows.shape
    if len(size) != 2 or rows.dtype not in FLOATS:
        _matrix("rows", rows)
        _fit("rows", rows, FLOATS, tuple(size), rows.device)
    if recipe.table is not None or recipe.format.element == Element.LEVELS:
        table(recipe, rows.device)
    return size[0], layout(recipe.format, size[1]).row_bytes


def decoded_shape(data: Tensor, numel: int, dtype: torch.dtype, recipe: Recipe) -> tuple[int, int]:
    """The shape of what `data` [rows, row_bytes] becomes."""
    size, row_bytes = data.shape, layout(recipe.format, numel).row_bytes
    if len(size) != 2 or size[1] != row_bytes or data.dtype is not _UINT8 or dtype not in FLOATS:
        _matrix("data", data)
        _fit("data", data, BYTES, (size[0], row_bytes), data.device)
        raise DtypeError(f"dtype: {dtype} is none of the floats that rows are decoded to.")
    if recipe.table is not None or recipe.format.element == Element.LEVELS:
        table(recipe, data.device)
    return size[0], numel


def encode(out: Tensor, rows: Tensor, recipe: Recipe) -> None:
    """`out` [rows, row_bytes] of `rows` [rows, numel]."""
    size, device = rows.shape, rows.device
    if (
        len(size) != 2
        or rows.dtype not in FLOATS
        or out.dtype is not _UINT8
        or out.shape != (size[0], layout(recipe.format, size[1]).row_bytes)
        or out.device != device
        or not (out.is_contiguous() or _rows_apart(out, size[0]))
    ):
        _matrix("rows", rows)
        _fit("rows", rows, FLOATS, tuple(size), device)
        _fit("out", out, BYTES, (size[0], layout(recipe.format, size[1]).row_bytes), device)
        raise _entangled(out)
    if recipe.table is not None or recipe.format.element == Element.LEVELS:
        table(recipe, device)


def decode(out: Tensor, data: Tensor, recipe: Recipe) -> None:
    """`out` [rows, numel] of `data` [rows, row_bytes]."""
    size, device = out.shape, data.device
    if (
        len(size) != 2
        or out.dtype not in FLOATS
        or data.dtype is not _UINT8
        or data.shape != (size[0], layout(recipe.format, size[1]).row_bytes)
        or out.device != device
        or not (out.is_contiguous() or _rows_apart(out, size[0]))
    ):
        _matrix("out", out)
        _fit("data", data, BYTES, (size[0], layout(recipe.format, size[1]).row_bytes), device)
        _fit("out", out, FLOATS, tuple(size), device)
        raise _entangled(out)
    if recipe.table is not None or recipe.format.element == Element.LEVELS:
        table(recipe, device)


def decode_sum(out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int) -> None:
    """`out` [numel] of `data` [ranks, row_bytes] and `own` [numel]."""
    size, device = out.shape, data.device
    if len(size) != 1 or out.dtype not in FLOATS or out.device != device or not out.is_contiguous():
        _fit("out", out, FLOATS, (out.numel(),), device)
        raise _not_contiguous("out", out)
    _summands(data, size[0], recipe, own, own_rank, divisor)


def reduce(
    out: Tensor, data: Tensor, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int
) -> None:
    """`out` [row_bytes] of `data` [ranks, row_bytes] and `own` [numel]."""
    size, device = (layout(recipe.format, numel).row_bytes,), data.device
    if out.shape != size or out.dtype is not _UINT8 or out.device != device or not out.is_contiguous():
        _fit("out", out, BYTES, size, device)
        raise _not_contiguous("out", out)
    _summands(data, numel, recipe, own, own_rank, divisor)


def linear(out: Tensor, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> None:
    """`out` [batch, rows] of `x` [batch, numel], `data` [rows, row_bytes] and `bias` [rows]."""
    size, shape, device = x.shape, data.shape, x.device
    if (
        len(size) != 2
        or len(shape) != 2
        or shape[1] != layout(recipe.format, size[1]).row_bytes
        or x.dtype not in FLOATS
        or data.dtype is not _UINT8
        or data.device != device
        or out.dtype is not x.dtype
        or out.shape != (size[0], shape[0])
        or out.device != device
        or not (out.is_contiguous() or _rows_apart(out, size[0]))
    ):
        _matrix("x", x)
        _matrix("data", data)
        _fit("x", x, FLOATS, tuple(size), device)
        _fit("data", data, BYTES, (shape[0], layout(recipe.format, size[1]).row_bytes), device)
        _fit("out", out, frozenset((x.dtype,)), (size[0], shape[0]), device)
        raise _entangled(out)
    if bias is not None and (bias.shape != shape[:1] or bias.dtype not in FLOATS or bias.device != device):
        _fit("bias", bias, FLOATS, (shape[0],), device)
    if recipe.table is not None or recipe.format.element == Element.LEVELS:
        table(recipe, device)


def fake_quantize(out: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
    """`out` and `x` [outer, channels, inner], `scale` [channels]."""
    size, device = x.shape, x.device
    if len(size) != 3 or x.dtype not in FLOATS or not x.is_contiguous():
        _fit("x", x, FLOATS, (1, 1, x.numel()) if len(size) != 3 else tuple(size), device)
        raise _not_contiguous("x", x)
    if out.shape != size or out.dtype is not x.dtype or out.device != device or not out.is_contiguous():
        _fit("out", out, frozenset((x.dtype,)), tuple(size), device)
        raise _not_contiguous("out", out)
    if scale.shape != size[1:2] or scale.dtype is not _FLOAT32 or scale.device != device or not scale.is_contiguous():
        _fit("scale", scale, FLOAT32, (size[1],), device)
        raise _not_contiguous("scale", scale)
    _grid(grid, device)


def fake_gradients(dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid) -> None:
    """Like `fake_quantize`, with `grad` and `dx` like x, and `dscale` like the scale."""
    fake_quantize(dx, x, scale, grid)
    if grad.shape != x.shape or grad.dtype is not x.dtype or grad.device != x.device or not grad.is_contiguous():
        _fit("grad", grad, frozenset((x.dtype,)), tuple(x.shape), x.device)
        raise _not_contiguous("grad", grad)
    if dscale.shape != scale.shape or dscale.dtype is not _FLOAT32 or not dscale.is_contiguous():
        _fit("dscale", dscale, FLOAT32, tuple(scale.shape), x.device)
        raise _not_contiguous("dscale", dscale)


def integer_linear(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """`out` [batch, rows] int32 of `x` [batch, k] and `weight` [rows, k], both int8."""
    size, shape, device = x.shape, weight.shape, x.device
    if (
        len(size) != 2
        or len(shape) != 2
        or shape[1] != size[1]
        or x.dtype is not _INT8
        or weight.dtype is not _INT8
        or weight.device != device
        or out.dtype is not _INT32
        or out.shape != (size[0], shape[0])
        or out.device != device
        or not (out.is_contiguous() or _rows_apart(out, size[0]))
    ):
        _matrix("x", x)
        _matrix("weight", weight)
        _fit("x", x, frozenset((_INT8,)), tuple(size), device)
        _fit("weight", weight, frozenset((_INT8,)), (shape[0], size[1]), device)
        _fit("out", out, frozenset((_INT32,)), (size[0], shape[0]), device)
        raise _entangled(out)


def table(recipe: Recipe, device: torch.device) -> None:
    """A codec has a table if and only if its codes are places in one; kernels read it whole."""
    found, wanted = recipe.table, recipe.format.element == Element.LEVELS
    if found is None or not wanted:
        raise ShapeError(
            f"table: a recipe of {Element(recipe.format.element).name} codes {'lacks' if wanted else 'has'} one."
        )
    levels = 1 << recipe.format.bits
    if (
        found.numel() != 2 * levels
        or found.dtype is not _FLOAT32
        or found.device != device
        or not found.is_contiguous()
    ):
        _fit("table", found, FLOAT32, (2, levels), device)
        raise _not_contiguous("table", found)


def _summands(data: Tensor, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int) -> None:
    size, device = data.shape, data.device
    row_bytes = layout(recipe.format, numel).row_bytes
    if len(size) != 2 or size[0] < 1 or size[1] != row_bytes or data.dtype is not _UINT8:
        _matrix("data", data)
        _fit("data", data, BYTES, (max(size[0], 1), row_bytes), device)
    if own is not None and (
        own.shape != (numel,) or own.dtype not in FLOATS or own.device != device or not own.is_contiguous()
    ):
        _fit("own", own, FLOATS, (numel,), device)
        raise _not_contiguous("own", own)
    if divisor < 1 or (own is not None and not 0 <= own_rank < size[0]):
        raise ShapeError(
            f"divisor={divisor}, own_rank={own_rank}: a sum of {size[0]} rows is divided by 1 or more, and "
            f"its own row is one of them."
        )
    if recipe.table is not None or recipe.format.element == Element.LEVELS:
        table(recipe, device)


def _grid(grid: Grid, device: torch.device) -> None:
    levels, thresholds, uniform = grid
    count = levels.numel()
    if (
        levels.dim() != 1
        or not count
        or levels.dtype is not _FLOAT32
        or levels.device != device
        or not levels.is_contiguous()
    ):
        _fit("levels", levels, FLOAT32, (max(count, 1),), device)
        raise _not_contiguous("levels", levels)
    if uniform:
        return
    if count > MOST_LEVELS:
        raise ShapeError(f"levels: {count} of them, and a table has at most {MOST_LEVELS}: codes have 8 bits.")
    if (
        thresholds.shape != (count - 1,)
        or thresholds.dtype is not _FLOAT32
        or thresholds.device != device
        or not thresholds.is_contiguous()
    ):
        _fit("thresholds", thresholds, FLOAT32, (count - 1,), device)
        raise _not_contiguous("thresholds", thresholds)


def _rows_apart(out: Tensor, count: int) -> bool:
    """Whether each row of a matrix lies in one piece, and none over another."""
    first, second = out.stride()
    width = out.shape[1]
    return (second == 1 or width <= 1) and (first >= width or count <= 1)


# -- why something does not fit ----------------------------------------------------------------------------------------


def _matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ShapeError(f"{name}: expected a matrix, got shape {tuple(tensor.shape)}.")


def _fit(
    name: str, tensor: Tensor, dtypes: frozenset[torch.dtype], shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise DtypeError(f"{name}: expected {wanted}, got {str(tensor.dtype).removeprefix('torch.')}.")
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}.")
    if tensor.device != device:
        raise ShapeError(f"{name}: is on {tensor.device}, the others on {device}. Move it there first.")


def _entangled(out: Tensor) -> ShapeError:
    return ShapeError(
        f"out: the elements of a row lie side by side, and rows not over each other; its strides are {out.stride()} "
        f"for shape {tuple(out.shape)}. Pass a contiguous tensor."
    )


def _not_contiguous(name: str, tensor: Tensor) -> ShapeError:
    return ShapeError(f"{name}: must be contiguous, has strides {tensor.stride()}. Pass {name}.contiguous().")
