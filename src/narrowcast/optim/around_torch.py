"""What torch does around the step of an optimizer of its own, for one that calls it from a step of its own.

`of_torch(step)` is torch's step without the hooks that torch wraps around it; `unscale` what a GradScaler does for an
optimizer that does not take its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

outside_graphs: Callable[[Callable[..., Any]], Callable[..., Any]] = _disable_dynamo
"""torch.compiler.disable, but for this: it does not load the compiler before it is called."""


def of_torch(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step as it was written: the first optimizer of a class wraps it to call hooks, which run around ours."""
    while getattr(step, "hooked", False):
        step = cast("Any", step).__wrapped__
    return step


def unscale(parameters: Iterable[Tensor], scale: Tensor) -> None:
    """Divide gradients by the scale of the loss, with the bits of GradScaler.unscale_."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            alike.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter.grad)
    for (device, _), grads in alike.items():
        torch._foreach_mul_(grads, scale.double().reciprocal().float().to(device))
