"""Plain torch: the random numbers of stochastic rounding.

They come from a counter, not from a state: a function of the seed, the row and the index in the row, so that every
machine draws the same ones in any order. Two rounds of multiply and xor-shift mix the counter, each with half of a
64-bit key; the key is a chain of splitmix64's finalizer over seed, row and the index's upper half.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def uniform(seed: int, rows: int, blocks: int, block_size: int, device: torch.device) -> Tensor:
    """One number of 24 bits in [0, 1) per element, a function of (seed, row, index in the row) alone."""
    index = torch.arange(blocks * block_size, dtype=torch.int64, device=device)
    row = torch.arange(rows, dtype=torch.int64, device=device).unsqueeze(1)
    key = mix64(mix64(mix64(torch.tensor(seed, dtype=torch.int64, device=device)) + row) + (index >> 32))
    x = (index & WORD) ^ (key & WORD)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = x ^ ((key >> 32) & WORD)
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    x = x ^ (x >> 16)
    return ((x >> 8).float() * 2.0**-24).view(rows, blocks, block_size)


def mix64(z: Tensor) -> Tensor:
    """The finalizer of splitmix64, on int64 that wraps."""
    z = z - 0x61C8864680B583EB
    z = (z ^ shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, count: int) -> Tensor:
    """A logical shift: torch's own keeps the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)
