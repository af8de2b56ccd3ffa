"""The operations on rows, as torch operators and as the functions that codecs call.

`torch.ops.narrowcast.encode`, `encode_searched`, `decode`, `decode_sum` and `decode_sum_encode` return new tensors; the
ones with a trailing underscore write into `out`. The functions of the same names below take the arguments of the
operation (operations.py). They call the kernel directly where nobody watches, and the operator elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, cast

import torch
from torch import Tensor

from narrowcast.kernels import operations
from narrowcast.kernels.arguments import Result
from narrowcast.kernels.operations import Operation
from narrowcast.kernels.operators.declare import declare, schema_of
from narrowcast.kernels.operators.dispatch import kernel_for, unwatched

P = ParamSpec("P")


def returning(operation: Operation[P]) -> Callable[P, Tensor]:
    """Declare the operator that returns a new tensor; returns the function that codecs call."""
    schema = schema_of(operation.meaning)
    check = cast("Callable[..., Result]", operation.check)
    name, sizes = f"_{operation.name}", 2 if operation.sized_by_out else 0

    def run(first: Tensor, *rest: Any) -> Tensor:
        device = first.device
        kernel = kernel_for(device.type)
        shape, dtype = check(first, *rest)
        out = torch.empty(shape, dtype=dtype, device=device)  # as it should be: only what is read is checked
        kernel.fresh(out)
        getattr(kernel, name)(out, first, *rest[sizes:])
        return out

    def fake(*values: Any) -> Tensor:
        shape, dtype = check(*values)
        return torch.empty(shape, dtype=dtype, device=values[0].device)

    declare(operation.name, schema, run, fake)
    operator = getattr(torch.ops.narrowcast, operation.name)

    def call(first: Tensor, *rest: Any) -> Tensor:
        if unwatched(first):
            return run(first, *rest)
        return operator(*schema.spread((first, *rest)))  # type: ignore[no-any-return]

    return cast("Callable[P, Tensor]", call)


def _writing(operation: Operation[Any]) -> Callable[..., None]:
    """Declare the operator that writes into `out`; returns the function that codecs call."""
    allocating = schema_of(operation.meaning)
    arguments = ("Tensor(a!) out", *operation.without_sizes(allocating.arguments))
    place = None if allocating.recipe is None else allocating.recipe + (-1 if operation.sized_by_out else 1)
    schema = allocating._replace(arguments=arguments, recipe=place, result="()")
    name = operation.name

    def run(out: Tensor, *values: Any) -> None:
        getattr(kernel_for(values[0].device.type), name)(out, *values)

    declare(f"{name}_", schema, run, lambda *values: None)
    operator = getattr(torch.ops.narrowcast, f"{name}_")

    def call(out: Tensor, *values: Any) -> None:
        if unwatched(values[0]):
            getattr(kernel_for(values[0].device.type), name)(out, *values)
        else:
            operator(*schema.spread((out, *values)))

    return call


def writing(operation: Operation[P]) -> Callable[Concatenate[Tensor, P], None]:
    """The form with `out`, which stands before the operation's arguments."""
    return _writing(operation)


def writing_sized(
    operation: Operation[Concatenate[Tensor, int, torch.dtype, P]],
) -> Callable[Concatenate[Tensor, Tensor, P], None]:
    """The same, where `numel` and `dtype` are those of `out`."""
    return _writing(operation)


encode = returning(operations.ENCODE)
encode_ = writing(operations.ENCODE)
encode_searched = returning(operations.ENCODE_SEARCHED)
encode_searched_ = writing(operations.ENCODE_SEARCHED)
decode = returning(operations.DECODE)
decode_ = writing_sized(operations.DECODE)
decode_sum = returning(operations.DECODE_SUM)
decode_sum_ = writing_sized(operations.DECODE_SUM)
decode_sum_encode = returning(operations.DECODE_SUM_ENCODE)
decode_sum_encode_ = writing(operations.DECODE_SUM_ENCODE)
