"""A linear layer whose weights are additive powers of two: what `narrowcast.compat.apot.LinearAPoT` is.

Where the grid has at most 256 sums, as unsigned ones of up to 8 bits and signed ones of up to 6 bits with k=2 do, the
weights are encoded rows (a table of the sums, gamma as every row's scale) and the product is `codec.linear`'s. On
larger grids they are held as fp32.

PyTorch's own layer multiplies by codes: linear.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.codecs import Levels
from narrowcast.compat.apot.apot_utils import WIDEST, as_floats, as_numbers, float_to_apot, quant_dequant_util
from narrowcast.compat.apot.observer import APoTObserver, QParams, sums
from narrowcast.errors import MatrixError, SpecError
from narrowcast.nn.modules.base import keep_dtype
from narrowcast.nn.modules.linear import linear_on_rows
from narrowcast.nn.qat.grids import codec_grid, write_rows


class LinearAPoT(nn.Module):
    """y = x W^T + bias, with W at the levels of additive powers of two.

    `signed=None` takes the signed grid where a weight is negative. `legacy=True` gives PyTorch's numbers (linear.py).
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
        weight = _matrix(weight2quantize)
        if not weight.numel():
            raise MatrixError(f"weight2quantize: it is {list(weight.shape)}, and of no weights there is no grid.")
        observer = APoTObserver(b=b, k=k)
        observer(weight)
        signed = bool(observer.min_val < 0) and not legacy if signed is None else signed
        self.legacy = legacy
        self._hold(weight, bias, Grid(b, k, signed), observer.calculate_qparams(signed))

    def _hold(self, weight: Tensor, bias: Tensor | None, grid: Grid, qparams: QParams) -> None:
        self.b, self.k, self.signed = grid
        self.n = self.b // self.k
        self.out_features, self.in_features = weight.shape
        for name, value in zip(("alpha", "gamma", "quantization_levels", "level_indices"), qparams, strict=True):
            self.register_buffer(name, value)
        table = torch.unique(sums(*grid))
        self.codec = Levels(table, block="row", scale="fp32") if len(table) <= WIDEST else None
        self.register_buffer("held", self._packed(quant_dequant_util(weight.float(), self.quantization_levels)))
        self.register_parameter("bias", _as_parameter(bias))

    @classmethod
    def from_reference(
        cls, ref_qlinear: nn.Module, alpha: Tensor, gamma: Tensor, quantization_levels: Tensor, level_indices: Tensor
    ) -> LinearAPoT:
        """The layer of a float or reference module on a grid that an observer gave, as `calculate_qparams` returns it.

        (PyTorch's raises NotImplementedError.)
        """
        floats = {"alpha": alpha, "gamma": gamma, "quantization_levels": quantization_levels}
        codes = as_numbers("level_indices", level_indices).detach()
        qparams = (*(as_floats(name, value).detach() for name, value in floats.items()), codes)
        grid = _grid_of(qparams[1], qparams[2])
        weight, bias = ref_qlinear.weight, getattr(ref_qlinear, "bias", None)
        layer = cls(torch.zeros_like(_matrix(weight), dtype=torch.float32), grid.b, grid.k)
        layer._hold(_matrix(weight).clamp(-qparams[0].min(), qparams[0].max()), bias, grid, qparams)  # type: ignore[arg-type]
        return layer

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

    # PyTorch's own steps of the product with codes, by shifting bits.

    def decompose_APoT(self, x: str | int) -> list[str]:
        """The binary digits of a code, "0b..." as bin() gives them, in pieces of k digits from the left."""
        digits = (x if isinstance(x, str) else bin(int(x)))[2:]
        return [digits[start : start + self.k] for start in range(0, len(digits), self.k)]

    def bitshift_mul(self, weight_val: Sequence[str], r: int) -> int:
        """A code in such pieces, times an integer."""
        return int("".join(weight_val) or "0", 2) * int(r)

    def matmul(self, decomposed_weight: Any, activation: Tensor) -> Tensor:
        """The whole parts of `activation` [batch, in] times codes in pieces [in, out], fp32."""
        codes = [[self.bitshift_mul(pieces, 1) for pieces in row] for row in decomposed_weight]
        weight = torch.tensor(codes, dtype=torch.float64, device=activation.device)
        if activation.dim() != 2 or activation.shape[1] != len(weight):
            raise MatrixError(
                f"activation: expected [batch, {len(weight)}], as many as decomposed_weight has rows, got "
                f"{list(activation.shape)}."
            )
        return (activation.double().trunc() @ weight).float()

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


class Grid(NamedTuple):
    """What names a grid: its bits, the bits of a term, and whether terms are signed."""

    b: int
    k: int
    signed: bool


def _grid_of(gamma: Tensor, levels: Tensor) -> Grid:
    """The grid that has these levels."""
    for b, signed in itertools.product(range(1, 17), (False, True)):
        for k in (k for k in range(1, b + 1) if b % k == 0):
            count = (2 ** (k + 1) - 1 if signed else 2**k) ** (b // k)
            if count == levels.numel():
                expected = (gamma.float().reshape(()) * sums(b, k, signed).to(gamma.device)).sort().values
                if torch.allclose(expected, levels.float(), rtol=1e-6, atol=0.0):
                    return Grid(b, k, signed)
    raise SpecError(
        f"quantization_levels: {levels.numel()} levels that no b and k give with this gamma. Pass what "
        "APoTObserver.calculate_qparams returned, unchanged."
    )


def _matrix(weight: object) -> Tensor:
    """A weight [out, in], detached, in floats."""
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        shape = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise MatrixError(f"weight2quantize: expected [out, in], as nn.Linear.weight is, got {shape}.")
    weight = weight.detach()
    return weight.dequantize() if weight.is_quantized else weight


def _as_parameter(bias: Tensor | None) -> nn.Parameter | None:
    return bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias.detach())
