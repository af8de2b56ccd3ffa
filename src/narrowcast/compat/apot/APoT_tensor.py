"""A tensor of codes, with the quantizer that made them.

Codes are held packed, each in as many bits as the grid needs (4 for b=4, 6 for its signed grid of 49 entries, 16 beyond
8); `data` and `int_repr()` give them as int32 in the tensor's shape, as PyTorch has them. Other codes are assigned to
`data`; those that the quantizer has no level for are refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowcast.compat.apot.apot_utils import as_numbers
from narrowcast.errors import PayloadError
from narrowcast.kernels.reference import pack, unpack

if TYPE_CHECKING:
    from narrowcast.compat.apot.quantizer import APoTQuantizer


class TensorAPoT:
    """Codes and their quantizer; `dtype` is that of the numbers they stand for."""

    shape: torch.Size
    bits: int
    packed: Tensor

    def __init__(self, quantizer: APoTQuantizer, apot_data: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.quantizer = quantizer
        self.dtype = dtype
        self.data = apot_data

    @property
    def data(self) -> Tensor:
        """The codes, int32: a copy, to be assigned again where it is changed."""
        codes: Tensor = unpack(self.packed, self.shape.numel(), self.bits) & (2**self.bits - 1)
        return codes.int().view(self.shape)

    @data.setter
    def data(self, codes: Tensor) -> None:
        codes, known = as_numbers("data", codes), as_numbers("level_indices", self.quantizer.level_indices)
        whole = codes.long()
        lowest, highest = (int(known.min()), int(known.max())) if known.numel() else (0, -1)
        if bool(((whole != codes) | (whole < max(lowest, 0)) | (whole > highest)).any()):
            raise PayloadError(
                f"data: codes of this quantizer are whole numbers from {lowest} to {highest}, and one of them is not. "
                "Codes of another b, k or sign belong to a TensorAPoT with the quantizer that made them."
            )
        needed = max(1, math.ceil(math.log2(highest + 1)) if highest > 0 else 1)
        self.shape, self.bits = whole.shape, needed if needed <= 8 else 16
        self.packed = pack(whole.reshape(1, -1), self.bits)

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
