"""The qconfigs, for torch.ao's eager and FX quantization-aware training.

What they mean, in this library's own words, where clips are learned and the result can be packed:

    uniform_qconfig_4bit       prepare_qat_(model, weights="int8", activations="int4")   (its weights have 8 bits)
    apot_weight_qconfig_4bit   prepare_qat_(model, weights="apot4", activations="int4")
    apot_qconfig_4bit          prepare_qat_(model, weights="apot4", activations="apot4")

and likewise with 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.ao.quantization.fake_quantize import FakeQuantize
from torch.ao.quantization.observer import MinMaxObserver
from torch.ao.quantization.qconfig import QConfig

from narrowcast.compat.apot.fake_quantize import APoTFakeQuantize


def _uniform(dtype: torch.dtype, **codes: int) -> Any:
    symmetric = {"observer": MinMaxObserver, "qscheme": torch.per_tensor_symmetric}
    return FakeQuantize.with_args(**symmetric, dtype=dtype, **codes)  # type: ignore[no-untyped-call]


def _apot(bits: int, dtype: torch.dtype) -> Any:
    return APoTFakeQuantize.with_args(b=bits, k=2, dtype=dtype)  # type: ignore[no-untyped-call]


_weights = _uniform(torch.qint8)
_activations8 = _uniform(torch.quint8)
_activations4 = _uniform(torch.quint8, quant_min=0, quant_max=15)

uniform_qconfig_8bit = QConfig(_activations8, _weights)  # type: ignore[no-untyped-call]
apot_weight_qconfig_8bit = QConfig(_activations8, _apot(8, torch.qint8))  # type: ignore[no-untyped-call]
apot_qconfig_8bit = QConfig(_apot(8, torch.quint8), _apot(8, torch.qint8))  # type: ignore[no-untyped-call]

uniform_qconfig_4bit = QConfig(_activations4, _weights)  # type: ignore[no-untyped-call]
apot_weight_qconfig_4bit = QConfig(_activations4, _apot(4, torch.qint8))  # type: ignore[no-untyped-call]
apot_qconfig_4bit = QConfig(_apot(4, torch.quint8), _apot(4, torch.qint8))  # type: ignore[no-untyped-call]
