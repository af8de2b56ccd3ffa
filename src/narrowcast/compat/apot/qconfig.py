"""The qconfigs, for torch.ao's eager and FX quantization-aware training.

What they mean, in this library's own words, where clips are learned and the result can be packed:

    uniform_qconfig_4bit       prepare_qat_(model, weights="int4", activations="int4")
    apot_weight_qconfig_4bit   prepare_qat_(model, weights="apot4", activations="int4")
    apot_qconfig_4bit          prepare_qat_(model, weights="apot4", activations="apot4")

and likewise with 8 bits. Uniform weights of 4 bits have the codes -8 to 7; PyTorch's have 0 to 15, where every negative
weight becomes 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.ao.quantization.fake_quantize import FakeQuantize
from torch.ao.quantization.observer import MinMaxObserver
from torch.ao.quantization.qconfig import QConfig

from narrowcast.compat.apot.fake_quantize import APoTFakeQuantize


def _apot(bits: int, dtype: torch.dtype) -> Any:
    return APoTFakeQuantize.with_args(b=bits, k=2, dtype=dtype)  # type: ignore[no-untyped-call]


_symmetric = FakeQuantize.with_args(observer=MinMaxObserver, qscheme=torch.per_tensor_symmetric)  # type: ignore[no-untyped-call]
default_symmetric_fake_quant = _symmetric.with_args(dtype=torch.quint8)
"""Activations: 0 to 255, with the zero point 128."""
default_weight_symmetric_fake_quant = _symmetric.with_args(dtype=torch.qint8)
"""Weights: -128 to 127."""
_activations8, _weights8 = default_symmetric_fake_quant, default_weight_symmetric_fake_quant
_activations4 = default_symmetric_fake_quant.with_args(quant_min=0, quant_max=15)
_weights4 = default_weight_symmetric_fake_quant.with_args(quant_min=-8, quant_max=7)

uniform_qconfig_8bit = QConfig(_activations8, _weights8)  # type: ignore[no-untyped-call]
apot_weight_qconfig_8bit = QConfig(_activations8, _apot(8, torch.qint8))  # type: ignore[no-untyped-call]
apot_qconfig_8bit = QConfig(_apot(8, torch.quint8), _apot(8, torch.qint8))  # type: ignore[no-untyped-call]

uniform_qconfig_4bit = QConfig(_activations4, _weights4)  # type: ignore[no-untyped-call]
apot_weight_qconfig_4bit = QConfig(_activations4, _apot(4, torch.qint8))  # type: ignore[no-untyped-call]
apot_qconfig_4bit = QConfig(_apot(4, torch.quint8), _apot(4, torch.qint8))  # type: ignore[no-untyped-call]
