"""`torch.distributed.algorithms._quantization.quantization`: a collective that travels in fewer bits.

    all_gather = auto_quantize(dist.all_gather, DQuantType.FP16)
    all_gather(tensor_list, tensor, group=group)          # called as dist.all_gather is

`auto_quantize` finds the collective of `narrowcast.distributed` that stands for a function of torch.distributed, and
gives it a codec; nothing is quantized here. Results are written into the caller's tensors, in their own dtype. What a
rank sends to itself alone, and everything in a group of one rank, stays exact.

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
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from narrowcast import distributed as ncd
from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed.entry import uncompiled
from narrowcast.distributed.transport.work import StreamWork
from narrowcast.errors import DtypeError, SpecError

TORCH_HALF_MIN = torch.finfo(torch.float16).min
TORCH_HALF_MAX = torch.finfo(torch.float16).max


class DQuantType(Enum):
    """The two formats that PyTorch's `auto_quantize` knows. `DQuantType("fp16")` and `str()` are inverses."""

    FP16 = "fp16"
    BFP16 = "bfp16"

    def __str__(self) -> str:
        return self.value


Collective = Callable[..., Any]
QType = DQuantType | str | Codec | Mapping[str, Any]

_CODECS = {DQuantType.FP16: "fp16", DQuantType.BFP16: "bf16"}
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
    codec, loss = _codec(qtype), _loss(quant_loss)
    signature = inspect.signature(func)
    out_of_place = ours in _functional()

    @functools.wraps(func)
    @uncompiled
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = _bind(signature, name, args, kwargs)

        def make() -> Any:  # torch and this library agree on the order of arguments, and not on all of their names
            return ours(*call.args, **{**call.kwargs, "codec": codec})

        if loss is None:
            return make()
        return make() / loss if out_of_place else _make_and_divide(name, make, call, loss)

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
    raise SpecError(
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


# -- quant_loss --------------------------------------------------------------------------------------------------------


def _make_and_divide(
    name: str, make: Callable[[], Any], call: inspect.BoundArguments, loss: float | Tensor
) -> ncd.Work | int | None:
    """A collective whose results are divided by `loss`. Those are in its first argument."""
    first = call.args[0]
    results = list(first) if isinstance(first, Sequence) else [first]
    done = make()
    if name in ("send", "isend"):
        return done  # type: ignore[no-any-return]
    if name == "irecv" or call.arguments.get("async_op"):
        return None if done is None else _divided(name, done, results, loss)
    if _takes_part(call.arguments["group"]):
        _divide(results, loss)
    return done  # type: ignore[no-any-return]


def _takes_part(group: dist.ProcessGroup | DeviceMesh | None) -> bool:
    """Whether this rank is in the group: elsewhere a collective does nothing."""
    return group.get_coordinate() is not None if isinstance(group, DeviceMesh) else dist.get_rank(group) != -1


def _divided(name: str, work: ncd.Work, results: list[Tensor], loss: float | Tensor) -> ncd.Work:
    """A `Work` that is done once the results of `work` have been divided: on the thread or stream that finished it."""

    def job() -> list[Tensor]:
        work.result()  # it is done: this raises what went wrong, and waits for nothing but a stream
        _divide(results, loss)
        return results

    then: ncd.Work
    if isinstance(work, StreamWork):
        then = StreamWork(name, job, torch.cuda.Stream(results[0].device), results)  # type: ignore[no-untyped-call]
    else:
        then = ncd.Work(name, job)
    work.get_future().add_done_callback(lambda done: then.run())
    return then


def _divide(tensors: Sequence[Tensor], loss: float | Tensor) -> None:
    for tensor in tensors:
        tensor.detach().div_(loss)


def _loss(value: object) -> float | Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value == 0:
        raise SpecError(
            f"quant_loss={value!r}: results are divided by it, so it is a finite number other than 0, or None. "
            "Pass 1.02 where they come out 2% too large."
        )
    return float(value)


# -- PyTorch's own conversions -----------------------------------------------------------------------------------------


def _fp32_to_fp16_with_clamp(tensor: Tensor) -> Tensor:
    """`tensor` as float16: finite values saturate at TORCH_HALF_MIN and TORCH_HALF_MAX, others stay what they are."""
    return _half_bits(tensor, "fp16")


def _quantize_tensor(tensor: Tensor, qtype: QType) -> Tensor:
    """`tensor` in 16 bits, in its own shape: float16, for BFP16 as the bits of bfloat16 under that dtype."""
    return _half_bits(tensor, _CODECS[_half_type(qtype)])


def _quantize_tensor_list(tensor_list: Sequence[Tensor], qtype: QType) -> list[Tensor]:
    return [_quantize_tensor(tensor, qtype) for tensor in _listed(tensor_list)]


def _dequantize_tensor(tensor: Tensor, qtype: QType, quant_loss: float | Tensor | None = None) -> Tensor:
    """What `_quantize_tensor` was given, in float32, divided by `quant_loss`."""
    kind, loss = _half_type(qtype), _loss(quant_loss)
    checks.float_rows(tensor, "tensor")
    if tensor.dtype != torch.float16:
        raise DtypeError(f"tensor: expected float16, got {tensor.dtype}. Pass what _quantize_tensor returned.")
    value = (tensor if kind is DQuantType.FP16 else tensor.view(torch.bfloat16)).float()
    return value if loss is None else value / loss


def _dequantize_tensor_list(
    tensor_list: Sequence[Tensor], qtype: QType, quant_loss: float | Tensor | None = None
) -> list[Tensor]:
    return [_dequantize_tensor(tensor, qtype, quant_loss) for tensor in _listed(tensor_list)]


def _half_bits(tensor: Tensor, name: str) -> Tensor:
    checks.float_rows(tensor, "tensor")
    data = as_codec(name).encode(tensor.reshape(1, -1))[0]  # codes, then padding
    return data[: 2 * tensor.numel()].view(torch.float16).view(tensor.shape)


def _listed(tensor_list: Sequence[Tensor]) -> Sequence[Tensor]:
    if not isinstance(tensor_list, (list, tuple)):
        raise DtypeError(f"tensor_list: expected a list of tensors, got {type(tensor_list).__name__}.")
    for index, tensor in enumerate(tensor_list):
        checks.float_rows(tensor, f"tensor_list[{index}]")
    return tensor_list


# -- qtype -------------------------------------------------------------------------------------------------------------


def _half_type(qtype: QType) -> DQuantType:
    kind = _as_type(qtype)
    if kind is None:
        raise SpecError(
            f"qtype={qtype!s}: these functions give 16 bits an element, for DQuantType.FP16 and DQuantType.BFP16. For "
            "other codecs there are narrowcast.encode(x, codec) and narrowcast.decode(payload)."
        )
    return kind


def _codec(qtype: QType) -> Codec:
    kind = _as_type(qtype)
    try:
        return as_codec(qtype if kind is None else _CODECS[kind])  # type: ignore[arg-type]  # refused there
    except SpecError as error:
        raise SpecError(f"qtype: expected DQuantType.FP16, DQuantType.BFP16, or a codec. {error}") from error


def _as_type(qtype: object) -> DQuantType | None:
    """The `DQuantType` that is meant, PyTorch's own members included; None where it is none."""
    name = qtype.name if isinstance(qtype, Enum) else qtype.upper() if isinstance(qtype, str) else ""
    return DQuantType.__members__.get(name)
