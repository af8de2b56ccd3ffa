"""PyTorch's numbers, by name: the `LinearAPoT` of linear.py, which multiplies by codes.

Everything else of `narrowcast.compat.apot` gives PyTorch's numbers where its tests want them.
"""

from __future__ import annotations

from narrowcast.compat.apot.linear import LinearAPoT

__all__ = ["LinearAPoT"]
