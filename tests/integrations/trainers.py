"""What the tests of trainers ask: the weights of a model, whether two are the same, and what a call raises."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
