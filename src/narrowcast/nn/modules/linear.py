"""y = x W^T + b, with W as encoded rows.

`Linear` is torch.nn.Linear whose weight is uint8 [out_features, row_bytes(in_features)]: each output's weights are one
row. The result has x's dtype, as autocast would have x; sums run in fp32, and the weight is never rebuilt whole for
small batches. Differentiable in x and bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.codecs.payload import encode_rows
from narrowcast.errors import DtypeError, ShapeError
from narrowcast.nn.modules.base import Held, OneWeight, as_bytes, as_parameter, begin, hold


class Linear(OneWeight):
    """torch.nn.Linear on encoded rows."""

    float_class = nn.Linear
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        codec: str | Codec | Mapping[str, Any] = "int8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        chosen = as_codec(codec)
        like = nn.Linear(in_features, out_features, bias, device, dtype)
        rows = encode_rows(like.weight, chosen)
        begin(self, nn.Linear, rows.dtype)
        hold(self, "weight", as_parameter(rows.data), Held(chosen, rows.shape))
        self.register_parameter("bias", like.bias)

    # The sizes come from the rows, since the float module may be of a class that has other names for them.

    @property
    def in_features(self) -> int:
        return self.held.shape[1]

    @property
    def out_features(self) -> int:
        return self.held.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        codec, shape = self.held[:2]
        return linear_on_rows(input, self.weight, codec, shape[1], self.bias)


def linear_on_rows(x: Tensor, rows: Tensor, codec: Codec, numel: int, bias: Tensor | None) -> Tensor:
    """`codec.linear`, once x has been checked and cast as F.linear would have it."""
    x = as_float_input(
        x,
        "Some models cast their activations to weight.dtype, which is uint8 for encoded rows: leave such a layer as it "
        'is with quantize_(..., rules={"its name": None}).',
    )
    if x.dim() == 0 or x.shape[-1] != numel:
        raise ShapeError(
            f"input: expected [..., {numel}], since the layer has in_features={numel}, got {list(x.shape)}."
        )
    if x.device != rows.device:
        raise ShapeError(
            f"input: is on {x.device}, the weight on {rows.device}. Call model.to({str(x.device)!r}) first."
        )
    if bias is not None and bias.shape != rows.shape[:1]:
        return _with_broadcast_bias(x, rows, codec, bias)
    return codec.linear(x, as_bytes(rows), bias)


def _with_broadcast_bias(x: Tensor, rows: Tensor, codec: Codec, bias: Tensor) -> Tensor:
    """The bias as F.linear broadcasts it: one element for all outputs, or any shape that expands to the result's."""
    outputs = rows.shape[0]
    if bias.numel() == 1 and bias.dim() <= 1:
        return codec.linear(x, as_bytes(rows), bias.expand(outputs).contiguous())
    y = codec.linear(x, as_bytes(rows))
    try:
        return y + bias.to(y.dtype).expand(y.shape)
    except RuntimeError:
        raise ShapeError(
            f"bias: expected [{outputs}], one for each output, or one for all, got {list(bias.shape)}."
        ) from None


def as_float_input(x: Tensor, hint: str) -> Tensor:
    """x as `as_autocast` gives it; what is not a float tensor is refused, with `hint` on how to fix it."""
    x = as_autocast(x)
    if x.dtype not in checks.FLOATS:
        kind = checks.dtype_name(x.dtype)
        raise DtypeError(f"input: expected float32, bfloat16, float16 or float64, got {kind}. {hint}")
    if x.is_nested or x.layout != torch.strided:
        raise DtypeError(
            "input: layers on encoded rows take dense tensors, not nested or sparse ones. Pass "
            "torch.nested.to_padded_tensor(x, 0.0), or x.to_dense()."
        )
    return x


def as_autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast asks for here, if it does; like torch's autocast, it leaves fp64 alone."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))
