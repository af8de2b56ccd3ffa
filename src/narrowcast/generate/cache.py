"""Keys and values of every position so far, in memory of a fixed size.

One `Cache` holds [layers, batch, key_heads, positions, head_size] twice. `prefill` takes the positions 0, 1, ... of one
sequence; `keep` takes one position of each. Sequences have lengths of their own, so no prompt is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.generate.shape import Shape


class Cache:
    """The memory of one generation."""

    def __init__(self, shape: Shape, batch: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.layers, batch, shape.key_heads, positions, shape.head_size)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.batch, self.positions = batch, positions

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def prefill(self, layer: int, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Keep the first positions of one sequence: [1, key_heads, time, head_size]."""
        time = keys.shape[2]
        self.keys[layer, sequence, :, :time] = keys[0]
        self.values[layer, sequence, :, :time] = values[0]

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: [batch, key_heads, positions, head_size]."""
        return self.keys[number], self.values[number]


def keep(cache: tuple[Tensor, Tensor], at: Tensor, keys: Tensor, values: Tensor) -> None:
    """Keep one position of each sequence, [batch, key_heads, 1, head_size], at positions `at` [batch] of a layer.

    Under autocast, keys and values come in another dtype than that of the cache.
    """
    rows = torch.arange(len(at), dtype=torch.int64, device=at.device)
    for held, new in zip(cache, (keys, values), strict=True):
        held[rows, :, at] = new[:, :, 0].to(held.dtype)


def seen(at: Tensor, longest: int) -> Tensor:
    """Which of the first `longest` positions a sequence at `at` [batch] attends to: bool [batch, 1, 1, longest]."""
    return (torch.arange(longest, dtype=torch.int64, device=at.device) <= at[:, None])[:, None, None, :]
