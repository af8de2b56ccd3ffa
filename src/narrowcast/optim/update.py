"""AdamW's update where the two moments have not been updated equally often.

torch's AdamW has one number, `step`, for the bias corrections of both moments. After a step that took a momentum, the
second moment is a step behind. From then on the state of the parameter has a second number, `exp_avg_sq_steps`: how
often the second moment has been updated. It corrects the second moment; `step` corrects the first.

The operations are those of torch's `foreach` AdamW, in its order. They are elementwise, so equal inputs give equal bits
on every rank. Where `step` is on the CPU, corrections are Python floats; elsewhere they are tensors, and nothing waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

COUNT = "exp_avg_sq_steps"
"""The key of a parameter's state for the number of updates of its second moment; absent while that is `step`."""


class Alike(NamedTuple):
    """Parameters of one dtype, device and group, with their gradients and states: of complex ones pairs of
    reals, of sharded ones the shard."""

    parameters: list[Tensor]
    grads: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    largest: list[Tensor]
    """With amsgrad, the largest second moments; else none."""
    steps: list[Tensor]
    counts: list[Tensor]
    divisors: list[Tensor]
    """What first moments are divided by, where it is known already; else none."""


def sort_alike(
    parameters: Iterable[Tensor], states: Any, divisor_of: Callable[[Tensor], Tensor] | None = None
) -> list[Alike]:
    """Sort parameters that have gradients by dtype and by the devices of parameter and `step`."""
    sorted_: dict[object, Alike] = {}
    for parameter in parameters:
        state = states[parameter]
        known = divisor_of is not None and not parameter.is_complex() and not isinstance(parameter, DTensor)
        key = (parameter.dtype, parameter.device, state["step"].device, known)
        lists = sorted_.setdefault(key, Alike([], [], [], [], [], [], [], []))
        assert parameter.grad is not None
        lists.parameters.append(_real(parameter))
        lists.grads.append(_real(parameter.grad))
        lists.first.append(_real(state["exp_avg"]))
        lists.second.append(_real(state["exp_avg_sq"]))
        if "max_exp_avg_sq" in state:
            lists.largest.append(_real(state["max_exp_avg_sq"]))
        lists.steps.append(state["step"])
        lists.counts.append(state[COUNT])
        if divisor_of is not None and known:
            lists.divisors.append(divisor_of(parameter))
    return list(sorted_.values())


def update(group: dict[str, Any], tensors: Alike, *, takes_momentum: bool, grad_scale: Tensor | None) -> None:
    """One step. With `takes_momentum`, `grads` are the new first moments and the second moments stay as they are."""
    parameters, grads, first, second, largest, steps, counts, divisors = tensors
    beta1, beta2 = (float(beta) for beta in group["betas"])
    on_cpu = steps[0].device.type == "cpu"
    lr = float(group["lr"]) if on_cpu else group["lr"]
    if grad_scale is not None:
        torch._foreach_div_(grads, grad_scale.to(grads[0].device))
    if group["maximize"]:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_add_(steps, 1)
    if group["weight_decay"] != 0:
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
    if takes_momentum:
        torch._foreach_copy_(first, grads)
    else:
        torch._foreach_add_(counts, 1)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        if group["amsgrad"]:
            torch._foreach_maximum_(largest, second)
    if not divisors:
        divisors = list(torch._foreach_sqrt(largest if group["amsgrad"] else second))
        roots: list[Any] = [
            (1 - beta2 ** float(count)) ** 0.5 if on_cpu else (1 - beta2**count).sqrt() for count in counts
        ]
        torch._foreach_div_(divisors, roots)
        torch._foreach_add_(divisors, group["eps"])
    if on_cpu:
        sizes = [-(lr / (1 - beta1 ** float(step))) for step in steps]
        torch._foreach_addcdiv_(parameters, first, divisors, sizes)
    else:
        divisors = list(torch._foreach_div(divisors, [-(lr / (1 - beta1**step)) for step in steps]))
        torch._foreach_addcdiv_(parameters, first, divisors)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: of a DTensor its shard, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _real(tensor: Tensor) -> Tensor:
    here = local(tensor)
    return torch.view_as_real(here) if here.is_complex() else here
