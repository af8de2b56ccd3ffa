"""Products by decoded tiles that torch multiplies: in which dtype, on which CPU."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch

import narrowcast as nc
from narrowcast.kernels.operators import linear


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    linear._multiplies_bf16.cache_clear()
    yield
    linear._multiplies_bf16.cache_clear()


@pytest.mark.parametrize(
    ("machine", "capability", "instructions", "bf16"),
    [
        ("x86_64", "AVX512", True, True),
        ("x86_64", "AVX512", False, False),
        ("x86_64", "AVX2", True, False),  # told to do without
        ("AMD64", "DEFAULT", False, False),
        ("aarch64", "DEFAULT", False, True),
    ],
)
def test_bf16_is_multiplied_as_bf16_only_where_the_cpu_does_so_itself(
    machine: str, capability: str, instructions: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    assert linear._tile_dtype(torch.empty(1, dtype=torch.bfloat16)) == (torch.bfloat16 if bf16 else torch.float32)
    assert linear._tile_dtype(torch.empty(1, dtype=torch.float16)) == torch.float32
    for dtype in (torch.float32, torch.float64):
        assert linear._tile_dtype(torch.empty(1, dtype=dtype)) == dtype


@pytest.mark.parametrize("bf16", [True, False])
def test_weights_are_rounded_where_tiles_are_bf16_and_nowhere_else(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_multiplies_bf16", lambda: bf16)
    codec = nc.codec("raw")
    rows = codec.encode(torch.tensor([[1 + 2.0**-12, -1.0]]))
    x = torch.ones(513, 2, dtype=torch.bfloat16, requires_grad=True)  # more than rows are multiplied with as they are
    bias = torch.tensor([2.0**-13])
    y = codec.linear(x, rows, bias)
    assert y.dtype == torch.bfloat16
    assert y.detach().unique().tolist() == [2.0**-13 if bf16 else 2.0**-12 + 2.0**-13]
    y.backward(torch.full_like(y, 2.0))
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.unique().tolist() == [-2.0, 2.0]
