"""What a machine provides, and the reference behind the same interface.

A kernel subclasses `Kernel` and implements each operation as a method with an underscore: `_encode(out, rows, recipe,
seed)` and so on, with what is written first. These methods trust their arguments. Callers use the ones without an
underscore, which check first (arguments.py).

`_linear` returns whether it takes the call: a kernel may leave a format or a batch to others. The operands of fake
quantization are contiguous [outer, channels, inner] with fp32 scales [channels], and hold at least one element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, cast

import torch
from torch import Tensor

from narrowcast.kernels import arguments, moments, operations, reference
from narrowcast.kernels.arguments import Result
from narrowcast.kernels.layout import Grid, Recipe
from narrowcast.kernels.moments import Step
from narrowcast.kernels.operations import Operation

P = ParamSpec("P")
Method = Callable[Concatenate["Kernel", Tensor, P], bool | None]


def checked(operation: Operation[P]) -> Method[P]:
    """The method that checks an operation's arguments and runs it."""
    name, check = f"_{operation.name}", cast("Callable[..., Result]", operation.check)

    def method(self: Kernel, out: Tensor, *values: Any) -> bool | None:
        arguments.out(out, check(*values), values[0].device)
        return getattr(self, name)(out, *values)  # type: ignore[no-any-return]

    return cast("Method[P]", method)


def checked_by_out(operation: Operation[Concatenate[Tensor, int, torch.dtype, P]]) -> Method[Concatenate[Tensor, P]]:
    """The same, where `numel` and `dtype` are those of `out`."""
    name, check = f"_{operation.name}", cast("Callable[..., Result]", operation.check)

    def method(self: Kernel, out: Tensor, data: Tensor, *values: Any) -> bool | None:
        shape = out.shape
        arguments.out(out, check(data, shape[-1] if shape else 1, out.dtype, *values), data.device)
        return getattr(self, name)(out, data, *values)  # type: ignore[no-any-return]

    return cast("Method[Concatenate[Tensor, P]]", method)


class Kernel:
    """The operations on one kind of machine, writing into `out`."""

    name: str

    encode = checked(operations.ENCODE)
    encode_searched = checked(operations.ENCODE_SEARCHED)
    decode = checked_by_out(operations.DECODE)
    decode_sum = checked_by_out(operations.DECODE_SUM)
    decode_sum_encode = checked(operations.DECODE_SUM_ENCODE)
    linear = checked(operations.LINEAR)
    integer_linear = checked(operations.INTEGER_LINEAR)
    integer_conv = checked(operations.INTEGER_CONV)
    fake_quantize = checked(operations.FAKE_QUANTIZE)

    _fake_quantize_backward: Callable[..., None]
    _adamw: Callable[..., None]

    def fake_quantize_backward(
        self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid
    ) -> None:
        """Writes the gradients of x and of the scale."""
        arguments.out(dx, arguments.fake_quantize_backward(grad, x, scale, grid), x.device, "dx")
        arguments.out(dscale, (scale.shape, torch.float32), x.device, "dscale")
        self._fake_quantize_backward(dx, dscale, grad, x, scale, grid)

    def adamw(
        self,
        parameter: Tensor,
        first: Tensor,
        second: Tensor,
        grad: Tensor,
        recipe: Recipe,
        seed: int,
        takes_momentum: bool,
        step: Step,
    ) -> None:
        """One step of AdamW, in place: the parameter and the rows of its moments (moments.py)."""
        moments.adamw(parameter, first, second, grad, recipe, seed, takes_momentum, step)
        self._adamw(parameter, first, second, grad, recipe, seed, takes_momentum, step)

    def round_columns(
        self,
        weight: Tensor,
        factor: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        blocks: Tensor,
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor]:
        """Codes and errors of columns, rounded in order (reference/columns.py)."""
        return reference.round_columns(weight, factor, scales, zeros, blocks, recipe)

    def choose_columns(
        self,
        values: Tensor,
        slope: Tensor,
        moments: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        blocks: Tensor,
        recipe: Recipe,
    ) -> tuple[Tensor, Tensor]:
        """Codes and changes of columns, each chosen given all others (reference/columns.py)."""
        return reference.choose_columns(values, slope, moments, scales, zeros, blocks, recipe)

    def fresh(self, out: Tensor) -> None:
        """A hint: `out` is new memory, about to be written whole."""

    def runs(self, operation: str, recipe: Recipe, device: torch.device) -> str:
        """The name of what runs an operation of a codec, which need not be the same for all of them."""
        return self.name


class Reference(Kernel):
    """Plain torch, on any device."""

    name = "reference"

    def _fake_quantize_backward(
        self, dx: Tensor, dscale: Tensor, grad: Tensor, x: Tensor, scale: Tensor, grid: Grid
    ) -> None:
        of_x, of_scale = reference.fake_quantize_backward(grad, x, scale, grid)
        dx.copy_(of_x)
        dscale.copy_(of_scale)

    def _adamw(self, parameter: Tensor, first: Tensor, second: Tensor, grad: Tensor, *rest: Any) -> None:
        results = reference.adamw(parameter, first, second, grad, *rest)
        for tensor, result in zip((parameter, first, second), results, strict=True):
            tensor.copy_(result)


def _written(operation: Operation[Any]) -> Callable[..., bool]:
    """The method that copies what an operation means into `out`."""

    def method(self: Reference, out: Tensor, *values: Any) -> bool:
        out.copy_(operation.meaning(*operation.with_sizes(out, values)))
        return True

    return method


for _operation in operations.OPERATIONS:
    setattr(Reference, f"_{_operation.name}", _written(_operation))
