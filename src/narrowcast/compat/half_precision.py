"""PyTorch's own conversions to 16 bits, and `DQuantType`: what quantization.py shows under PyTorch's names.

FP16 saturates finite values, and BFP16 is bfloat16, whose bits travel as a float16 tensor. Integers become floats
first, as they do there. What PyTorch refuses with a RuntimeError is refused with one here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.errors import NoTensorError, SpecError, UnsupportedError

TORCH_HALF_MIN = torch.finfo(torch.float16).min
TORCH_HALF_MAX = torch.finfo(torch.float16).max


class DQuantType(Enum):
    """The two formats that PyTorch's `auto_quantize` knows. `DQuantType("fp16")` and `str()` are inverses."""

    FP16 = "fp16"
    BFP16 = "bfp16"

    def __str__(self) -> str:
        return self.value


QType = DQuantType | str | Codec | Mapping[str, Any]

_CODECS = {DQuantType.FP16: "fp16", DQuantType.BFP16: "bf16"}


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
    kind, loss = _half_type(qtype), as_loss(quant_loss)
    _check_half(tensor, "tensor")
    value = (tensor if kind is DQuantType.FP16 else tensor.view(torch.bfloat16)).float()
    return value if loss is None else value / loss


def _dequantize_tensor_list(
    tensor_list: Sequence[Tensor], qtype: QType, quant_loss: float | Tensor | None = None
) -> list[Tensor]:
    for index, tensor in enumerate(_listed(tensor_list)):
        _check_half(tensor, f"tensor_list[{index}]")
    return [_dequantize_tensor(tensor, qtype, quant_loss) for tensor in tensor_list]


def _check_half(tensor: object, name: str) -> None:
    if as_floats(tensor, name).dtype != torch.float16:
        dtype = tensor.dtype if isinstance(tensor, Tensor) else None
        raise NoTensorError(f"{name}: expected float16, got {dtype}. Pass what _quantize_tensor returned.")


def _half_bits(tensor: Tensor, name: str) -> Tensor:
    values = as_floats(tensor, "tensor")
    data = as_codec(name).encode(values.reshape(1, -1))[0]  # codes, then padding
    return data[: 2 * values.numel()].view(torch.float16).view(values.shape)


def as_floats(tensor: object, name: str) -> Tensor:
    """A tensor of floats or integers as floats, detached."""
    if not isinstance(tensor, Tensor):
        raise NoTensorError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}.")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise NoTensorError(
            f"{name}: expected floats or integers, got {tensor.dtype}. Pass {name}.float(), or its parts."
        )
    return tensor.detach() if tensor.is_floating_point() else tensor.float()


def _listed(tensor_list: Sequence[Tensor]) -> Sequence[Tensor]:
    if not isinstance(tensor_list, (list, tuple)):
        raise NoTensorError(f"tensor_list: expected a list of tensors, got {type(tensor_list).__name__}.")
    for index, tensor in enumerate(tensor_list):
        as_floats(tensor, f"tensor_list[{index}]")
    return tensor_list


# -- qtype -------------------------------------------------------------------------------------------------------------


def _half_type(qtype: QType) -> DQuantType:
    kind = _as_type(qtype)
    if kind is None:
        raise UnsupportedError(
            f"qtype={qtype!s}: these functions give 16 bits an element, for DQuantType.FP16 and DQuantType.BFP16. For "
            "other codecs there are narrowcast.encode(x, codec) and narrowcast.decode(payload)."
        )
    return kind


def codec_of(qtype: QType) -> Codec:
    """The codec that a collective travels in."""
    kind = _as_type(qtype)
    try:
        return as_codec(qtype if kind is None else _CODECS[kind])  # type: ignore[arg-type]  # refused there
    except SpecError as error:
        raise UnsupportedError(f"qtype: expected DQuantType.FP16, DQuantType.BFP16, or a codec. {error}") from error


def _as_type(qtype: object) -> DQuantType | None:
    """The `DQuantType` that is meant, PyTorch's own members included; None where it is none."""
    name = qtype.name if isinstance(qtype, Enum) else qtype.upper() if isinstance(qtype, str) else ""
    return DQuantType.__members__.get(name)


def as_loss(value: object) -> float | Tensor | None:
    """What results are divided by, or None; anything that cannot be is refused."""
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value == 0:
        raise SpecError(
            f"quant_loss={value!r}: results are divided by it, so it is a finite number other than 0, or None. "
            "Pass 1.02 where they come out 2% too large."
        )
    return float(value)
