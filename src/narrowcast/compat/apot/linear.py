"""PyTorch's `LinearAPoT`, under the name of its file and with its numbers: products with the *codes*.

`narrowcast.compat.apot.LinearAPoT` multiplies by the levels that codes stand for, as a linear layer does. PyTorch's
layer takes the unsigned grid, and multiplies the whole parts of an activation with the codes, in fp32: with those, no
scale makes the result a linear layer's, unless k is 1. Programs and tests that change only their imports get that here;
`legacy=False` gives the other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowcast.compat.apot import layer


class LinearAPoT(layer.LinearAPoT):
    """y = trunc(x) codes^T + bias, as PyTorch's test_linear.py wants it."""

    def __init__(self, weight2quantize: Tensor, b: int, k: int, bias: Tensor | None = None, **options: Any) -> None:
        super().__init__(weight2quantize, b, k, bias, **{"legacy": True, **options})
