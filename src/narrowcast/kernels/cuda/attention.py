"""Attention of one new position of each sequence by attend.cu, where it is made for that; triton/attention.py has the
contract, and takes the rest: fp32, heads of other sizes, and long caches of few heads, which it divides."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowcast.kernels.cuda import nvrtc
from narrowcast.kernels.cuda.formats import KINDS, sources
from narrowcast.kernels.cuda.launch import reading
from narrowcast.kernels.cuda.nvrtc import Int

SIZES = (64, 128)
MOST = 8
"""Queries to a key."""

LONGEST = 1024
"""Positions that one block takes by itself where there are not `MANY` blocks."""

MANY = 132


def takes(queries: Tensor, key_cache: Tensor) -> bool:
    """Whether attend.cu is made for this."""
    batch, key_heads, positions, size = key_cache.shape
    heads = queries.shape[1] // size
    if queries.dtype not in (torch.float16, torch.bfloat16) or size not in SIZES or heads // key_heads > MOST:
        return False
    return positions <= LONGEST or batch * key_heads >= MANY


def division(blocks: int, heads: int) -> tuple[int, int, int]:
    """Warps of a block, positions that its teams read at a time, and threads that a processor should hold.

    One query to a key: the best of three on an H200 (bench/results/decode-h200.md); more were not timed.
    """
    if heads == 1:
        return (16, 4, 512) if blocks < MANY else (8, 2, 1024)
    return (8, 2, 512 if heads <= 4 else 256)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, turns: Tensor, at: Tensor, key_cache: Tensor, value_cache: Tensor
) -> Tensor | None:
    """Keep the new keys and values, and attend: [batch, heads * size]; None where attend.cu is not made for it."""
    parts = (queries, keys, values, key_cache, value_cache)
    aligned = all(part.data_ptr() % 16 == 0 and part.stride(0) % 8 == 0 for part in parts)
    if not takes(queries, key_cache) or not aligned or at.dtype != torch.int64:
        return None
    batch, key_heads, _, size = key_cache.shape
    heads = queries.shape[1] // size // key_heads
    warps, ahead, resident = division(batch * key_heads, heads)
    defines = {"X": KINDS[queries.dtype], "SIZE": size, "HEADS": heads, "KS": warps, "UNROLL": ahead}
    defines |= {"RESIDENT": resident, "SCALE": 0, "BLOCK": 0, "BIAS": -1}
    out = torch.empty(batch, queries.shape[1], dtype=queries.dtype, device=queries.device)
    with torch.cuda.device(queries.device):
        kernel = nvrtc.function(
            sources("attend"), "attend", (*defines.items(), *reading()), queries.device.index, early=True
        )
        strides = (part.stride(0) for part in (queries, keys, values, key_cache))
        given = (queries, keys, out, values, turns, at, key_cache, value_cache, Int(key_heads))
        kernel(batch * key_heads, 32 * warps, 0, (*given, *strides, key_cache.stride(1)))
    return out
