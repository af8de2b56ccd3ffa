"""Fake quantization by an observer, for torch.ao's eager and FX flows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization.fake_quantize import FakeQuantizeBase

from narrowcast.compat.apot.fake_quantize_function import fake_quantize_function
from narrowcast.compat.apot.observer import APoTObserver, QParams, take_shapes
from narrowcast.errors import CalibrationError
from narrowcast.nn.observers import keep_dtype


class APoTFakeQuantize(FakeQuantizeBase):
    """Quantize to the grid that the observer gives, in floats.

    `signed=None` takes PyTorch's signed grid once a negative number was observed, and the unsigned one before. PyTorch
    always takes the unsigned one, where negative numbers become 0: that is `signed=False`.
    """

    alpha: Tensor
    gamma: Tensor
    quantization_levels: Tensor
    level_indices: Tensor

    def __init__(
        self, observer: Callable[..., APoTObserver] = APoTObserver, signed: bool | None = None, **observer_kwargs: Any
    ) -> None:
        super().__init__()
        self.activation_post_process = observer(**observer_kwargs)
        self.dtype = self.activation_post_process.dtype
        self.signed = signed
        device = (observer_kwargs.get("factory_kwargs") or {}).get("device")
        for name in ("alpha", "gamma", "quantization_levels"):
            self.register_buffer(name, torch.empty(0, device=device))
        self.register_buffer("level_indices", torch.empty(0, dtype=torch.int64, device=device))

    def calculate_qparams(self, signed: bool | None = None) -> QParams:  # type: ignore[override]
        """alpha, gamma, levels and codes of what was observed."""
        signed = self.signed if signed is None else signed
        if signed is None:
            lowest = self.activation_post_process.min_val
            signed = bool(lowest.numel()) and float(lowest) < 0
        return self.activation_post_process.calculate_qparams(signed=signed)

    def forward(self, X: Tensor, signed: bool | None = None) -> Tensor:
        if int(self.observer_enabled):
            self.activation_post_process(X)
            self.alpha, self.gamma, self.quantization_levels, self.level_indices = self.calculate_qparams(signed)
        if not int(self.fake_quant_enabled):
            return X
        if not self.quantization_levels.numel():
            raise CalibrationError(
                "this APoTFakeQuantize has no levels yet, and its observer is disabled. Call enable_observer() and run "
                "one batch first, or load a state dict that has them."
            )
        qparams = self.alpha, self.gamma, self.quantization_levels, self.level_indices
        return fake_quantize_function.apply(X, *qparams)  # type: ignore[no-any-return,no-untyped-call]

    def _apply(self, fn: Any, recurse: bool = True) -> APoTFakeQuantize:
        return super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-any-return,no-untyped-call]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        take_shapes(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
