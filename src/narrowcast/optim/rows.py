"""Moments of AdamW held in rows: which parameters have them, how they lie in a state, and one step on them.

A parameter of shape [n, ...] has n rows for each moment: row i holds the moments of parameter[i], flattened. The state
is plain uint8 [n, row_bytes]:

    exp_avg_rows      the first moment, in the codec that `state=` names
    exp_avg_sq_rows   the second moment, in the format of kernels/moments.py
    step              on the CPU, as torch keeps it

Rows follow the parameter's first dimension, and so does FSDP2. For a DTensor the rows are a DTensor of uint8 with the
parameter's placements: each rank holds the rows of its shard, torch.distributed.checkpoint saves and reshards them as
any other tensor, and no block crosses a shard. A parameter that is sharded along another dimension is refused.

Small parameters keep moments in floats: see `why_in_floats`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard

from narrowcast.codecs import Codec, codec
from narrowcast.codecs.levels import Levels
from narrowcast.errors import OptimizerError, SpecError
from narrowcast.kernels import operators, reference
from narrowcast.kernels.layout import layout
from narrowcast.kernels.moments import MOST_BLOCK, second_format, second_recipe, step_of
from narrowcast.kernels.operators.adamw import adamw_
from narrowcast.optim.update import COUNT
from narrowcast.optim.update import local as _local

FIRST, SECOND = "exp_avg_rows", "exp_avg_sq_rows"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_NUMEL = 4096
LEAST_ROW = 64
"""Below these a parameter keeps its moments in floats: there is little to save, and rows have 16 bytes at least."""
LEAST_BITS = 4


@lru_cache(maxsize=64)
def first_codec(spec: str) -> Codec:
    """The codec of the first moment that a spec names; refused with the reason if it cannot hold one."""
    chosen = codec(spec)
    if chosen.block == "row" or (chosen.format.block or 0) > MOST_BLOCK:
        raise SpecError(
            f"state={chosen.spec!r}: moments are held in blocks of up to {MOST_BLOCK} elements, and this codec has one "
            f"scale for {chosen.block if chosen.block != 'row' else 'a whole row'}. Pass state={chosen.name!r}."
        )
    if chosen.bits < LEAST_BITS:
        raise SpecError(
            f"state={chosen.spec!r}: a first moment needs {LEAST_BITS} bits or more, and this codec has {chosen.bits}. "
            "Pass state='int4', or 'int8'."
        )
    if isinstance(chosen, Levels):
        levels = chosen.levels.tolist()
        if min(levels) >= 0 or max(levels) <= 0 or 0.0 not in levels:
            raise SpecError(
                f"state={chosen.spec!r}: a first moment is negative, zero or positive, and this table has no level for "
                "one of them. Pass state='int8'."
            )
    return chosen


def check_group(group: dict[str, Any]) -> None:
    """Refuse what moments in rows cannot do, and write the codec's spec in its one way."""
    group["state"] = first_codec(codec(group["state"]).spec).spec
    for option, why in (
        ("amsgrad", "has a third moment"),
        ("capturable", "would keep the numbers of one step in a graph"),
        ("differentiable", "would differentiate through rounding"),
    ):
        if group.get(option):
            raise SpecError(
                f"state={group['state']!r} with {option}=True: {option} {why}, which moments in rows do not support. "
                f"Pass {option}=False, or state=None."
            )
    for parameter in group["params"]:
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        if why_in_floats(parameter) is None and any(
            not (each.is_replicate() or (isinstance(each, Shard) and each.dim == 0)) for each in placements
        ):
            raise OptimizerError(
                f"state={group['state']!r}: a parameter of shape {tuple(parameter.shape)} is sharded as {placements}. "
                "Rows follow the first dimension: they take Shard(0), as fully_shard makes it, and Replicate(). Give "
                "this parameter a group of its own with 'state': None."
            )


def why_in_floats(parameter: Tensor) -> str | None:
    """Why a parameter keeps its moments in floats; None where they are held in rows."""
    shape = parameter.shape
    if parameter.dtype not in DTYPES:
        return f"its dtype is {parameter.dtype}"
    if len(shape) < 2:
        return "it has fewer than two dimensions"
    if parameter.numel() < LEAST_NUMEL:
        return f"it has fewer than {LEAST_NUMEL} elements"
    if math.prod(shape[1:]) < LEAST_ROW:
        return f"its rows have fewer than {LEAST_ROW} elements"
    return None


