"""Triton: codes of rows, one column after another, in one launch for as many columns as a program holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels.layout import Recipe
from narrowcast.kernels.triton import column_kernels
from narrowcast.kernels.triton.arguments import form_of, on, searching
from narrowcast.kernels.triton.tables import cells

COLUMNS = 128
"""Columns that a program holds, at most."""
ROWS = 4
"""Rows that it holds, with a warp for each."""


def takes(rows: Tensor) -> bool:
    """Whether the kernels run: on no more columns than a program holds, each row side by side."""
    return rows.numel() > 0 and rows.shape[1] <= COLUMNS and rows.stride(1) == 1


def round_columns(
    weight: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor | None, blocks: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """`weight` stays as it is; only its codes and errors are told."""
    codes, errors = _results(weight)
    factor = factor if factor.stride(1) == 1 else factor.contiguous()
    with on(weight.device):
        column_kernels.round_kernel[_grid(weight)](
            weight=weight,
            codes=codes,
            errors=errors,
            factor=factor,
            weight_stride=weight.stride(0),
            factor_stride=factor.stride(0),
            **_grids(weight, scales, zeros, blocks, recipe),
        )
    return codes.long(), errors


def choose_columns(
    values: Tensor,
    slope: Tensor,
    moments: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    blocks: Tensor,
    recipe: Recipe,
) -> tuple[Tensor, Tensor]:
    """Changes `values` and `slope`."""
    codes, changes = _results(values)
    moments = moments if moments.stride(1) == 1 else moments.contiguous()
    with on(values.device):
        column_kernels.choose_kernel[_grid(values)](
            values=values,
            slopes=slope,
            codes=codes,
            changes=changes,
            moments=moments,
            values_stride=values.stride(0),
            slope_stride=slope.stride(0),
            moment_stride=moments.stride(0),
            **_grids(values, scales, zeros, blocks, recipe),
        )
    return codes.long(), changes


def _results(like: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(like.shape, dtype=torch.int32, device=like.device)
    return codes, torch.empty(like.shape, dtype=torch.float32, device=like.device)


def _grid(rows: Tensor) -> tuple[int]:
    return (-(-len(rows) // ROWS),)


def _grids(rows: Tensor, scales: Tensor, zeros: Tensor | None, blocks: Tensor, recipe: Recipe) -> dict[str, Any]:
    """What both kernels are told of the rows' scales, and how they are compiled."""
    scales = scales.contiguous()
    return {
        "scales": scales,
        "zeros": scales if zeros is None else zeros.contiguous(),
        "blocks": blocks,
        "levels": scales if recipe.table is None else cells(recipe.table).levels,
        "rows": rows.shape[0],
        "columns": rows.shape[1],
        "scale_stride": scales.shape[1],
        **searching(recipe.table, scales),
        "FORM": form_of(recipe.format, rows.device),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "num_warps": ROWS,
        "enable_fp_fusion": False,
    }
