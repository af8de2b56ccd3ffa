"""From numbers to codes and levels, and back.

Levels are a tensor or a list, perhaps with repeats; `indices` holds the code of each. A number goes to the nearest
level, ties to the lower one, and of equal levels to the first. Every function takes a number or a tensor of any shape,
on any device.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.errors import NoTensorError, PayloadError, QuantizeError, ShapeError, SpecError
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators.fake_quantize import fake_quantize

WIDEST = 256
"""The most levels that the kernels hold; larger grids are searched by torch."""
REMEMBERED = 64
_grids: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor, Grid]] = OrderedDict()
"""Grids by the address of their levels. The levels are held, so that no other tensor gets their memory, and a copy."""

Numbers = Tensor | Sequence[Any]
"""Levels or codes: a tensor of any strides, or a list of numbers or of tensors of one element."""


def float_to_apot(x: Tensor | float, levels: Numbers, indices: Numbers, alpha: Tensor | float) -> Tensor:
    """The codes of `x`, clipped to [-alpha, alpha]."""
    table, codes = _pair(levels, indices)
    values = as_floats("x", x, table.device).detach()
    if bool(values.isnan().any()):
        raise QuantizeError(
            "x: holds a NaN, and no code stands for one. Usually a training run diverged: look at the tensor first, or "
            "pass x.nan_to_num(). quant_dequant_APoT and APoTFakeQuantize keep NaN as it is."
        )
    if not bool((as_floats("alpha", alpha).detach() >= 0).all()):
        raise SpecError(f"alpha={alpha}: the largest magnitude that is not clipped is not negative.")
    table = table.to(values.device)
    first = torch.searchsorted(table, table)  # of equals
    return codes.to(values.device)[first][_place(clipped(values, alpha), table)]


def apot_to_float(x_apot: Tensor | int, levels: Numbers, indices: Numbers) -> Tensor:
    """The levels that codes stand for."""
    table, known_codes = _pair(levels, indices)
    codes = as_numbers("x_apot", x_apot)
    whole = codes.long()
    known_codes = known_codes.long().to(codes.device)
    lowest, highest = int(known_codes.min()), int(known_codes.max())
    by_code = table.new_full((highest - lowest + 1,), math.nan, device=codes.device)
    by_code[known_codes - lowest] = table.to(codes.device)
    known = bool((whole == codes).all() & (whole >= lowest).all() & (whole <= highest).all())
    values = by_code[whole - lowest] if known else by_code
    # Codes with a gap between them, which no observer gives, have a NaN in the gap.
    if not known or (len(by_code) != len(known_codes) and bool(values.isnan().any())):
        raise PayloadError(
            f"x_apot: holds a code that is not one of the {len(known_codes)} in indices, {lowest} to {highest}. The "
            "codes were made with another b, k or sign: use the quantizer that made them."
        )
    return values


def quant_dequant_util(x: Tensor | float, levels: Numbers, indices: Numbers | None = None) -> Tensor:
    """`x` at the nearest levels, in its own dtype; a NaN stays one. `indices` is not used."""
    table = _pair(levels, None)[0] if _plain(levels) else levels
    assert isinstance(table, Tensor)
    values = as_floats("x", x, table.device).detach()
    grid = _grid(table.to(values.device))
    if len(grid.levels) > WIDEST:
        nearest = grid.levels[torch.searchsorted(grid.thresholds, values.float().contiguous())].to(values.dtype)
        return torch.where(values.isnan(), math.nan, nearest)
    return fake_quantize(values, torch.ones(1, dtype=torch.float32, device=values.device), grid, None)


def _plain(levels: Numbers) -> bool:
    """Whether levels are something else than a vector of floats: a list, for one."""
    return not (isinstance(levels, Tensor) and levels.dim() == 1 and levels.numel() and levels.is_floating_point())


def _pair(levels: Numbers, indices: Numbers | None) -> tuple[Tensor, Tensor]:
    """Levels in ascending order, as a vector of floats, and their codes in the same order."""
    table = _vector("levels", levels)
    table = table if table.is_floating_point() else table.float()
    codes = (
        torch.arange(len(table), dtype=torch.int64, device=table.device)
        if indices is None
        else _vector("indices", indices)
    )
    if len(table) != len(codes) or not len(table):
        raise ShapeError(
            f"levels and indices: they have {len(table)} and {len(codes)} elements. Pass as many levels as codes, at "
            "least one, as calculate_qparams returns them."
        )
    if bool(table.isnan().any()):
        raise SpecError("levels: hold a NaN, which no number is near to. Observe finite data first.")
    if bool((table[1:] < table[:-1]).any()):
        table, order = table.sort(stable=True)
        codes = codes.to(order.device)[order]
    return table, codes


def as_numbers(name: str, numbers: Any, device: torch.device | str = "cpu") -> Tensor:
    """A tensor as it is; numbers, lists of them or of tensors of one element, and arrays as int64, else as fp32."""
    if isinstance(numbers, Tensor):
        if numbers.is_complex():
            raise NoTensorError(f"{name}: expected real numbers, got {numbers.dtype}. Pass {name}.real.")
        return numbers
    try:
        if isinstance(numbers, (list, tuple)) and any(isinstance(each, Tensor) for each in numbers):
            return torch.stack([as_numbers(name, each).detach().reshape(()) for each in numbers])
        exact = torch.as_tensor(numbers, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NoTensorError(f"{name}: expected numbers, in a tensor or a list, got {numbers!r}.") from error
    whole = exact.long()
    return whole if torch.equal(whole.double(), exact) else exact.float()


def as_floats(name: str, numbers: Any, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of floats as it is; other numbers as fp32."""
    values = as_numbers(name, numbers, device)
    return values if values.is_floating_point() else values.float()


