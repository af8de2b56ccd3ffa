"""From numbers to codes and levels, and back.

Levels are ascending, perhaps with repeats; `indices` holds the code of each. A number goes to the nearest level, ties
to the lower one, and of equal levels to the first. Every function takes a number or a tensor of any shape, on any
device.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor

from narrowcast.errors import PayloadError, QuantizeError
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators.fake_quantize import fake_quantize

WIDEST = 256
"""The most levels that the kernels hold; larger grids are searched by torch."""
REMEMBERED = 64
_grids: OrderedDict[tuple[object, ...], tuple[Tensor, Grid]] = OrderedDict()
"""Grids by the address of their levels. The levels are held too, so that no other tensor gets their memory."""


def float_to_apot(x: Tensor | float, levels: Tensor, indices: Tensor, alpha: Tensor | float) -> Tensor:
    """The codes of `x`, clipped to [-alpha, alpha]."""
    values = _as_floats(x, levels)
    if bool(values.isnan().any()):
        raise QuantizeError(
            "x: holds a NaN, and no code stands for one. Usually a training run diverged: look at the tensor first, or "
            "pass x.nan_to_num(). quant_dequant_APoT and APoTFakeQuantize keep NaN as it is."
        )
    levels = levels.to(values.device)
    first = torch.searchsorted(levels, levels)  # of equals
    return indices.to(values.device)[first][_place(clipped(values, alpha), levels)]


def apot_to_float(x_apot: Tensor | int, levels: Tensor, indices: Tensor) -> Tensor:
    """The levels that codes stand for."""
    codes = x_apot if isinstance(x_apot, Tensor) else torch.tensor(x_apot, dtype=torch.int64, device="cpu")
    codes = codes.long()
    indices = indices.to(codes.device)
    by_code = levels.new_full((int(indices.max()) + 1,), math.nan, device=codes.device)
    by_code[indices] = levels.to(codes.device)
    known = not codes.numel() or (int(codes.min()) >= 0 and int(codes.max()) < len(by_code))
    values = by_code[codes] if known else by_code
    # Codes with a gap between them, which no observer gives, have a NaN in the gap.
    if not known or (len(by_code) != len(indices) and bool(values.isnan().any())):
        raise PayloadError(
            f"x_apot: holds a code that is not one of the {len(indices)} in indices, {int(indices.min())} to "
            f"{int(indices.max())}. The codes were made with another b, k or sign: use the quantizer that made them."
        )
    return values


def quant_dequant_util(x: Tensor | float, levels: Tensor, indices: Tensor | None = None) -> Tensor:
    """`x` at the nearest levels, in its own dtype; a NaN stays one. `indices` is not used."""
    values = _as_floats(x, levels)
    grid = _grid(levels.to(values.device))
    if len(grid.levels) > WIDEST:
        nearest = grid.levels[torch.searchsorted(grid.thresholds, values.float().contiguous())].to(values.dtype)
        return torch.where(values.isnan(), math.nan, nearest)
    return fake_quantize(values, torch.ones(1, dtype=torch.float32, device=values.device), grid, None)


def _grid(levels: Tensor) -> Grid:
    """The grid of a tensor of levels, computed once: on a GPU, computing it waits for the device."""
    version = 0 if levels.is_inference() else levels._version
    key = (str(levels.device), levels.data_ptr(), len(levels), version)
    if key not in _grids:
        distinct = torch.unique_consecutive(levels)
        _grids[key] = levels, Grid(distinct, thresholds(distinct), False)
        if len(_grids) > REMEMBERED:
            _grids.popitem(last=False)
    return _grids[key][1]


def clipped(x: Tensor, alpha: Tensor | float) -> Tensor:
    """`x` within [-alpha, alpha]; a NaN stays one."""
    bound = torch.as_tensor(alpha, dtype=x.dtype, device=x.device).reshape(())
    return x.clamp(-bound, bound)


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


def _as_floats(x: Tensor | float, levels: Tensor) -> Tensor:
    values = x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32, device=levels.device)
    return values if values.is_floating_point() else values.float()
