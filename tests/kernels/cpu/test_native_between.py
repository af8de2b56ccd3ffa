"""Norms, gates and attention of one position in the compiled core: within the bounds of fp32 sums around fp64."""

from __future__ import annotations

import pytest
import torch

from cases import same_bits
from decoding_cases import ATTENTIONS, HALF_ATTENTIONS, NORMS, check_attention, check_gate, check_norm, drawn
from narrowcast.generate.kernels import Compiled, Torch
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.cpu.between import FLOATS, Between

kinds = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(params=binding.ISAS)
def core(request: pytest.FixtureRequest) -> Between:
    loaded, why = binding.load(request.param)
    if loaded is None:
        pytest.skip(why)
    return Between(loaded)


@kinds
@pytest.mark.parametrize(("batch", "width"), [*NORMS, (2, 768)])
def test_the_norm_of_a_sum_is_within_its_bound(core: Between, batch: int, width: int, dtype: torch.dtype) -> None:
    check_norm(batch, width, dtype, "cpu", core.add_norm)


@kinds
def test_a_gate_is_within_its_bound(core: Between, dtype: torch.dtype) -> None:
    check_gate(dtype, "cpu", core.gate)


@kinds
@pytest.mark.parametrize(("batch", "heads", "key_heads", "size", "positions", "at"), [*ATTENTIONS, *HALF_ATTENTIONS])
def test_attention_keeps_the_new_position_and_is_within_its_bound(
    core: Between,
    batch: int,
    heads: int,
    key_heads: int,
    size: int,
    positions: int,
    at: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    check_attention(batch, heads, key_heads, size, positions, at, dtype, "cpu", core.attend)


@kinds
def test_what_is_not_finite_stays_so(core: Between, dtype: torch.dtype) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], dtype=dtype)
    gated = core.gate(x, torch.ones_like(x))
    assert gated.isnan().tolist() == [[True, False, True, False]]  # -inf / (1 + inf)
    assert gated[0, 1] == float("inf")
    assert core.add_norm(x[:, ::3].contiguous(), None, torch.ones(2, dtype=dtype), 1e-5)[1].isnan().all()
    most = torch.full((1, 4), torch.finfo(dtype).max, dtype=dtype)
    assert core.add_norm(most, most, torch.ones(4, dtype=dtype), 1e-5)[0].isinf().all()


@kinds
def test_threads_change_no_bit(core: Between, dtype: torch.dtype) -> None:
    queries, keys = drawn(2, 512, dtype=dtype, device="cpu"), drawn(2, 512, dtype=dtype, device="cpu", seed=1)
    turns, at = torch.randn(600, 2, 32), torch.tensor([511, 599])
    held, before, results = drawn(2, 2, 8, 600, 64, dtype=dtype, device="cpu", seed=2), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(core.attend(queries, keys, keys, turns, at, *held.clone()))
    finally:
        torch.set_num_threads(before)
    assert same_bits(*results)


def test_dtypes_that_differ_are_left_to_torch() -> None:
    loaded, _ = binding.load()
    assert loaded is not None
    kernels, norm = Compiled(Between(loaded), torch.bfloat16), torch.nn.RMSNorm(8, 1e-5)
    x = torch.randn(2, 8)
    for found, meant in zip(kernels.add_norm(x, x, norm), Torch().add_norm(x, x, norm), strict=True):
        assert torch.equal(found, meant)
    assert torch.equal(kernels.gate(x, x), Torch().gate(x, x))
