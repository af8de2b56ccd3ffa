"""Packed layers whose inputs are quantized too.

`convert_` makes these of layers that were trained with quantized inputs. They hold the weight as encoded rows, like
every packed layer, and the trained `input_quantizer`.

- `IntegerLinear`, `IntegerConv1d`, `IntegerConv2d`: both grids are integers that fit a byte. Inputs and weights are
  multiplied as int8 x int8 -> int32, exactly; then one fp32 product with (input scale * weight scale), and the bias.
  Unsigned inputs up to 255 of a Linear are shifted by 128; the sums of the rows, times 128, are added back, exactly
  too. The weights as int8 are buffers beside the rows, in no state dict; those of a convolution lie as its kernel reads
  them (kernels/windows.py).
- `QuantizedInputLinear`, `QuantizedInputConv1d/2d/3d`: any other grids. The input is quantized in floats, and
  then multiplied as by the packed layer.

The result of an integer layer comes from the integers. Its derivatives are the trained layer's, straight-through, and
computed in floats on demand. A NaN in the input makes the outputs that depend on it NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vjp

from narrowcast.errors import ShapeError
from narrowcast.kernels import operators
from narrowcast.kernels.operators.derivatives import remember_tensors
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.kernels.operators.integer import integer_conv, integer_linear
from narrowcast.kernels.windows import Window, to_words
from narrowcast.nn.modules.base import OneWeight, as_bytes, keep_dtype
from narrowcast.nn.modules.conv import Conv1d, Conv2d, Conv3d, Convolution
from narrowcast.nn.modules.linear import Linear, as_autocast, as_float_input, linear_on_rows
from narrowcast.nn.qat.clips import scale_of
from narrowcast.nn.qat.fake_quantize import FakeQuantize
from narrowcast.nn.qat.straight_through import FLOOR


class QuantizedInput(OneWeight):
    """What layers that quantize their inputs in floats share."""

    input_quantizer: FakeQuantize

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = super().forward(self.input_quantizer(as_autocast(input)))
        return out

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
    made_on_load: tuple[str, ...]

    def forward(self, input: Tensor) -> Tensor:
        x, bias = as_float_input(input, "The input quantizer rounds floats: pass input.float()."), self.bias
        wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
        if wanted and torch.compiler.is_compiling():  # which takes no Function with two modes
            floats = self._in_floats(x, bias)
            return self._in_integers(x, bias).detach() + (floats - floats.detach())
        if wanted or operators.transformed():
            return _InIntegers.apply(x, bias, self)  # type: ignore[no-any-return,no-untyped-call]
        return self._in_integers(x, bias)

    def _in_integers(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _in_floats(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same, up to rounding, by operations that have derivatives."""
        raise NotImplementedError

    def _leave(self) -> None:
        for name in ("input_quantizer", *self.made_on_load):
            delattr(self, name)

    def reserve(self) -> None:
        """Allocate the operands of rows that are still to be loaded."""
        (rows, *size), device = self.held.shape, self.weight.device
        integers = torch.zeros(rows, math.prod(size), dtype=torch.int8, device=device)
        self._set_operands(integers, torch.empty(rows, dtype=torch.float32, device=device))

    def unpack(self) -> None:
        """Compute the int8 operands from the rows; `convert_` and `load_state_dict` call it."""
        rows, numel = as_bytes(self.weight).detach(), math.prod(self.held.shape[1:])
        scales = self.codec.split(rows, numel).scales
        assert scales is not None
        integers = (self.codec.decode(rows, numel, torch.float32) / scales).round().to(torch.int8)
        self._set_operands(integers, scales.flatten().clone())

    def _set_operands(self, integers: Tensor, scales: Tensor) -> None:
        for name, operand in zip(self.made_on_load, self._operands(integers, scales), strict=True):
            self.register_buffer(name, operand, persistent=False)

    def _operands(self, integers: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        """What the product reads, in the order of `made_on_load`, from weights [rows, numel] and their scales."""
        raise NotImplementedError

    def input_scale(self) -> Tensor:
        quantizer = self.input_quantizer
        alpha, top = quantizer.alpha, quantizer.top
        if operators.unwatched(alpha.data):  # in two steps, where a small layer would wait for eight of torch's
            value = alpha.item() if alpha.device.type == "cpu" else math.nan
            if FLOOR <= value < math.inf:
                return _quotient(value, top)
        return scale_of(quantizer.clip, top)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.unpack()

    def _apply(self, fn: Any, recurse: bool = True) -> IntegerLayer:
        # The operands follow from the rows: they are never cast, never rounded to half precision. `fn` gets them flat,
        # since some layouts are for four dimensions alone, and kernels read them in the order in which they lie.
        operands = {id(self._buffers[name]) for name in self.made_on_load}
        super()._apply(lambda t: keep_dtype(fn, t.flatten()).view(t.shape) if id(t) in operands else fn(t), recurse)
        return self


@lru_cache(maxsize=4096)
def _quotient(clip: float, top: float) -> Tensor:
    """On the CPU, and not to be changed. It is rounded to fp64 first, which changes no quotient of fp32."""
    with torch.inference_mode(False):
        return torch.tensor([clip / top], dtype=torch.float32, device="cpu")


class _InIntegers(torch.autograd.Function):
    """The results of integers, with the derivatives of floats."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, layer: IntegerLayer) -> Tensor:
        return layer._in_integers(x, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, bias, ctx.layer = inputs
        remember_tensors(ctx, x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        if bias is None:
            return *vjp(lambda x: ctx.layer._in_floats(x, None), x)[1](grad), None, None
        return *vjp(ctx.layer._in_floats, x, bias)[1](grad), None

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor | None, of_bias: Tensor | None, _: None) -> Tensor:
        x, bias = ctx.saved_tensors
        of_x = torch.zeros_like(x) if of_x is None else of_x
        if bias is None:
            return jvp(lambda x: ctx.layer._in_floats(x, None), (x,), (of_x,))[1]  # type: ignore[no-any-return]
        of_bias = torch.zeros_like(bias) if of_bias is None else of_bias
        return jvp(ctx.layer._in_floats, (x, bias), (of_x, of_bias))[1]  # type: ignore[no-any-return]


class IntegerLinear(IntegerLayer, Linear):
    """A Linear whose products are int8 x int8 -> int32."""

    weight_sums: Tensor
    made_on_load = "weight_integers", "weight_scales", "weight_sums"

    def _operands(self, integers: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        return integers, scales, integers.sum(1, dtype=torch.int64)

    def _in_integers(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(f"input: expected [..., {self.in_features}], got {list(x.shape)}.")
        levels = self.input_levels(x.reshape(-1, x.shape[-1]))
        out = self.multiply(levels).float() * (self.input_scale() * self.weight_scales)
        if bias is not None:
            out = out + bias.float()
        out = torch.where(levels.isnan().any(-1, keepdim=True), math.nan, out)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def multiply(self, levels: Tensor) -> Tensor:
        """Levels [batch, k] times the weights: exact, int32 or int64 [batch, outputs]."""
        offset = 128 if self.input_quantizer.top > 127 else 0  # what makes levels int8
        sums = integer_linear((levels - offset).to(torch.int8), self.weight_integers)
        return sums + offset * self.weight_sums if offset else sums

    def input_levels(self, x: Tensor) -> Tensor:
        """The levels of x, integers in fp32; NaN where x is."""
        scale = self.input_scale()
        # A level times the scale, divided by it, is within two roundings of the level, which is at most 255.
        return (fake_quantize(x.float(), scale, self.input_quantizer.grid, None) / scale).round()

    def _in_floats(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear_on_rows(self.input_quantizer(x), self.weight, self.codec, self.in_features, bias)


class _IntegerConv(IntegerLayer, Convolution):
    made_on_load = "weight_integers", "weight_scales"

    def _operands(self, integers: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        shape = self.held.shape if len(self.kernel_size) == 2 else (*self.held.shape[:2], 1, self.held.shape[2])
        return to_words(integers.view(shape)), scales

    def _in_integers(self, x: Tensor, bias: Tensor | None) -> Tensor:
        spatial = len(self.kernel_size)
        if x.dim() == spatial + 1:
            return self._in_integers(x.unsqueeze(0), bias).squeeze(0)
        if x.dim() != spatial + 2 or x.shape[1] != self.in_channels:
            wanted = ["batch", self.in_channels, *("height", "width")[-spatial:]]
            raise ShapeError(
                f"input: expected [{', '.join(map(str, wanted))}], with or without the batch; got {list(x.shape)}."
            )
        image, around = x.float(), self._reversed_padding_repeated_twice
        if self.padding_mode != "zeros":
            image, around = F.pad(image, around, mode=self.padding_mode), [0] * len(around)
        image = image if spatial == 2 else image.unsqueeze(2)
        steps = (*_planar(self.stride), *_planar(self.dilation))
        window = Window._make((*steps, *around, *[0] * (4 - len(around)), self.groups))
        weight = self.weight_integers
        if min(window.outputs(image.shape[2], image.shape[3], weight.shape[2:4])) < 1:
            raise ShapeError(
                f"input: {list(x.shape)} is smaller, with its padding, than the kernel {self.kernel_size}."
            )
        quantizer, scale = self.input_quantizer, self.input_scale()
        factor, bias = scale * self.weight_scales, None if bias is None else bias.float()
        out = integer_conv(image.contiguous(), scale, quantizer.grid, weight, factor, bias, window)
        out = out if spatial == 2 else out.squeeze(2)
        return out if x.dtype == out.dtype else out.to(x.dtype)

    def _in_floats(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.convolved(self.input_quantizer(x), bias)


def _planar(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Of a convolution of one dimension, the step down is 1."""
    return sizes if len(sizes) == 2 else (1, *sizes)


class IntegerConv1d(_IntegerConv, Conv1d):
    """A Conv1d whose products are int8 x int8 -> int32."""


class IntegerConv2d(_IntegerConv, Conv2d):
    """A Conv2d whose products are int8 x int8 -> int32."""
