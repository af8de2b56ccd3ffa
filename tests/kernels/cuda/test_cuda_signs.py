"""cuda/signs.cu on a CPU, as test_cuda_emulated.py runs the others: the reference's bits, whatever the rows hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_emulated import emulator, host
from test_cuda_sums import rows_of

import narrowcast as nc
from narrowcast.kernels import reference
from narrowcast.kernels.cuda import signs

__all__ = ["emulator", "host"]  # fixtures

RECIPE = nc.codec("sign").recipe(torch.device("cpu"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any size, on what stands for a Hopper GPU; two warps, so that more than one block has work."""
    monkeypatch.setattr(signs, "FEWEST", 1)
    monkeypatch.setattr(signs, "WARPS", 2)
    monkeypatch.setattr(signs, "runs_on", lambda device: True)
    signs._compile.cache_clear()


def check(data: Tensor, numel: int, divisor: int = 1) -> None:
    out = torch.full((data.shape[1],), 0xA5, dtype=torch.uint8)
    assert signs.decode_sum_encode(out, data, numel, RECIPE, None, 0, divisor)
    assert torch.equal(out, reference.decode_sum_encode(data, numel, RECIPE, None, 0, divisor, 0))


def alike(ranks: int, numel: int) -> Tensor:
    """Rows whose blocks have scales of about the same size, some of them zero."""
    rows = torch.randn(ranks, numel, generator=torch.Generator().manual_seed(numel))
    rows *= torch.exp2((torch.arange(numel) // 64 % 60 - 30).float())
    rows *= torch.rand(ranks, 1, generator=torch.Generator().manual_seed(1)) * 8 + 0.1
    rows[0, torch.arange(numel) // 64 % 5 == 1] = 0.0
    rows[:, torch.arange(numel) // 64 % 11 == 3] = -0.0
    return rows


@pytest.mark.parametrize("ranks", [8, 2, 3, 4, 5, 7])
def test_blocks_whose_sums_are_exact_equal_the_reference_bit_for_bit(ranks: int) -> None:
    check(reference.encode(alike(ranks, 9000), RECIPE, 0), 9000)


@pytest.mark.parametrize(("ranks", "numel"), [(8, 5120), (8, 4999), (2, 1), (3, 65), (6, 127)])
def test_other_blocks_and_any_size_equal_the_reference_bit_for_bit(ranks: int, numel: int) -> None:
    check(reference.encode(rows_of(ranks, numel), RECIPE, 0), numel)


def test_scales_far_apart_and_any_bytes_are_summed_as_the_reference_does() -> None:
    rows = alike(8, 4096) * torch.tensor([1.0, 2.0**6, 2.0**7, 2.0**8, 2.0**9, 2.0**14, 2.0**30, 1.0])[:, None]
    for last in range(2, 9):
        check(reference.encode(rows[:last], RECIPE, 0), 4096)
    data = reference.encode(rows, RECIPE, 0)
    check(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)), 4096)


@pytest.mark.parametrize("divisor", [2, 8])
def test_sums_may_be_divided_by_powers_of_two(divisor: int) -> None:
    check(reference.encode(alike(8, 4170), RECIPE, 0), 4170, divisor)


def test_what_it_is_not_made_for_is_declined() -> None:
    data = reference.encode(alike(8, 2048), RECIPE, 0)
    out, own = data[0].clone(), torch.zeros(2048)
    assert not signs.decode_sum_encode(out, data, 2048, RECIPE, own, 0, 1)
    assert not signs.decode_sum_encode(out, data, 2048, RECIPE, None, 0, 3)
    assert not signs.decode_sum_encode(out, data[:1], 2048, RECIPE, None, 0, 1)
    for spec in ("sign:block=128", "sign:scale=fp16", "int4"):
        assert not signs.takes(nc.codec(spec).recipe(torch.device("cpu")), torch.device("cpu"))
    assert signs.takes(RECIPE, torch.device("cpu"))
