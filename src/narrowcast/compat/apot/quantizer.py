"""The quantizer of additive powers of two: a clip and a grid, as an `APoTObserver` gives them."""

from __future__ import annotations

from torch import Tensor

from narrowcast.compat.apot.APoT_tensor import TensorAPoT
from narrowcast.compat.apot.apot_utils import apot_to_float, float_to_apot
from narrowcast.compat.apot.fake_quantize_function import fake_quantize_function


class APoTQuantizer:
    """Numbers to codes, and back."""

    alpha: Tensor
    gamma: Tensor
    quantization_levels: Tensor
    level_indices: Tensor

    def __init__(self, alpha: Tensor, gamma: Tensor, quantization_levels: Tensor, level_indices: Tensor) -> None:
        self.alpha = alpha
        self.gamma = gamma
        self.quantization_levels = quantization_levels
        self.level_indices = level_indices

    def quantize(self, tensor2quantize: Tensor) -> TensorAPoT:
        """The codes of a tensor, clipped to alpha."""
        codes = float_to_apot(tensor2quantize, self.quantization_levels, self.level_indices, self.alpha)
        return TensorAPoT(self, codes, tensor2quantize.dtype)

    def dequantize(self, apot_tensor: TensorAPoT) -> Tensor:
        """The levels of a tensor's codes, in the dtype of what was quantized."""
        levels = apot_to_float(apot_tensor.data, self.quantization_levels, self.level_indices)
        return levels.to(apot_tensor.dtype)

    def quant_dequant(self, tensor2quantize: Tensor) -> Tensor:
        """`dequantize(quantize(x))` without the codes between; differentiable, as fake quantization is."""
        return fake_quantize_function.apply(  # type: ignore[no-any-return,no-untyped-call]
            tensor2quantize, self.alpha, self.gamma, self.quantization_levels, self.level_indices
        )

    def q_apot_alpha(self) -> float:
        """The clip. What has none raises NotImplementedError: test_quantizer.py calls this on a test case."""
        alpha = getattr(self, "alpha", None)
        if alpha is None:
            raise NotImplementedError(f"self: a {type(self).__name__} has no alpha. Call it on an APoTQuantizer.")
        return float(alpha)


def quantize_APoT(
    tensor2quantize: Tensor, alpha: Tensor, gamma: Tensor, quantization_levels: Tensor, level_indices: Tensor
) -> TensorAPoT:
    """The codes of a tensor, clipped to alpha."""
    return APoTQuantizer(alpha, gamma, quantization_levels, level_indices).quantize(tensor2quantize)


def dequantize_APoT(apot_tensor: TensorAPoT) -> Tensor:
    """The levels of a tensor's codes, in the dtype of what was quantized."""
    return apot_tensor.quantizer.dequantize(apot_tensor)


def quant_dequant_APoT(
    tensor2quantize: Tensor, alpha: Tensor, gamma: Tensor, quantization_levels: Tensor, level_indices: Tensor
) -> Tensor:
    """A tensor at the levels it is quantized to."""
    return APoTQuantizer(alpha, gamma, quantization_levels, level_indices).quant_dequant(tensor2quantize)
