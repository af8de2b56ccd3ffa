"""Plain torch: the codes of rows, one column after another, where what a column loses changes the columns behind it.

Both functions take some columns of all rows, and the scales of the rows: `scales` [rows, blocks], zero points alike or
None, and `blocks`, int64 [columns], which block each column belongs to; None for codecs without scales. They change
what they are told to in place and return int64 codes and fp32 numbers, [rows, columns] each. Rows are
independent of each other. Codes are the nearest ones; see nn/rounding/gptq.py and nn/rounding/polish.py for what the
numbers mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.layout import Recipe
from narrowcast.kernels.reference import casts
from narrowcast.kernels.reference.codes import dequantize, quantize


def round_columns(
    weight: Tensor, factor: Tensor, scales: Tensor | None, zeros: Tensor | None, blocks: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Round the columns of `weight` in order: their codes, and their errors over their own factor.

    `factor` [columns, columns] is upper triangular. The error of a column, over its factor on the diagonal, times its
    row of factors is subtracted from the columns behind it. Weights that are not finite count as `nan_to_num` has them.
    What `weight` holds afterwards does not matter.
    """
    codes = torch.zeros(weight.shape, dtype=torch.int64, device=weight.device)
    errors = torch.zeros_like(weight)
    for place, block in enumerate(blocks.tolist()):
        values = torch.nan_to_num(weight[:, place])  # errors of huge weights overflow
        codes[:, place], decoded = _nearest(values, scales, zeros, block, recipe)
        error = (values - decoded) / factor[place, place]
        weight[:, place:] -= error.unsqueeze(-1) * factor[place, place:]
        errors[:, place] = error
    return codes, errors


def choose_columns(
    values: Tensor,
    slope: Tensor,
    moments: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    blocks: Tensor,
    recipe: Recipe,
) -> tuple[Tensor, Tensor]:
    """Choose the codes of columns in order, each given all others: the codes, and how much `values` changed.

    `values` are what the columns decode to, `slope` half the derivatives of a row's loss with respect to them, and
    `moments` [columns, columns] half the second ones. Both are changed to what they are afterwards.
    """
    codes = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
    changes = torch.zeros_like(values)
    for place, block in enumerate(blocks.tolist()):
        value = values[:, place]
        target = value - slope[:, place] / moments[place, place]
        target = torch.where(target.isfinite(), target, value)  # products of huge weights overflow
        codes[:, place], decoded = _nearest(target, scales, zeros, block, recipe)
        change = decoded - value
        slope += change.unsqueeze(-1) * moments[place]
        changes[:, place] = change
        values[:, place] = decoded
    return codes, changes


def _nearest(
    x: Tensor, scales: Tensor | None, zeros: Tensor | None, block: int, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """The codes of x [rows], and what they decode to."""
    if scales is None:
        codes = casts.cast_bits(x, recipe.format.element).long()
        return codes, casts.cast_value(codes, recipe.format.element)
    scale = scales[:, block]
    zero = torch.zeros_like(scale, dtype=torch.int64) if zeros is None else zeros[:, block].long()
    codes = quantize(x, scale, zero, recipe, None).long()
    return codes, dequantize(codes, scale, zero, recipe)
