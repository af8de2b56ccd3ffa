"""`Codec.linear` on each device: operands that lie in unusual ways, and products of nothing.

On a GPU these shapes go through every kernel of kernels/cuda that multiplies; on a CPU the same tests run on the core.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from sum_bound import bound

SPECS = ("int8", "int4", "nf4", "fp8_e4m3")
pytestmark = pytest.mark.untried


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def assert_right(y: Tensor, x: Tensor, codec: nc.Codec, data: Tensor, bias: Tensor | None = None) -> None:
    weight = codec.decode(data.cpu(), x.shape[1], dtype=torch.float64)
    exact, allowed = bound(x.cpu(), weight, None if bias is None else bias.cpu())
    assert y.dtype == x.dtype
    assert ((y.cpu().double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("batch", [1, 24, 64])
@pytest.mark.parametrize("spec", SPECS)
def test_a_bias_is_added_however_its_elements_lie(device: str, spec: str, batch: int) -> None:
    if device == "cuda":
        assert nc.which_kernel(spec, device, operation="linear") == "cuda"
    codec = nc.codec(spec)
    for columns, dtype in ((512, torch.bfloat16), (4096, torch.float16)):
        data = codec.encode(drawn(264, columns).to(device))
        x = drawn(batch, columns, seed=1).to(device, dtype)
        apart = torch.full((264, 3), torch.nan, device=device)
        apart[:, 1] = drawn(264, seed=2).to(device)
        one = torch.full((1,), 5.0, device=device)
        for bias in (one, one[0], one.to(dtype), one.expand(264), apart[:, 1], apart[:, 1].to(dtype)):
            assert_right(codec.linear(x, data, bias), x, codec, data, bias.expand(264))


@pytest.mark.parametrize("batch", [1, 24, 64])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_weights_may_be_one_and_the_same(device: str, spec: str, batch: int) -> None:
    codec = nc.codec(spec)
    data = codec.encode(drawn(1, 4096).to(device)).expand(264, -1)
    x = drawn(batch, 4096, seed=1).to(device, torch.bfloat16)
    assert_right(codec.linear(x, data), x, codec, data)


@pytest.mark.parametrize(("batch", "apart"), [(5, 2**29 + 64), (48, 2**26 + 64)])
@pytest.mark.parametrize("spec", [*SPECS, "int3"])
def test_rows_of_x_may_lie_further_apart_than_32_bits_count(device: str, spec: str, batch: int, apart: int) -> None:
    codec = nc.codec(spec)
    memory = torch.empty((batch - 1) * apart + 512, dtype=torch.float16, device=device)
    x = memory.as_strided((batch, 512), (apart, 1))
    x.copy_(drawn(batch, 512, seed=1))
    data = codec.encode(drawn(264, 512).to(device))
    assert_right(codec.linear(x, data), x, codec, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [*SPECS, "int4:block=row", "raw", "sign"])
def test_a_product_of_no_elements_is_the_bias_or_zero(device: str, spec: str, dtype: torch.dtype) -> None:
    codec = nc.codec(spec)
    data, bias = codec.encode(torch.empty(8, 0, device=device)), drawn(8).to(device, dtype)
    for batch in (1, 5, 50, 200):
        x = torch.empty(batch, 0, dtype=dtype, device=device)
        assert torch.equal(codec.linear(x, data, bias), bias.expand(batch, 8))
        assert torch.equal(codec.linear(x, data), torch.zeros(batch, 8, dtype=dtype, device=device))
