"""The observer of additive powers of two: it remembers the extremes of its data, and makes grids of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization.observer import ObserverBase

from narrowcast.compat.apot.apot_utils import apot_to_float, as_floats, float_to_apot
from narrowcast.errors import CalibrationError, GridError, PlotError, ShapeError
from narrowcast.nn.modules.base import keep_dtype

LARGEST = 1 << 16
"""The most entries that a grid may have: one of 16 bits, or a signed one of 10 bits with k=2."""

QParams = tuple[Tensor, Tensor, Tensor, Tensor]


class APoTObserver(ObserverBase):
    """The running minimum and maximum of what it is called with; `calculate_qparams` gives the grid that holds them."""

    b: int
    k: int
    n: int
    min_val: Tensor
    max_val: Tensor

    def __init__(
        self, b: int, k: int, dtype: torch.dtype = torch.quint8, factory_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(dtype)
        self.b, self.k = b, k
        device = (factory_kwargs or {}).get("device")
        self.register_buffer("min_val", torch.empty(0, dtype=torch.float32, device=device))
        self.register_buffer("max_val", torch.empty(0, dtype=torch.float32, device=device))

    def calculate_qparams(  # type: ignore[override]
        self, signed: bool = False, min_val: Tensor | None = None, max_val: Tensor | None = None
    ) -> QParams:
        """alpha, gamma, the levels in ascending order (fp32), and their codes.

        alpha is the largest magnitude seen, gamma what makes the top level alpha. `min_val` and `max_val` take the
        place of what was seen.
        """
        self.min_val = self.min_val if min_val is None else as_floats("min_val", min_val)
        self.max_val = self.max_val if max_val is None else as_floats("max_val", max_val)
        entries = sums(self.b, self.k, signed)
        self.n = self.b // self.k
        if not self.min_val.numel() or not self.max_val.numel():
            raise CalibrationError("no data was observed: call the observer on a tensor before calculate_qparams.")
        if self.min_val.numel() != 1 or self.max_val.numel() != 1:
            raise ShapeError(
                f"min_val and max_val: they have {self.min_val.numel()} and {self.max_val.numel()} elements, and a "
                "grid has one clip for all of a tensor. Pass one number each, such as x.min() and x.max()."
            )
        alpha = torch.maximum(-self.min_val, self.max_val)
        alpha = alpha.to(torch.promote_types(alpha.dtype, torch.float32))
        gamma = alpha / sum(2.0**-i for i in range(self.n))
        scaled = gamma.float().reshape(()) * entries.to(gamma.device)
        levels, codes = scaled.sort(stable=True)
        return alpha, gamma, levels, codes

    def _calculate_qparams(self, signed: bool, min_val: Tensor | None = None, max_val: Tensor | None = None) -> QParams:
        """PyTorch's name for `calculate_qparams`."""
        return self.calculate_qparams(signed, min_val, max_val)

    def quant_levels_visualization(self, signed: bool = False) -> None:
        """Show what numbers become, with matplotlib; `narrowcast inspect --plot` draws codecs into a file."""
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise PlotError("matplotlib draws this, and is not installed. Run: pip install matplotlib") from error
        alpha, _, levels, codes = self.calculate_qparams(signed)
        reach = float(alpha)
        x = torch.linspace(-reach if signed else 0.0, reach, 1001, dtype=torch.float32, device="cpu")
        y = apot_to_float(float_to_apot(x, levels.cpu(), codes.cpu(), reach), levels.cpu(), codes.cpu())
        pyplot.figure(figsize=(15, 10))
        pyplot.plot(x.tolist(), y.tolist())
        pyplot.title(f"APoT levels, b={self.b}, k={self.k}")
        pyplot.xlabel("before")
        pyplot.ylabel("quantized")
        pyplot.show()

    def forward(self, x_orig: Tensor) -> Tensor:
        if x_orig.numel() == 0:
            return x_orig
        low, high = torch.aminmax(x_orig.detach())
        if not bool(low.isfinite() & high.isfinite()):
            raise CalibrationError(
                "x: holds an infinity or a NaN, from which no grid can be chosen. Look for it in the data, or in the "
                "layers before. Nothing of it was remembered."
            )
        self.min_val = torch.minimum(low, self.min_val.to(low.device)) if self.min_val.numel() else low
        self.max_val = torch.maximum(high, self.max_val.to(high.device)) if self.max_val.numel() else high
        return x_orig

    def _apply(self, fn: Any, recurse: bool = True) -> APoTObserver:
        return super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-any-return,no-untyped-call]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name, buffer in self._buffers.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and buffer is not None:  # which is empty before data was seen
                self._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=buffer.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"b={self.b}, k={self.k}"


@lru_cache(maxsize=64)
def sums(b: int, k: int, signed: bool) -> Tensor:
    """Every sum of one value of each term, fp32, in the order of codes: the last term changes fastest."""
    _check(b, k, signed)
    n = b // k
    sums = torch.zeros(1, dtype=torch.float32, device="cpu")
    for i in range(n):
        powers = [2.0 ** -(i + j * n) for j in range(2**k - 1)]
        term = [*powers, 0.0, *(-power for power in reversed(powers))] if signed else [0.0, *powers]
        # Added in fp32, term by term, as PyTorch does: past 24 bits, sums that differ may round to the same.
        sums = (sums.view(-1, 1) + torch.tensor(term, dtype=torch.float32, device="cpu")).flatten()
    return sums


def _check(b: int, k: int, signed: bool) -> None:
    if k < 1 or b < 1 or b % k:
        raise GridError(
            f"b={b}, k={k}: a grid of b bits has b / k terms of k bits each, so k is at least 1 and divides b. Take "
            "k=2 and an even b, or k=1 for a uniform grid."
        )
    entries = (2 ** (k + 1) - 1 if signed else 2**k) ** (b // k)
    if entries > LARGEST:
        raise GridError(
            f"b={b}, k={k}, signed={signed}: this grid has {entries} entries, more than {LARGEST}. Signed grids of "
            "PyTorch's have (2**(k+1) - 1)**(b/k); the paper's have 2**b - 1: narrowcast.codec(\"apot8\"), for one."
        )
