"""Fake quantization of weights that are rounded up or down by choices that are learned.

A weight w is (floor(w / scale) + h) * scale, where h is the choice of adaround_loss.py for its V. V starts where h is
what floor takes away: until V is trained, soft rounding gives w itself, and hard rounding the nearest level.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization.fake_quantize import FakeQuantize
from torch.ao.quantization.observer import MinMaxObserver

from narrowcast.compat.apot.adaround_loss import ADAROUND_GAMMA, ADAROUND_ZETA, rectified_sigmoid
from narrowcast.errors import GridError

SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)


class AdaroundFakeQuantizer(FakeQuantize):
    """Quantize a weight with learned rounding: `V` is the parameter, of the weight's shape, and the weight a constant.

    While the observer is enabled, scales follow the weight, and V starts anew. `use_soft_rounding = False` makes every
    choice final.
    """

    V: nn.Parameter

    def __init__(
        self,
        observer: Any = MinMaxObserver,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int = -128,
        quant_max: int = 127,
        ch_axis: int = 0,
        **observer_kwargs: Any,
    ) -> None:
        if quant_min > quant_max:
            raise GridError(f"quant_min={quant_min}, quant_max={quant_max}: there is no code between them.")
        if qscheme not in SYMMETRIC:
            raise GridError(f"qscheme={qscheme}: rounding is learned on symmetric grids, {SYMMETRIC[0]} for one.")
        super().__init__(  # type: ignore[no-untyped-call]
            observer=observer,
            qscheme=qscheme,
            quant_min=quant_min,
            quant_max=quant_max,
            is_dynamic=False,
            **observer_kwargs,
        )
        self.qscheme, self.ch_axis = qscheme, ch_axis
        self.is_per_tensor, self.is_symmetric = qscheme == torch.per_tensor_symmetric, True
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self.scale, self.zero_point = nothing, nothing.clone()
        self.V = nn.Parameter(nothing.clone())
        self.zeta = torch.tensor(ADAROUND_ZETA, dtype=torch.float32, device="cpu")
        self.gamma = torch.tensor(ADAROUND_GAMMA, dtype=torch.float32, device="cpu")
        self.use_soft_rounding = True

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The scales and zero points in use, with a dimension for each one of the weight."""
        return self.scale, self.zero_point

    def enable_weight_fake_quant(self) -> None:
        """PyTorch's name for `enable_fake_quant()`."""
        self.fake_quant_enabled[0] = 1

    def get_rectified_sigmoid_func(self) -> Tensor:
        """The choices: from 0 to 1, or made."""
        return rectified_sigmoid(self.V) if self.use_soft_rounding else (self.V >= 0).int()

    @torch.no_grad()
    def update_scale(self, X: Tensor, _scale: Tensor, _zero_point: Tensor) -> None:
        """Take scales and zero points that fit X's dimensions, and start V from X."""
        self.scale, self.zero_point = _scale.to(X.device, X.dtype), _zero_point.to(X.device)
        rest = X / self.scale
        rest = rest - rest.floor()
        wanted = (rest - ADAROUND_GAMMA) / (ADAROUND_ZETA - ADAROUND_GAMMA)
        self.V.data = torch.log(wanted / (1 - wanted))

    def forward(self, X: Tensor) -> Tensor:
        if int(self.observer_enabled[0]):
            weight = X.detach()
            self.activation_post_process(weight)
            shape = [1] * X.dim()
            if not self.is_per_tensor:
                shape[self.ch_axis] = -1
            scale, zero_point = self.activation_post_process.calculate_qparams()
            self.update_scale(weight, scale.reshape(shape), zero_point.reshape(shape))
        if not int(self.fake_quant_enabled[0]):
            return X
        codes = (X / self.scale).floor() + self.zero_point + self.get_rectified_sigmoid_func()
        quantized: Tensor = (codes.clamp(self.quant_min, self.quant_max) - self.zero_point) * self.scale
        return quantized

    def extra_repr(self) -> str:
        rounded_up = int((self.V >= 0).sum())
        codes = (
            f"quant_min={self.quant_min}, quant_max={self.quant_max}, qscheme={self.qscheme}, ch_axis={self.ch_axis}"
        )
        return f"{codes}, rounded up: {rounded_up} of {self.V.numel()}"
