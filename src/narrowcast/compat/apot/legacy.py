"""`LinearAPoT` with PyTorch's numbers, under its own name: for programs and tests that change only their import.

Everything else of `narrowcast.compat.apot` gives PyTorch's numbers where its tests want them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowcast.compat.apot import linear


class LinearAPoT(linear.LinearAPoT):
    """`LinearAPoT(..., legacy=True)`: products with the codes, as test_linear.py wants them."""

    def __init__(self, weight2quantize: Tensor, b: int, k: int, bias: Tensor | None = None, **options: Any) -> None:
        super().__init__(weight2quantize, b, k, bias, **{"legacy": True, **options})
