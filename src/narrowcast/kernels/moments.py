"""The two moments of AdamW as rows: their formats, the numbers of a step, and what the operation may be given.

The first moment lies in rows of any codec with blocks of up to MOST_BLOCK elements, or without blocks.

The second moment v lies in rows of its own format, with blocks of the same elements. Its codes have 8 bits:

- code 0 is v = 0, and nothing else;
- code c from 1 to 255 is scale * 2**((c - 255) / 8), with the powers between whole ones replaced by the straight line
  between them: floats of 3 bits of mantissa, the largest 1 and the smallest 2**-31.75 of the scale;
- the scale is a power of two (e8m0) above the block's largest v: at least 2**-126, at most 2**126.

So every level is a float of its own, whatever the block's scale is: a v that does not change keeps its value when its
neighbours change. A positive v that is smaller than the smallest level is rounded up to it: never to zero, by which
the step would divide. Between levels, v is rounded at random, up with the probability that makes the mean right (the
draws of reference/draws.py, keyed by the seed): in one step v moves by a thousandth, levels are a tenth apart, and the
nearest level would always be the old one. A block that holds a NaN or an infinity is NaN throughout.

A step is, in fp32, each operation rounded once:

    m = m * beta1 + g * (1 - beta1)                 or m = g, where g is a momentum
    v = v * beta2 + (g * (1 - beta2)) * g           or v as it is
    p = p * decay - (m / (sqrt(v) * correction + eps)) * size

with what was decoded on the right; m and v are encoded after p was updated with them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from narrowcast.errors import ShapeError
from narrowcast.kernels import arguments
from narrowcast.kernels.layout import ROW, Element, Format, Recipe, Scale, layout, to_float32

MANTISSA = 3
"""Bits of mantissa of the second moment's levels: 8 levels an octave."""
SHIFT = 23 - MANTISSA
TOP = 255
LEAST_EXPONENT, MOST_EXPONENT = 1, 253
"""The biased exponents that a scale has, so that it and its inverse are normal numbers."""

MOST_BLOCK = 4096
PLAIN_BLOCK = 128
"""Elements per scale of the second moment where the first one's codec has no blocks."""


class Step(NamedTuple):
    """The numbers of one step, in fp32."""

    beta1: float
    take1: float
    """1 - beta1, and `take2` 1 - beta2: what a gradient counts."""
    beta2: float
    take2: float
    correction: float
    """1 / sqrt(1 - beta2 ** updates of the second moment)."""
    eps: float
    decay: float
    """1 - lr * weight_decay."""
    size: float
    """lr / (1 - beta1 ** steps)."""


def step_of(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, steps: float, second_steps: float
) -> Step:
    """The numbers of a step: the first moment's `steps`-th update and the second's `second_steps`-th."""
    beta1, beta2 = betas
    correction = (1 - beta2**second_steps) ** -0.5
    size = lr / (1 - beta1**steps)
    exact = (beta1, 1 - beta1, beta2, 1 - beta2, correction, eps, 1 - lr * weight_decay, size)
    return Step(*(to_float32(number) for number in exact))


def second_format(first: Format) -> Format:
    """The format of the second moment beside a first moment of this format."""
    return Format(Element.LEVELS, 8, first.block or PLAIN_BLOCK, Scale.E8M0)


@cache
def second_recipe(first: Format, device: torch.device) -> Recipe:
    """What decodes the second moment. Encoding it is another matter: see reference/moments.py."""
    levels = [0.0] + [_level(code) for code in range(1, TOP + 1)]
    table = torch.tensor([levels, [float("inf")] * (TOP + 1)], dtype=torch.float32, device="cpu")
    return Recipe(second_format(first), 1.0, table.to(device))


def _level(code: int) -> float:
    octave, line = divmod(code - TOP, 1 << MANTISSA)
    return float(2.0**octave * (1 + line / (1 << MANTISSA)))


def adamw(
    parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor, recipe: Recipe, seed: int, takes_momentum: bool,
    step: Step,
) -> None:  # fmt: skip
    """Check the arguments: parameter and grad [rows, numel] of one dtype, first and second [rows, row_bytes]."""
    device, format = parameter.device, recipe.format
    arguments._matrix("parameter", parameter)
    if format.block == ROW or format.block > MOST_BLOCK:
        raise ShapeError(f"recipe: moments have blocks of up to {MOST_BLOCK} elements, not {format.block or 'rows'}.")
    rows, numel = parameter.shape
    floats = arguments.FLOATS - {torch.float64}
    wanted = (
        ("parameter", parameter, floats, (rows, numel)),
        ("grad", grad, frozenset((parameter.dtype,)), (rows, numel)),
        ("first", first, arguments.BYTES, (rows, layout(format, numel).row_bytes)),
        ("second", second, arguments.BYTES, (rows, layout(second_format(format), numel).row_bytes)),
    )
    for name, tensor, dtypes, shape in wanted:
        arguments._fit(name, tensor, dtypes, shape, device)
        if not tensor.is_contiguous():
            arguments._dense(name, tensor, dtypes, shape, device)
    arguments._table(recipe, device)
