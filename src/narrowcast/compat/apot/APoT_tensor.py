"""A tensor of codes, with the quantizer that made them.

Codes are held packed, each in as many bits as the grid needs (4 for b=4, 6 for its signed grid of 49 entries, 16 beyond
8); `data` and `int_repr()` give them as int32 in the tensor's shape, as PyTorch has them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.kernels.reference import pack, unpack

if TYPE_CHECKING:
    from narrowcast.compat.apot.quantizer import APoTQuantizer


class TensorAPoT:
    """Codes and their quantizer; `dtype` is that of the numbers they stand for."""

    def __init__(self, quantizer: APoTQuantizer, apot_data: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.quantizer = quantizer
        self.shape = apot_data.shape
        self.dtype = dtype
        needed = max(1, math.ceil(math.log2(len(quantizer.level_indices))))
        self.bits = needed if needed <= 8 else 16
        self.packed = pack(apot_data.reshape(1, -1), self.bits)

    @property
    def data(self) -> Tensor:
        """The codes, int32."""
        codes: Tensor = unpack(self.packed, self.shape.numel(), self.bits) & (2**self.bits - 1)
        return codes.int().view(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the codes take."""
        return self.packed.numel()

    def int_repr(self) -> Tensor:
        return self.data

    def dequantize(self) -> Tensor:
        return self.quantizer.dequantize(self)

    def __repr__(self) -> str:
        return f"TensorAPoT(shape={tuple(self.shape)}, bits={self.bits}, dtype={self.dtype})"