def _vector(name: str, numbers: Numbers) -> Tensor:
    """Numbers as a contiguous vector."""
    try:
        if not isinstance(numbers, Tensor):
            iter(numbers)
        return as_numbers(name, numbers).detach().reshape(-1).contiguous()
    except TypeError as error:
        raise SpecError(f"{name}: expected a tensor or a list of numbers, got {numbers!r}.") from error


def _grid(levels: Tensor) -> Grid:
    """The grid of a tensor of levels, computed once: on a GPU, computing it waits for the device."""
    version = -1 if levels.is_inference() else levels._version
    key = (str(levels.device), levels.data_ptr(), levels.dtype, levels.shape, levels.stride(), version)
    known = _grids.get(key)
    # On a CPU a look costs little, and sees what was written through `.data` or into an inference tensor.
    if known is None or (levels.device.type == "cpu" and not torch.equal(known[1], levels)):
        ordered = _pair(levels, None)[0].float()
        distinct = torch.unique_consecutive(ordered)
        known = levels, levels.clone(), Grid(distinct, thresholds(distinct), False)
        _grids[key] = known
        if len(_grids) > REMEMBERED:
            _grids.popitem(last=False)
    return known[2]


def clipped(x: Tensor, alpha: Tensor | float) -> Tensor:
    """`x` within [-alpha, alpha]; a NaN stays one."""
    bound = as_floats("alpha", alpha).detach().to(x.device, x.dtype)
    if bound.numel() != 1:
        raise ShapeError(f"alpha: one clip for all of x, got {bound.numel()} numbers. Pass one of them.")
    return x.clamp(-bound.reshape(()), bound.reshape(()))


def thresholds(levels: Tensor) -> Tensor:
    """Between fp32 levels: the largest fp32 numbers that are not above the middles, so that ties go down."""
    middles = (levels[1:].double() + levels[:-1].double()) / 2
    rounded = middles.float()
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return torch.where(rounded.double() > middles, below, rounded)


def _place(values: Tensor, levels: Tensor) -> Tensor:
    """Where in `levels` the nearest to each value is: how many thresholds lie below it."""
    if values.dtype == torch.float64:
        bounds = (levels[1:].double() + levels[:-1].double()) / 2
    else:
        values, bounds = values.float(), thresholds(levels)
    return torch.searchsorted(bounds, values.contiguous())
