"""Rotary positions: pairs of a query or key are turned by angles that grow with the position.

Element i of the first half of a head and element i of its second half are a pair. Its angle at position p is
p * frequency[i], in fp32, as checkpoints were trained with. `linear` divides all frequencies by a factor; `llama3`
divides the low ones, leaves the high ones, and goes from one to the other in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowcast.generate.shape import Shape


def turns(shape: Shape, positions: int) -> Tensor:
    """Cosines and sines of every position: fp32 [positions, 2, head_size / 2]."""
    places = torch.arange(positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(places, _frequencies(shape.head_size, shape.rotary))
    return torch.stack((angles.cos(), angles.sin()), 1)


def turn(x: Tensor, by: Tensor) -> Tensor:
    """x [batch, heads, time, head_size], turned by rows of `turns` [batch or 1, time, 2, head_size / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = by.to(x.dtype).unsqueeze(1).unbind(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _frequencies(head_size: int, rotary: Mapping[str, Any]) -> Tensor:
    even = torch.arange(0, head_size, 2, dtype=torch.int64, device="cpu").float()
    plain = 1.0 / (float(rotary["rope_theta"]) ** (even / head_size))
    kind = rotary["rope_type"]
    if kind == "linear":
        return plain / float(rotary["factor"])
    return _llama3(plain, rotary) if kind == "llama3" else plain


def _llama3(plain: Tensor, rotary: Mapping[str, Any]) -> Tensor:
    low, high = float(rotary["low_freq_factor"]), float(rotary["high_freq_factor"])
    context, factor = float(rotary["original_max_position_embeddings"]), float(rotary["factor"])
    wavelengths = 2 * math.pi / plain
    # 0 where a wave is longer than context / low, 1 where it is shorter than context / high.
    share = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * plain / factor + share * plain
