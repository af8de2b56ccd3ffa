"""Packed layers whose inputs are quantized too.

`convert_` makes these of layers that were trained with quantized inputs. They hold the weight as encoded rows, as every
packed layer does, and the trained `input_quantizer`.

- `IntegerLinear`, `IntegerConv1d`, `IntegerConv2d`: both grids are integers that fit a byte. Inputs and weights are
  multiplied as int8 x int8 -> int32, exactly (a convolution by laying out its windows); then one fp32 product with
  (input scale * weight scale), and the bias. Unsigned inputs up to 255 are shifted by 128, which the rows' sums make
  good for, exactly too. The weights as int8 lie beside the rows, in no state dict.
- `QuantizedInputLinear`, `QuantizedInputConv1d/2d/3d`: any other grids. The input is quantized in floats, and
  then multiplied as by the packed layer.

For inference: no gradient reaches the input of an integer layer. A NaN in the input makes the outputs that depend
on it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.errors import ShapeError
from narrowcast.kernels.fake import fake_quantize
from narrowcast.kernels.integer import integer_linear
from narrowcast.nn.clips import scale_of
from narrowcast.nn.conv import Conv1d, Conv2d, Conv3d
from narrowcast.nn.encoded import OneWeight
from narrowcast.nn.fake_quantize import FakeQuantize
from narrowcast.nn.grids import row_scales
from narrowcast.nn.linear import Linear, as_autocast


class QuantizedInput(OneWeight):
    """What layers share that quantize their inputs in floats."""

    input_quantizer: FakeQuantize

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(self.input_quantizer(as_autocast(x)))
        return made

    def _leave(self) -> None:
        del self.input_quantizer


class QuantizedInputLinear(QuantizedInput, Linear):
    """A packed Linear behind a quantizer of its input."""


class QuantizedInputConv1d(QuantizedInput, Conv1d):
    """A packed Conv1d behind a quantizer of its input."""


class QuantizedInputConv2d(QuantizedInput, Conv2d):
    """A packed Conv2d behind a quantizer of its input."""


class QuantizedInputConv3d(QuantizedInput, Conv3d):
    """A packed Conv3d behind a quantizer of its input."""


class IntegerLayer(OneWeight):
    """What integer layers share: operands as int8, and results from int32."""

    input_quantizer: FakeQuantize
    bias: nn.Parameter | None
    weight_integers: Tensor
    weight_scales: Tensor
    weight_sums: Tensor
    made_on_load = "weight_integers", "weight_scales", "weight_sums"

    def _leave(self) -> None:
        for name in ("input_quantizer", *self.made_on_load):
            delattr(self, name)

    def reserve(self) -> None:
        """Room for the operands of rows that are still to be loaded."""
        (rows, *size), device = self._held["weight"].shape, self.weight.device
        self._hold(
            torch.empty(rows, math.prod(size), dtype=torch.int8, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
        )

    def unpack(self) -> None:
        """Make the int8 operands of the rows; `convert_` and `load_state_dict` do."""
        held = self._held["weight"]
        numel = math.prod(held.shape[1:])
        scales = row_scales(self.weight.detach(), held.codec, numel)
        values = held.codec.decode(self.weight.detach(), numel, torch.float32)
        integers = (values / scales.view(-1, 1)).round().to(torch.int8)
        self._hold(integers, scales, integers.sum(1, dtype=torch.int64))

    def _hold(self, *operands: Tensor) -> None:
        for name, operand in zip(self.made_on_load, operands, strict=True):
            self.register_buffer(name, operand, persistent=False)

    @property
    def offset(self) -> int:
        """What is taken from levels to make them int8."""
        return 128 if self.input_quantizer.top > 127 else 0

    def input_levels(self, x: Tensor) -> Tensor:
        """The levels of x, integers in fp32; NaN where x is."""
        quantizer = self.input_quantizer
        scale = self.input_scale()
        # A level times the scale, divided by it, is within two roundings of the level, which is at most 255.
        return (fake_quantize(x.float(), scale, quantizer.grid, None) / scale).round()

    def input_scale(self) -> Tensor:
        return scale_of(self.input_quantizer.clip, self.input_quantizer.top)

    def multiply(self, levels: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Levels [batch, k] times the weights of outputs first to last: exact, int32 or int64 [batch, outputs]."""
        integers = self.weight_integers[first:last]
        sums = integer_linear((levels - self.offset).to(torch.int8), integers)
        return sums + self.offset * self.weight_sums[first:last] if self.offset else sums

    def scaled(self, sums: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
        """Exact sums [batch, outputs] as results: one product, and the bias, in fp32."""
        out = sums.float() * (self.input_scale() * self.weight_scales)
        if self.bias is not None:
            out = out + self.bias.float()
        return torch.where(levels.isnan().any(-1, keepdim=True), math.nan, out).to(dtype)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.unpack()

    def _apply(self, fn: Any, recurse: bool = True) -> IntegerLayer:
        scales = self.weight_scales
        super()._apply(fn, recurse)
        self.weight_scales = scales.to(self.weight.device)  # never rounded to half precision
        return self


class IntegerLinear(IntegerLayer, Linear):
    """A Linear whose products are int8 x int8 -> int32."""

    def forward(self, x: Tensor) -> Tensor:
        x = as_autocast(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(f"x: expected [..., {self.in_features}], got {list(x.shape)}.")
        levels = self.input_levels(x.reshape(-1, x.shape[-1]))
        return self.scaled(self.multiply(levels), levels, x.dtype).view(*x.shape[:-1], self.out_features)


class _IntegerConv(IntegerLayer):
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    out_channels: int
    _reversed_padding_repeated_twice: list[int]

    def forward(self, x: Tensor) -> Tensor:
        x = as_autocast(x)
        spatial = len(self.kernel_size)
        if x.dim() == spatial + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if x.dim() != spatial + 2:
            raise ShapeError(f"x: expected {spatial + 1} or {spatial + 2} dimensions, got shape {list(x.shape)}.")
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        levels = F.pad(self.input_levels(x), self._reversed_padding_repeated_twice, mode=mode)
        size = [self._positions(levels.shape[2 + place], place) for place in range(spatial)]
        windows = self._windows(levels)
        each, outputs = windows.shape[1] // self.groups, self.out_channels // self.groups
        parts = []
        for group in range(self.groups):
            some = windows[:, group * each : (group + 1) * each]
            parts.append(self.multiply(some, group * outputs, (group + 1) * outputs))
        out = self.scaled(torch.cat(parts, 1), windows, x.dtype)
        return out.view(len(x), -1, self.out_channels).transpose(1, 2).reshape(len(x), self.out_channels, *size)

    def _windows(self, levels: Tensor) -> Tensor:
        """What each output position multiplies: [batch * positions, channels * kernel]."""
        options = (self.kernel_size, self.dilation, self.stride)
        if len(self.kernel_size) == 1:
            levels = levels.unsqueeze(2)
            options = ((1, *self.kernel_size), (1, *self.dilation), (1, *self.stride))
        kernel, dilation, stride = options
        columns = F.unfold(levels, kernel, dilation, 0, stride)
        return columns.transpose(1, 2).reshape(-1, columns.shape[1])

    def _positions(self, size: int, place: int) -> int:
        return (size - self.dilation[place] * (self.kernel_size[place] - 1) - 1) // self.stride[place] + 1


class IntegerConv1d(_IntegerConv, Conv1d):
    """A Conv1d whose products are int8 x int8 -> int32."""


class IntegerConv2d(_IntegerConv, Conv2d):
    """A Conv2d whose products are int8 x int8 -> int32."""
