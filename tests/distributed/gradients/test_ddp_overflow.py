"""Gradients that are not finite under DDP: a GradScaler skips the step on all ranks, and no residual keeps a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import SHAPES, Given, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)


def _scaled(rank: int) -> Any:
    """Five steps with a scaler; rank 1 meets an Inf in the second and a NaN in the third."""
    ddp = DDP(trained.mlp())
    state = nc.compress_gradients(ddp, "int4")
    optimizer, scaler = trained.sgd(ddp), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        loss = ddp(trained.batch(rank, step)).square().mean()
        if rank == 1 and step in (1, 2):
            loss = loss * (float("inf") if step == 1 else float("nan"))
        scaler.scale(loss).backward()
        finite = all(bool(g.isfinite().all()) for g in trained.grads(ddp).values())
        scaler.step(optimizer)
        scaler.update()
        kept = state.state_dict()
        tidy = all(bool(r.isfinite().all()) for which in ("sender", "owner") for r in kept[which].values())
        found.append((finite, scaler.get_scale(), tidy, trained.parameters_of(ddp)))
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_the_next_one_trains() -> None:
    found = run(2, _scaled, timeout=150)
    for of_rank in found:
        assert [finite for finite, *_ in of_rank] == [True, False, False, True, True]
        assert [scale for _, scale, *_ in of_rank] == [1024.0, 512.0, 256.0, 256.0, 256.0]
        assert all(tidy for _, _, tidy, _ in of_rank), "residuals stay finite"
        names = of_rank[0][3]
        changed = [
            [not same_bits(of_rank[step][3][name], of_rank[step - 1][3][name]) for name in names]
            for step in (1, 2, 3, 4)
        ]
        assert [all(c) for c in changed] == [False, False, True, True]
        assert not any(changed[0] + changed[1])
    for one, other in zip(*found, strict=True):
        assert all(same_bits(one[3][name], other[3][name]) for name in one[3])


def _one_bad_element(rank: int, codec: str, dtype: torch.dtype) -> Any:
    ddp = DDP(Given(SHAPES, dtype))
    state = nc.compress_gradients(ddp, codec, error_feedback=True)
    found = []
    for step, bad in enumerate((float("inf"), float("nan"), None)):
        gradients = given(SHAPES, rank, step, dtype)
        if bad is not None and rank == 1:
            for name in ("bias", "odd", "prime"):
                gradients[name].view(-1)[-1] = bad  # the last rows are owned by the last ranks
                gradients[name].view(-1)[0] = bad
        found.append(trained.backward(ddp, gradients))
    kept = state.state_dict()
    return found, [r for which in ("sender", "owner") for r in kept[which].values()]


def _bad_elements(rank: int) -> Any:
    return [_one_bad_element(rank, codec, dtype) for codec, dtype in BAD]


BAD = [("int4", torch.float32), ("sign", torch.float32), ("fp8_e4m3", torch.float32), ("int4", torch.float16)]


def test_one_bad_element_is_not_finite_on_every_rank_and_leaves_no_trace() -> None:
    found = run(3, _bad_elements, timeout=150)
    for of_rank in found:
        for steps, residuals in of_rank:
            for step in steps[:2]:
                for name in ("bias", "odd", "prime"):
                    assert not step[name].view(-1)[0].isfinite()
                    assert not step[name].view(-1)[-1].isfinite()
                assert bool(step["even"].isfinite().all()), "others do not notice"
            assert all(bool(gradient.isfinite().all()) for gradient in steps[2].values())
            assert residuals
            assert all(bool(residual.isfinite().all()) for residual in residuals)
