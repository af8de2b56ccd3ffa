"""The operations as torch operators, and the choice of the kernel that runs them.

`torch.ops.narrowcast.encode`, `decode`, `decode_sum` and `reduce` return new tensors; the ones with a trailing
underscore write into `out`. A `Recipe` travels as plain numbers and one tensor, so that torch.compile, torch.export
and the profiler see ordinary operators. The functions of the same names below are what codecs call: they take the short
way round the dispatcher where nobody is watching. Arguments are checked by the kernel (contract.py).

On the CPU the native core runs, on CUDA Triton. Where one is missing the reference runs instead, and the first
call says so in a `KernelWarning`. `NARROWCAST_KERNEL` in the environment ("reference", "native/avx2", ...) asks
for one kernel by name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from narrowcast.errors import KernelWarning
from narrowcast.kernels.contract import Kernel as Kernel
from narrowcast.kernels.contract import Reference as Reference
from narrowcast.kernels.declare import Operator, declare
from narrowcast.kernels.layout import Format, Recipe, layout


@cache
def kernel_for(device_type: str) -> Kernel:
    """The kernel that runs on this kind of device, loaded on first use."""
    wanted = os.environ.get("NARROWCAST_KERNEL", "")
    if wanted == "reference":
        return Reference()
    kernel: Kernel | None = None
    why = f"it has no kernel for {device_type!r} devices"
    if device_type == "cpu":
        from narrowcast.kernels.cpu import binding

        kernel, why = binding.load(wanted.removeprefix("native/"))
    elif device_type == "cuda":
        from narrowcast.kernels import triton

        kernel, why = triton.load()
    if kernel is not None:
        return kernel
    warnings.warn(
        f"narrowcast runs its plain-torch reference on {device_type}, right but slow: {why}",
        KernelWarning,
        stacklevel=3,
    )
    return Reference()


# -- implementations: the operators that write into `out` call the kernel, the others allocate first --------------


def _encode_(out: Tensor, rows: Tensor, format: Sequence[int], peak: float, table: Tensor | None, seed: int) -> None:
    kernel_for(rows.device.type).encode(out, rows, Recipe(Format(*format), peak, table), seed)


def _decode_(out: Tensor, data: Tensor, format: Sequence[int], peak: float, table: Tensor | None) -> None:
    kernel_for(data.device.type).decode(out, data, Recipe(Format(*format), peak, table))


def _decode_sum_(
    out: Tensor,
    data: Tensor,
    format: Sequence[int],
    peak: float,
    table: Tensor | None,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
) -> None:
    recipe = Recipe(Format(*format), peak, table)
    kernel_for(data.device.type).decode_sum(out, data, recipe, own, own_rank, divisor)


def _reduce_(
    out: Tensor,
    data: Tensor,
    numel: int,
    format: Sequence[int],
    peak: float,
    table: Tensor | None,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
    seed: int,
) -> None:
    recipe = Recipe(Format(*format), peak, table)
    kernel_for(data.device.type).reduce(out, data, numel, recipe, own, own_rank, divisor, seed)


def _encode_shape(rows: Tensor, format: Sequence[int], *rest: object) -> Tensor:
    count, numel = rows.shape
    row_bytes = layout(format if isinstance(format, Format) else Format(*format), numel).row_bytes
    return torch.empty((count, row_bytes), dtype=torch.uint8, device=rows.device)


def _decode_shape(data: Tensor, numel: int, dtype: torch.dtype, *rest: object) -> Tensor:
    return torch.empty((data.shape[0], numel), dtype=dtype, device=data.device)


def _decode_sum_shape(data: Tensor, numel: int, dtype: torch.dtype, *rest: object) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=data.device)


def _reduce_shape(data: Tensor, *rest: object) -> Tensor:
    return torch.empty(data.shape[1], dtype=torch.uint8, device=data.device)


def _encode(rows: Tensor, *arguments: object) -> Tensor:
    out = _encode_shape(rows, *arguments)  # type: ignore[arg-type]
    _encode_(out, rows, *arguments)  # type: ignore[arg-type]
    return out


def _decode(data: Tensor, numel: int, dtype: torch.dtype, *arguments: object) -> Tensor:
    out = _decode_shape(data, numel, dtype)
    _decode_(out, data, *arguments)  # type: ignore[arg-type]
    return out


def _decode_sum(data: Tensor, numel: int, dtype: torch.dtype, *arguments: object) -> Tensor:
    out = _decode_sum_shape(data, numel, dtype)
    _decode_sum_(out, data, *arguments)  # type: ignore[arg-type]
    return out


def _reduce(data: Tensor, *arguments: object) -> Tensor:
    out = _reduce_shape(data)
    _reduce_(out, data, *arguments)  # type: ignore[arg-type]
    return out


def _writes_out(*arguments: object) -> None:
    return None


# -- declarations ---------------------------------------------------------------------------------------------------

RECIPE = "int[] format, float peak, Tensor? table"
_SUM = "Tensor? own, int own_rank, int divisor"
OPERATORS: list[Operator] = [
    ("encode", f"(Tensor rows, {RECIPE}, int seed) -> Tensor", _encode, _encode_shape),
    ("encode_", f"(Tensor(a!) out, Tensor rows, {RECIPE}, int seed) -> ()", _encode_, _writes_out),
    ("decode", f"(Tensor data, SymInt numel, ScalarType dtype, {RECIPE}) -> Tensor", _decode, _decode_shape),
    ("decode_", f"(Tensor(a!) out, Tensor data, {RECIPE}) -> ()", _decode_, _writes_out),
    (
        "decode_sum",
        f"(Tensor data, SymInt numel, ScalarType dtype, {RECIPE}, {_SUM}) -> Tensor",
        _decode_sum,
        _decode_sum_shape,
    ),
    ("decode_sum_", f"(Tensor(a!) out, Tensor data, {RECIPE}, {_SUM}) -> ()", _decode_sum_, _writes_out),
    ("reduce", f"(Tensor data, SymInt numel, {RECIPE}, {_SUM}, int seed) -> Tensor", _reduce, _reduce_shape),
    (
        "reduce_",
        f"(Tensor(a!) out, Tensor data, SymInt numel, {RECIPE}, {_SUM}, int seed) -> ()",
        _reduce_,
        _writes_out,
    ),
]
declare(OPERATORS)

# -- the front: what codecs call -------------------------------------------------------------------------------------


def encode(rows: Tensor, recipe: Recipe, seed: int) -> Tensor:
    if unwatched(rows):
        return kernel_for(rows.device.type).new_encoded(rows, recipe, seed)
    return torch.ops.narrowcast.encode(rows, *recipe, seed)  # type: ignore[no-any-return]


def encode_(out: Tensor, rows: Tensor, recipe: Recipe, seed: int) -> None:
    if unwatched(rows):
        kernel_for(rows.device.type).encode(out, rows, recipe, seed)
    else:
        torch.ops.narrowcast.encode_(out, rows, *recipe, seed)


def decode(data: Tensor, numel: int, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    if unwatched(data):
        return kernel_for(data.device.type).new_decoded(data, numel, dtype, recipe)
    return torch.ops.narrowcast.decode(data, numel, dtype, *recipe)  # type: ignore[no-any-return]


def decode_(out: Tensor, data: Tensor, recipe: Recipe) -> None:
    if unwatched(data):
        kernel_for(data.device.type).decode(out, data, recipe)
    else:
        torch.ops.narrowcast.decode_(out, data, *recipe)


def decode_sum(
    data: Tensor,
    numel: int,
    dtype: torch.dtype,
    recipe: Recipe,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
) -> Tensor:
    return torch.ops.narrowcast.decode_sum(  # type: ignore[no-any-return]
        data, numel, dtype, *recipe, own, own_rank, divisor
    )


def decode_sum_(out: Tensor, data: Tensor, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int) -> None:
    if unwatched(data):
        kernel_for(data.device.type).decode_sum(out, data, recipe, own, own_rank, divisor)
    else:
        torch.ops.narrowcast.decode_sum_(out, data, *recipe, own, own_rank, divisor)


def reduce(
    data: Tensor, numel: int, recipe: Recipe, own: Tensor | None, own_rank: int, divisor: int, seed: int
) -> Tensor:
    return torch.ops.narrowcast.reduce(  # type: ignore[no-any-return]
        data, numel, *recipe, own, own_rank, divisor, seed
    )


def reduce_(
    out: Tensor,
    data: Tensor,
    numel: int,
    recipe: Recipe,
    own: Tensor | None,
    own_rank: int,
    divisor: int,
    seed: int,
) -> None:
    if unwatched(data):
        kernel_for(data.device.type).reduce(out, data, numel, recipe, own, own_rank, divisor, seed)
    else:
        torch.ops.narrowcast.reduce_(out, data, numel, *recipe, own, own_rank, divisor, seed)


def unwatched(tensor: Tensor) -> bool:
    """Whether a plain call would do: no compiler, profiler, mode or transform that wants to see an operator, and memory
    that holds what the tensor shows, which the dispatcher sees to where it is a negated view.

    A Python operator costs several microseconds a call, and encoding a thousand floats is to take under 15.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and not torch._C._autograd._profiler_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and tensor.device.type != "meta"
        and not tensor.is_neg()
    )


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work here. Compilers trace their own."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
