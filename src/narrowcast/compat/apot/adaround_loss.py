"""The loss of AdaRound (Nagel et al., Up or Down?, ICML 2020): what a layer's output loses, and what is undecided.

A number V stands for each weight. Its choice h = clamp(1.2 sigmoid(V) - 0.1, 0, 1) is 0 for the level below and 1 for
the one above. The second term, 1 - |2h - 1|^beta, is zero once every choice is made; beta falls on a cosine.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import CheckedStepError

ADAROUND_ZETA: float = 1.1
ADAROUND_GAMMA: float = -0.1


def rectified_sigmoid(V: Tensor) -> Tensor:
    """The choice that each V stands for, from 0 to 1."""
    return (V.sigmoid() * (ADAROUND_ZETA - ADAROUND_GAMMA) + ADAROUND_GAMMA).clamp(0, 1)


class AdaptiveRoundingLoss(nn.Module):
    """Two terms, to be added: of the choices, which is zero while `warm_start` of the steps pass, and of the output."""

    def __init__(
        self,
        max_iter: int,
        warm_start: float = 0.2,
        beta_range: tuple[float, float] = (20, 2),
        reg_param: float = 0.001,
    ) -> None:
        super().__init__()
        self.max_iter, self.warm_start, self.beta_range, self.reg_param = max_iter, warm_start, beta_range, reg_param

    def rounding_regularization(self, V: Tensor, curr_iter: int) -> Tensor:
        """How undecided the choices are at a step."""
        if curr_iter >= self.max_iter:
            raise CheckedStepError(f"curr_iter={curr_iter}: steps count from 0, and max_iter={self.max_iter}.")
        warm = self.warm_start * self.max_iter
        if curr_iter < warm:
            return torch.zeros((), dtype=V.dtype, device=V.device)
        first, last = self.beta_range
        beta = last + (first - last) / 2 * (1 + math.cos(math.pi * (curr_iter - warm) / (self.max_iter - warm)))
        return (1 - (2 * rectified_sigmoid(V) - 1).abs() ** beta).sum() * self.reg_param

    def reconstruction_loss(self, soft_quantized_output: Tensor, original_output: Tensor) -> Tensor:
        """The mean squared error of a layer's output."""
        return F.mse_loss(soft_quantized_output, original_output)

    def forward(
        self, soft_quantized_output: Tensor, original_output: Tensor, V: Tensor, curr_iter: int
    ) -> tuple[Tensor, Tensor]:
        """The term of the choices, and that of the output."""
        choices = self.rounding_regularization(V, curr_iter)
        return choices, self.reconstruction_loss(soft_quantized_output, original_output)
