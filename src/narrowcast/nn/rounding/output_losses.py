"""How much a model's output loses by an error of one weight, whatever its kind.

To first order an error D of a weight changes the output, over some data, by J D. For errors without a preferred
direction its squared length is that of D times the mean square of J's columns. Random signs v estimate that: the
gradient of v . output with respect to the weight has the mean squared length of J. So a weight has one number: what a
squared error of 1 costs, relative to the squared output. The losses of different weights add up in the same unit, and
that is what a mix of codecs is chosen by (codecs/mix.py). Losses of several weights at once are taken to be
independent, and gradients are those of the float model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import CalibrationError
from narrowcast.nn.rounding.batches import UNCHANGED, evaluating, padding_mask, read_batches, tensors_in
from narrowcast.nn.rounding.passes import run_up_to
from narrowcast.nn.survey import survey

PROBES = 4
"""Draws of random signs for each batch."""


def output_sensitivity(model: nn.Module, data: Any) -> dict[str, float]:
    """What a squared error of 1 in each weight costs, relative to the squared output, by the weight's keys."""
    batches = read_batches(data)
    weights = survey(model).weights
    parameters = [weight.slots[0].float_weight() for weight in weights]
    wanted = [parameter.requires_grad for parameter in parameters]
    squares, energy = [0.0] * len(parameters), 0.0
    draws = torch.Generator().manual_seed(0)
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with evaluating(model), torch.enable_grad():
            for number, batch in enumerate(batches):
                energy += _add_batch(model, batch, number, parameters, squares, draws)
    finally:
        for parameter, was in zip(parameters, wanted, strict=True):
            parameter.requires_grad_(was)
    if not 0 < energy < math.inf or not math.isfinite(sum(squares)):
        raise CalibrationError(
            "data: the model's output on it, or its gradient, is zero or not finite, so that no loss can be told. Pass "
            f"inputs such as the model gets in use. {UNCHANGED}"
        )
    costs = {}
    for weight, parameter, square in zip(weights, parameters, squares, strict=True):
        cost = square / (PROBES * max(parameter.numel(), 1) * energy)
        costs.update(dict.fromkeys(weight.names(), cost))
    return costs


def _add_batch(
    model: nn.Module,
    batch: Any,
    number: int,
    parameters: Sequence[Tensor],
    squares: list[float],
    draws: torch.Generator,
) -> float:
    """Add the squared gradients of one batch. Returns its squared output."""
    mask = padding_mask(batch)
    given = [output for output in tensors_in(run_up_to(model, batch, number)) if output.is_floating_point()]
    outputs = [output for output in (_without_padding(each, mask) for each in given) if output.requires_grad]
    for probe in range(PROBES if outputs else 0):
        signs = [_random_signs(output, draws) for output in outputs]
        last = probe == PROBES - 1
        gradients = torch.autograd.grad(outputs, parameters, signs, retain_graph=not last, allow_unused=True)
        for place, gradient in enumerate(gradients):
            squares[place] += 0.0 if gradient is None else float(gradient.detach().double().square().sum())
    return sum(float(output.detach().double().square().sum()) for output in outputs)


def _without_padding(output: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or output.dim() < 2 or output.shape[:2] != mask.shape:
        return output
    return output[mask.to(output.device)]


def _random_signs(like: Tensor, draws: torch.Generator) -> Tensor:
    signs = torch.randint(2, like.shape, generator=draws, dtype=torch.int8, device="cpu")
    return (2 * signs - 1).to(like)
