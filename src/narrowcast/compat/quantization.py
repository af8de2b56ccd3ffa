"""`torch.distributed.algorithms._quantization.quantization`: a collective that travels in fewer bits.

    all_gather = auto_quantize(dist.all_gather, DQuantType.FP16)
    all_gather(tensor_list, tensor, group=group)          # called as dist.all_gather is

`auto_quantize` finds the collective of `narrowcast.distributed` that stands for a function of torch.distributed, and
gives it a codec; nothing is quantized here. Results are written into the caller's tensors, in their own dtype. What a
rank sends to itself alone, and everything in a group of one rank, stays exact. Integers travel as floats, and arrive as
the nearest integers; tensors of several dtypes, an fp32 input for fp16 results, travel as the widest of them.

FP16 saturates finite values at +-65504, and BFP16 is bfloat16: both round half to even, and keep infinities and NaN.
(PyTorch's FP16 makes +-65504 of infinities. Its BFP16 rounds half away from zero, so that exact ties may differ in the
last bit, and overflows the largest floats to infinity.) The functions that begin with an underscore convert in place of
PyTorch's; `auto_quantize` does not need them.

**quant_loss** is the factor by which results are too large: all of them are divided by it, once they have arrived, in
the dtype of the tensor they are in.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from narrowcast import distributed as ncd
from narrowcast.compat.half_precision import (
    TORCH_HALF_MAX,
    TORCH_HALF_MIN,
    DQuantType,
    QType,
    _dequantize_tensor,
    _dequantize_tensor_list,
    _fp32_to_fp16_with_clamp,
    _quantize_tensor,
    _quantize_tensor_list,
    as_floats,
    as_loss,
    codec_of,
)
from narrowcast.distributed.entry import uncompiled
from narrowcast.distributed.transport.work import StreamWork
from narrowcast.errors import DtypeError, NoTensorError, SpecError, UnsupportedError

__all__ = [
    "TORCH_HALF_MAX",
    "TORCH_HALF_MIN",
    "DQuantType",
    "_dequantize_tensor",
    "_dequantize_tensor_list",
    "_fp32_to_fp16_with_clamp",
    "_quantize_tensor",
    "_quantize_tensor_list",
    "auto_quantize",
]

Collective = Callable[..., Any]
_COLLECTIVES = {
    **{name: name for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter")},
    **{name: name for name in ("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast")},
    **{name: name for name in ("send", "recv", "isend", "irecv")},
    # The names that torch 2.13 gives to two of them.
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
_FUNCTIONAL = ("all_gather", "all_reduce", "all_to_all_single", "reduce_scatter")
_OLD_NAMES = {"out_splits": "output_split_sizes", "in_splits": "input_split_sizes"}


def auto_quantize(func: Collective, qtype: QType, quant_loss: float | Tensor | None = None) -> Collective:
    """The collective `func`, with what travels quantized.

    Args:
        func: a collective of torch.distributed that narrowcast has too, one of narrowcast.distributed itself, or one
            of narrowcast.distributed.functional, through which gradients flow.
        qtype: `DQuantType.FP16`, `DQuantType.BFP16`, or any codec: "int8", "int4:block=64", a `Codec`.
        quant_loss: what the results are divided by.

    Returns:
        A function that takes the arguments of `func`, in its order and under its names (and `out_splits` and
        `in_splits`, as PyTorch's does), and returns what it returns: a `Work` where `async_op=True`.
    """
    name, ours = _ours(func)
    codec, loss = codec_of(qtype), as_loss(quant_loss)
    signature = inspect.signature(func)
    out_of_place = ours in _functional()

    @functools.wraps(func)
    @uncompiled
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = _bind(signature, name, args, kwargs)
        pairs = [] if out_of_place else _with_one_dtype(call)

        def make() -> Any:  # torch and this library agree on the order of arguments, and not on all of their names
            try:
                return ours(*call.args, **{**call.kwargs, "codec": codec})
            except DtypeError as error:  # for which PyTorch raises a RuntimeError
                raise NoTensorError(str(error)) from error

        if loss is None and not pairs:
            return make()
        if out_of_place:
            return make() / loss
        return _make_then(name, make, call, functools.partial(_finish, _results(call), pairs, loss))

    return collective


# -- which collective, and how it is called ----------------------------------------------------------------------------


def _ours(func: object) -> tuple[str, Collective]:
    """The collective of this library that stands for `func`, and its name.

    Found by identity: functions of the same name elsewhere (torch.distributed.nn) take other arguments.
    """
    for name, own in _COLLECTIVES.items():
        ours = getattr(ncd, own)
        if func is ours or (hasattr(dist, name) and func is getattr(dist, name)):
            return own, ours
    for ours in _functional():
        if func is ours:
            return ours.__name__, ours
    raise UnsupportedError(
        f"func={getattr(func, '__qualname__', func)!s}: not a collective that can travel quantized. There are: "
        f"{', '.join(name for name in _COLLECTIVES if hasattr(dist, name))} of torch.distributed, the same of "
        f"narrowcast.distributed, and {', '.join(_FUNCTIONAL)} of narrowcast.distributed.functional. Pass the function "
        "itself, as in auto_quantize(dist.all_gather, DQuantType.FP16)."
    )


def _functional() -> list[Collective]:
    return [getattr(ncd.functional, name) for name in _FUNCTIONAL]


def _bind(
    signature: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call, by the names that the wrapped function has for them."""
    if "codec" in kwargs:
        raise SpecError(
            f"codec={kwargs['codec']!r}: {name} travels in the qtype that auto_quantize was given. Drop it."
        )
    named = {_OLD_NAMES.get(key, key) if name == "all_to_all_single" else key: value for key, value in kwargs.items()}
    if len(named) < len(kwargs):
        raise SpecError(
            f"{', '.join(kwargs)}: out_splits is another name of output_split_sizes, in_splits of input_split_sizes. "
            "Pass each once."
        )
    try:
        call = signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None
    call.apply_defaults()
    return call


# -- what follows a collective: other dtypes, and quant_loss -----------------------------------------------------------


def _with_one_dtype(call: inspect.BoundArguments) -> list[tuple[Tensor, Tensor]]:
    """Put floats of one dtype in the place of a call's tensors, where they are integers or differ.

    Returns the results as the caller has them, each with what stands in for it: they are written at the end.
    """
    lists = {name: value for name, value in call.arguments.items() if _holds_tensors(value)}
    tensors = [tensor for value in lists.values() for tensor in ([value] if isinstance(value, Tensor) else value)]
    dtypes = {tensor.dtype for tensor in tensors}
    if not tensors or (len(dtypes) == 1 and tensors[0].is_floating_point()):
        return []
    dtype = functools.reduce(torch.promote_types, (as_floats(tensor, "tensor").dtype for tensor in tensors))
    pairs: list[tuple[Tensor, Tensor]] = []
    for place, (name, value) in enumerate(lists.items()):
        own = [value] if isinstance(value, Tensor) else list(value)
        floats = [tensor.detach().to(dtype) for tensor in own]
        call.arguments[name] = floats[0] if isinstance(value, Tensor) else floats
        if place == 0:
            pairs = list(zip(own, floats, strict=True))
    return pairs


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(each, Tensor) for each in value)
    )


