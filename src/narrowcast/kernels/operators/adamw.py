"""A step of AdamW on moments that are held in rows, as a torch operator and as the function that the optimizer calls.

`torch.ops.narrowcast.adamw_` changes the parameter and the rows of both moments in place, and returns nothing. It has
no derivative. kernels/moments.py says what it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.kernels.layout import Recipe
from narrowcast.kernels.moments import Step
from narrowcast.kernels.operators.declare import TYPES, Schema, declare
from narrowcast.kernels.operators.dispatch import kernel_for, unwatched

SCHEMA = Schema(
    (
        *("Tensor(a!) parameter", "Tensor(b!) first", "Tensor(c!) second", "Tensor grad", TYPES["Recipe"]),
        *("int seed", "bool takes_momentum", "float[] step"),
    ),
    recipe=4,
    result="()",
)


def _run(
    parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor, recipe: Recipe, seed: int, takes_momentum: bool,
    step: Sequence[float],
) -> None:  # fmt: skip
    kernel = kernel_for(parameter.device.type)
    kernel.adamw(parameter, first, second, grad, recipe, seed, takes_momentum, Step(*step))


declare("adamw_", SCHEMA, _run, lambda *values: None)


def adamw_(
    parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor, recipe: Recipe, seed: int, takes_momentum: bool,
    step: Step,
) -> None:  # fmt: skip
    """One step: parameter and grad [rows, numel] of one dtype, first and second the rows of the moments."""
    arguments = (parameter, first, second, grad, recipe, seed, takes_momentum, step)
    if unwatched(parameter):
        _run(*arguments)
    else:
        torch.ops.narrowcast.adamw_(*SCHEMA.spread(arguments))
