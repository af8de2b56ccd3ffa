"""The dtype that a quantized model shows to libraries which ask its first parameter."""

from __future__ import annotations

import torch
from torch import nn

from narrowcast.nn.modules.base import EMPTY, Encoded, float_dtype_of


def show_dtype(model: nn.Module) -> None:
    """Let the first parameter of a model have the dtype of its floats.

    Many libraries take the dtype of the first parameter for the model's, and cast other modules to it. If that is rows
    of bytes, their module gets an empty float parameter before them. It follows casts and devices as others do.
    """
    for module in model.modules():
        first = next(iter(module._parameters.values()), None)
        if first is not None:
            if isinstance(module, Encoded) and first.dtype == torch.uint8 and EMPTY not in module._parameters:
                empty = torch.empty(0, dtype=float_dtype_of(module), device=first.device)
                module._parameters = {EMPTY: nn.Parameter(empty, requires_grad=False), **module._parameters}
            return