def _results(call: inspect.BoundArguments) -> list[Tensor]:
    """The results of a collective, which are in its first argument."""
    first = call.args[0]
    return list(first) if isinstance(first, Sequence) else [first]


def _make_then(
    name: str, make: Callable[[], Any], call: inspect.BoundArguments, finish: Callable[[], None]
) -> ncd.Work | int | None:
    """A collective, and what is to be done with its results."""
    results, done = _results(call), make()
    if name in ("send", "isend"):
        return done  # type: ignore[no-any-return]
    if name == "irecv" or call.arguments.get("async_op"):
        return None if done is None else _then(name, done, results, finish)
    if _takes_part(call.arguments["group"]):
        finish()
    return done  # type: ignore[no-any-return]


def _takes_part(group: dist.ProcessGroup | DeviceMesh | None) -> bool:
    """Whether this rank is in the group: elsewhere a collective does nothing."""
    return group.get_coordinate() is not None if isinstance(group, DeviceMesh) else dist.get_rank(group) != -1


def _then(name: str, work: ncd.Work, results: list[Tensor], finish: Callable[[], None]) -> ncd.Work:
    """A `Work` that is done once `finish` was called, on the thread or stream that finished `work`."""

    def job() -> list[Tensor]:
        work.result()  # it is done: this raises what went wrong, and waits for nothing but a stream
        finish()
        return results

    then: ncd.Work
    if isinstance(work, StreamWork):
        then = StreamWork(name, job, torch.cuda.Stream(results[0].device), results)  # type: ignore[no-untyped-call]
    else:
        then = ncd.Work(name, job)
    work.get_future().add_done_callback(lambda done: then.run())
    return then


def _finish(results: list[Tensor], pairs: list[tuple[Tensor, Tensor]], loss: float | Tensor | None) -> None:
    """Divide results by the loss, and write those that stand in for others where they belong."""
    for result in results:
        if loss is not None:
            result.detach().div_(loss)
    for own, floats in pairs:
        if not own.is_floating_point():  # the nearest integer there is
            limits = torch.iinfo(own.dtype)
            highest = math.nextafter(float(limits.max), 0.0) if float(limits.max) > limits.max else limits.max
            floats = floats.double().round_().clamp_(limits.min, highest)
        own.detach().copy_(floats)
