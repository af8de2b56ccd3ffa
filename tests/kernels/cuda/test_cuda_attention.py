"""cuda/attend.cu on a CPU, as test_cuda_emulated.py runs the others: within the bounds of fp32 sums around fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_emulated import emulator, host

from decoding_cases import HALF_ATTENTIONS, check_attention
from narrowcast.kernels.cuda import attention

__all__ = ["emulator", "host"]  # fixtures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "heads", "key_heads", "size", "positions", "at"), HALF_ATTENTIONS)
def test_attention_keeps_the_new_position_and_is_within_its_bound(
    batch: int, heads: int, key_heads: int, size: int, positions: int, at: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_attention(batch, heads, key_heads, size, positions, at, dtype, "cpu", attention.attend)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "positions", "dtype"),
    [
        (2, 2, 128, 64, torch.float32),
        (2, 2, 96, 64, torch.bfloat16),
        (9, 1, 64, 64, torch.bfloat16),
        (2, 2, 128, 4096, torch.bfloat16),
    ],
)
def test_what_it_is_not_made_for_is_declined(
    heads: int, key_heads: int, size: int, positions: int, dtype: torch.dtype
) -> None:
    parts = [torch.zeros(1, count * size, dtype=dtype) for count in (heads, key_heads, key_heads)]
    cache = torch.zeros(1, key_heads, positions, size, dtype=dtype)
    turns, at = torch.zeros(positions, 2, size // 2), torch.zeros(1, dtype=torch.int64)
    assert attention.attend(*parts, turns, at, cache, cache.clone()) is None
