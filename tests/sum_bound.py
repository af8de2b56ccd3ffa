"""How far a GPU's product with encoded weights may lie from the exact one."""

from __future__ import annotations

import torch
from torch import Tensor


def bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact result in fp64, and how far off a kernel may be.

    - A sum of k + 1 terms in fp32, in any order, is off by at most k * 2**-24 of the sum of magnitudes to first order;
      twice that, since tensor cores cut where others round, and with one for the product of sum and scale.
    - Where x is fp16 or bf16, weights may be rounded once to its dtype: half an eps of the sum of magnitudes.
    - The result is rounded once: half an eps of itself, or the smallest number where it is denormal.
    """
    exact, size = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    info = torch.finfo(x.dtype)
    rounding = size * info.eps / 2 if x.dtype != torch.float32 else 0.0
    return exact, size * (x.shape[1] + 2) * 2.0**-23 + rounding + exact.abs() * info.eps / 2 + info.tiny
