"""Fake quantization by an observer, for torch.ao's eager and FX flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.ao.quantization.fake_quantize import FakeQuantizeBase

from narrowcast.compat.apot.fake_quantize_function import fake_quantize_function
from narrowcast.compat.apot.observer import APoTObserver, QParams
from narrowcast.errors import CalibrationError


class APoTFakeQuantize(FakeQuantizeBase):
    """Quantize to the grid that the observer gives, in floats.

    `signed=None` takes PyTorch's signed grid once a negative number was observed, and the unsigned one before. PyTorch
    always takes the unsigned one, where negative numbers become 0: that is `signed=False`.
    """

    qparams: QParams | None
    """alpha, gamma, levels and codes in use, computed from the observer's extremes. A state dict holds the extremes,
    and DDP keeps them the same on every rank."""

    def __init__(
        self, observer: Callable[..., APoTObserver] = APoTObserver, signed: bool | None = None, **observer_kwargs: Any
    ) -> None:
        super().__init__()
        self.activation_post_process = observer(**observer_kwargs)
        self.dtype = self.activation_post_process.dtype
        self.signed = signed
        self.qparams = None

    alpha = property(lambda self: self._qparam(0))
    gamma = property(lambda self: self._qparam(1))
    quantization_levels = property(lambda self: self._qparam(2))
    level_indices = property(lambda self: self._qparam(3))

    def _qparam(self, place: int) -> Tensor | None:
        return None if self.qparams is None else self.qparams[place]

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
            self.qparams = self.calculate_qparams(signed)
        if not int(self.fake_quant_enabled):
            return X
        if self.qparams is None:
            if not self.activation_post_process.min_val.numel():
                raise CalibrationError(
                    "this APoTFakeQuantize has no levels yet, and its observer is disabled. Call enable_observer() and "
                    "run one batch first, or load a state dict of one that has."
                )
            self.qparams = self.calculate_qparams(signed)
        return fake_quantize_function.apply(X, *self.qparams)  # type: ignore[no-any-return,no-untyped-call]

    def _apply(self, fn: Any, recurse: bool = True) -> APoTFakeQuantize:
        self.qparams = None  # computed again, on the device that the extremes are on
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.qparams = None
        super()._load_from_state_dict(*arguments)