def new_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter before its first step."""
    first, matrix = first_codec(group["state"]), _matrix(parameter)
    zeros = torch.zeros(1, matrix.shape[1], dtype=torch.float32, device=matrix.device)
    rows = first.encode(zeros, seed=0), reference.encode_second(zeros, second_format(first.format), 0)
    held = [each.expand(matrix.shape[0], -1).clone(memory_format=torch.contiguous_format) for each in rows]
    return {
        "step": torch.zeros((), dtype=torch.float32, device="cpu"),
        FIRST: _as_held(held[0], parameter),
        SECOND: _as_held(held[1], parameter),
    }


def update(
    parameter: Tensor, state: dict[str, Any], group: dict[str, Any], *, takes_momentum: bool, grad_scale: Tensor | None
) -> None:
    """One step of one parameter."""
    assert parameter.grad is not None
    if grad_scale is not None:
        parameter.grad.div_(grad_scale.to(parameter.grad.device))
    state["step"] += 1
    if not takes_momentum and COUNT in state:
        state[COUNT] += 1
    steps, second_steps = float(state["step"]), float(state.get(COUNT, state["step"]))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    numbers = step_of(float(group["lr"]), (beta1, beta2), group["eps"], group["weight_decay"], steps, second_steps)
    local, grad = _local(parameter.detach()), _matrix(parameter.grad).contiguous()
    values = _matrix(parameter).contiguous()  # the parameter's own memory where it is contiguous
    recipe = first_codec(group["state"]).recipe(values.device)
    rows = _local(state[FIRST]), _local(state[SECOND])
    adamw_(values, *rows, -grad if group["maximize"] else grad, recipe, int(steps), takes_momentum, numbers)
    if not local.is_contiguous():
        local.copy_(values.view(local.shape))
    increment_version(parameter)  # autograd is to notice a backward pass through what was overwritten


def first_moment(parameter: Tensor, state: dict[str, Any], spec: str) -> Tensor:
    """The first moment, decoded to the parameter's dtype and shape."""
    return _decoded(parameter, state[FIRST], lambda rows, numel: first_codec(spec).decode(rows, numel, parameter.dtype))


def second_moment(parameter: Tensor, state: dict[str, Any], spec: str) -> Tensor:
    """The second moment, likewise."""
    recipe = second_recipe(first_codec(spec).format, _local(parameter).device)
    return _decoded(
        parameter, state[SECOND], lambda rows, numel: operators.decode(rows, numel, parameter.dtype, recipe)
    )


def encoded(parameter: Tensor, first: Tensor, second: Tensor, spec: str) -> dict[str, Tensor]:
    """Moments in floats as rows. The second one is rounded as in step 0."""
    chosen = first_codec(spec)
    rows = reference.encode_second(_matrix(second).float(), second_format(chosen.format), 0)
    return {
        FIRST: _as_held(chosen.encode(_matrix(first).contiguous(), seed=0), parameter),
        SECOND: _as_held(rows, parameter),
    }


def shapes(parameter: Tensor, spec: str) -> dict[str, tuple[int, int]]:
    """The shapes of a parameter's rows."""
    chosen, (rows, numel) = first_codec(spec), (parameter.shape[0], math.prod(parameter.shape[1:]))
    second = layout(second_format(chosen.format), numel).row_bytes
    return {FIRST: (rows, chosen.row_bytes(numel)), SECOND: (rows, second)}


# -- tensors and their shards ------------------------------------------------------------------------------------------


def _matrix(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter or its like, as [rows, numel]."""
    local = _local(tensor.detach())
    return local.reshape(local.shape[0], math.prod(local.shape[1:]))


def _as_held(local: Tensor, parameter: Tensor) -> Tensor:
    """A rank's part of something that is [parameter.shape[0], ...], sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    stride = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=tuple(stride)
    )


def _decoded(parameter: Tensor, rows: Tensor, decode: Any) -> Tensor:
    local = _local(parameter.detach())
    values = decode(_local(rows), math.prod(local.shape[1:]))
    return _as_held(values.view(local.shape), parameter)
