"""A linear layer whose weights are additive powers of two.

Where the grid has at most 256 sums, as unsigned ones of up to 8 bits and signed ones of up to 6 bits with k=2 do, the
weights are encoded rows (a table of the sums, gamma as every row's scale) and the product is `codec.linear`'s. On
larger grids they are held as fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.codecs import Levels
from narrowcast.compat.apot.apot_utils import WIDEST, float_to_apot, quant_dequant_util
from narrowcast.compat.apot.observer import APoTObserver, sums
from narrowcast.errors import ShapeError
from narrowcast.nn.modules.base import keep_dtype
from narrowcast.nn.modules.linear import linear_on_rows
from narrowcast.nn.qat.grids import codec_grid, write_rows


class LinearAPoT(nn.Module):
    """y = x W^T + bias, with W at the levels of additive powers of two.

    `signed=None` takes the signed grid where a weight is negative. `legacy=True` gives PyTorch's numbers: the unsigned
    grid, and products of the activation's whole part with the *codes*, in fp32. Its test_linear.py (test_linear_APoT_k1
    and _k2) wants those; with them, no scale makes the result a linear layer's, unless k is 1.
    """

    alpha: Tensor
    gamma: Tensor
    quantization_levels: Tensor
    level_indices: Tensor
    held: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        weight2quantize: Tensor,
        b: int,
        k: int,
        bias: Tensor | None = None,
        *,
        signed: bool | None = None,
        legacy: bool = False,
    ) -> None:
        super().__init__()
        if weight2quantize.dim() != 2:
            raise ShapeError(
                f"weight2quantize: expected [out, in], as nn.Linear.weight is, got {list(weight2quantize.shape)}."
            )
        weight = weight2quantize.detach()
        observer = APoTObserver(b=b, k=k)
        observer(weight)
        signed = bool(observer.min_val < 0) and not legacy if signed is None else signed
        self.b, self.k, self.signed, self.legacy = b, k, signed, legacy
        self.out_features, self.in_features = weight.shape
        for name, value in zip(
            ("alpha", "gamma", "quantization_levels", "level_indices"), observer.calculate_qparams(signed), strict=True
        ):
            self.register_buffer(name, value)
        self.n = observer.n
        table = torch.unique(sums(b, k, signed))
        self.codec = Levels(table, block="row", scale="fp32") if len(table) <= WIDEST else None
        self.register_buffer("held", self._packed(quant_dequant_util(weight.float(), self.quantization_levels)))
        self.register_parameter("bias", _as_parameter(bias))

    @classmethod
    def from_float(cls, module: nn.Linear, b: int, k: int, **options: Any) -> LinearAPoT:
        """The layer with the weights of a float one; the bias is shared."""
        return cls(module.weight, b, k, module.bias, **options)

    def _packed(self, values: Tensor) -> Tensor:
        if self.codec is None:
            return values
        scale = torch.where(self.gamma == 0, 1.0, self.gamma.float()).expand(len(values))
        return write_rows(values, scale, codec_grid(self.codec))

    def decoded(self) -> Tensor:
        """The weights: levels, fp32 [out, in]."""
        return self.held if self.codec is None else self.codec.decode(self.held, self.in_features)

    @property
    def weight(self) -> Tensor:
        """The codes of the weights, int32 [out, in]; `decoded()` gives the numbers."""
        return float_to_apot(self.decoded(), self.quantization_levels, self.level_indices, self.alpha).int()

    @property
    def weight_transposed(self) -> Tensor:
        return self.weight.t()

    def forward(self, activation: Tensor) -> Tensor:
        x = activation.dequantize() if activation.is_quantized else activation
        x = x if x.is_floating_point() else x.float()
        if self.legacy:
            return F.linear(x.float().trunc(), self.weight.float(), self.bias)
        if self.codec is not None:
            return linear_on_rows(x, self.held, self.codec, self.in_features, self.bias)
        return F.linear(x, self.held.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> LinearAPoT:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():  # levels are never rounded to half precision
            assert buffer is not None
            self._buffers[name] = keep_dtype(lambda _, name=name: self._buffers[name], buffer)
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, b={self.b}, k={self.k}, signed={self.signed}" + (", legacy=True" if self.legacy else "")


def _as_parameter(bias: Tensor | None) -> nn.Parameter | None:
    return bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias.detach())
