"""What a decoder does between its products, in the compiled core: norms, gates, attention of one position (between.h).

For fp32 and bf16 on the CPU. Everything is fp32 inside and rounded once.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache, lru_cache

import torch
from torch import Tensor

from narrowcast.kernels.cpu.binding import DTYPES, Native, check, function
from narrowcast.kernels.cpu.threads import GRAIN, team

FLOATS = (torch.float32, torch.bfloat16)


class Between:
    """The functions of one loaded core."""

    def __init__(self, kernel: Native) -> None:
        address, i32, i64 = c_void_p, c_int32, c_int64
        rows = (i32, i64, i64)
        self._isa = kernel.isa
        norm = (*rows, address, i64, address, i64, address, c_float, address, address, i32)
        self._nc_add_norm = function(kernel.library, "nc_add_norm", *norm)
        self._nc_gate = function(kernel.library, "nc_gate", *rows, address, i64, address, i64, address, i32)
        self._nc_attend = function(kernel.library, "nc_attend", i32, *(address,) * 10, i32, i32)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta [batch, width], and its norm."""
        batch, width = x.shape
        out = torch.empty(batch, width, dtype=x.dtype, device="cpu")
        total = x if delta is None else torch.empty_like(out)
        added = (None, 0) if delta is None else (delta.data_ptr(), delta.stride(0))
        given = DTYPES[x.dtype], batch, width, x.data_ptr(), x.stride(0), *added, weight.data_ptr(), eps
        check(self._nc_add_norm(*given, total.data_ptr(), out.data_ptr(), self._isa))
        return total, out

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        out = torch.empty(gate.shape, dtype=gate.dtype, device="cpu")
        given = DTYPES[gate.dtype], *gate.shape, gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0)
        check(self._nc_gate(*given, out.data_ptr(), self._isa))
        return out

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        turns: Tensor,
        at: Tensor,
        cache_keys: Tensor,
        cache_values: Tensor,
    ) -> Tensor:
        """As Kernels.attend (generate/kernels.py): all positions up to `at` [batch] of each sequence."""
        out = torch.empty(queries.shape, dtype=queries.dtype, device="cpu")
        held, size = cache_layout(cache_keys, queries.shape[1]), cache_keys.shape[3]
        strides = (c_int64 * 3)(queries.stride(0), keys.stride(0), values.stride(0))
        given = queries.data_ptr(), keys.data_ptr(), values.data_ptr(), ctypes.addressof(strides)
        where = turns.data_ptr(), at.data_ptr(), cache_keys.data_ptr(), cache_values.data_ptr(), out.data_ptr()
        threads = team(cache_keys[..., 0, 0].numel() * size * cache_keys.shape[2], GRAIN)
        check(self._nc_attend(DTYPES[queries.dtype], ctypes.addressof(held), *given, *where, threads, self._isa))
        return out


def cache_layout(keys: Tensor, queries: int) -> ctypes.Array[c_int64]:
    """`CacheLayout` of core/between.h, for keys [batch, key_heads, positions, size] and so many elements of queries."""
    return _layout(tuple(keys.shape), keys.stride(), queries)


@lru_cache(maxsize=64)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], queries: int) -> ctypes.Array[c_int64]:
    batch, key_heads, positions, size = shape
    return (c_int64 * 8)(batch, queries // size, key_heads, size, positions, *strides[:3])


@cache
def between(kernel: Native) -> Between:
    return Between(kernel)
