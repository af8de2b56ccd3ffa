"""Steps of a momentum that travels: accumulated, skipped, clipped, and scaled by a GradScaler."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import torch
import trained
from momentum_runs import SHAPES, STEPS, WARMUP, made, step_once
from ranks import run
from torch import nn

from cases import same_bits
from narrowcast.errors import CollectiveError, OptimizerError

pytestmark = pytest.mark.timeout(180)


def _accumulated(rank: int, synchronized: bool) -> Any:
    ddp, optimizer, _ = made()
    for step in range(WARMUP):
        step_once(ddp, optimizer, rank, step)
    ddp.zero_grad()

    def twice() -> None:
        halves = [{name: g / 2 for name, g in trained.given(SHAPES, rank, WARMUP).items()}] * 2
        if synchronized:
            ddp(halves[0]).backward()
        else:
            with ddp.no_sync():
                ddp(halves[0]).backward()
        ddp(halves[1]).backward()

    error, _ = faults.error_of(twice)
    return error, trained.grads(ddp), optimizer


def _accumulated_without_sync(rank: int) -> Any:
    error, grads, _ = _accumulated(rank, synchronized=False)
    assert error is None
    ddp, optimizer, _ = made()
    for step in range(WARMUP):
        step_once(ddp, optimizer, rank, step)
    # Half of a denormal may be rounded, to zero too, and a sign is all that travels of it.
    whole = {name: g / 2 + g / 2 for name, g in trained.given(SHAPES, rank, WARMUP).items()}
    return grads, trained.backward(ddp, whole)


def test_gradients_may_be_accumulated_under_no_sync() -> None:
    for accumulated, at_once in run(2, _accumulated_without_sync):
        trained.agree([accumulated], [at_once])


def _accumulated_with_sync(rank: int) -> Any:
    error, _, optimizer = _accumulated(rank, synchronized=True)
    ddp, optimizer, _ = made()
    for step in range(WARMUP + 1):
        step_once(ddp, optimizer, rank, step)  # another model is not disturbed
    return error


def test_a_momentum_that_no_step_has_used_is_not_added_to() -> None:
    for error in run(2, _accumulated_with_sync):
        assert isinstance(error, CollectiveError), error
        assert "no_sync" in str(error)
        assert "optimizer.step()" in str(error)


def _skipped(rank: int, set_to_none: bool) -> Any:
    """A step that the script does not take, by a rule of its own: the next one is as if it had not been."""
    found = []
    for skips in (True, False):
        ddp, optimizer, compression = made()
        for step in range(WARMUP + 2):
            grads = step_once(ddp, optimizer, rank, step)
        if skips:
            ddp.zero_grad(set_to_none=set_to_none)
            ddp(trained.given(SHAPES, rank, 77)).backward()
            ddp.zero_grad(set_to_none=set_to_none)
        compression.forget()
        ddp.zero_grad(set_to_none=set_to_none)
        ddp(trained.given(SHAPES, rank, STEPS)).backward()
        optimizer.step()
        found.append((trained.grads(ddp), trained.parameters_of(ddp)))
        del grads
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_is_not_taken_leaves_the_momentum_as_it_was(set_to_none: bool) -> None:
    for skipped, plain in run(2, _skipped, set_to_none):
        trained.agree(skipped, plain)


def _clipped(rank: int) -> Any:
    ddp, optimizer, _ = made(lr=0.01)
    for step in range(WARMUP):
        step_once(ddp, optimizer, rank, step)
    trained.backward(ddp, trained.given(SHAPES, rank, WARMUP))
    before = trained.grads(ddp)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
    optimizer.step()
    momentum = optimizer.momentum_of(ddp.module.get_parameter("even"))
    return float(norm), before["even"], momentum.clone()


def test_clipping_clips_the_momentum() -> None:
    for norm, before, momentum in run(2, _clipped):
        assert norm > 0.5
        assert same_bits(momentum, before * torch.clamp(torch.tensor(0.5) / (norm + 1e-6), max=1.0))


def _scaled(rank: int, scaling: bool, fused: bool, overflow: bool) -> Any:
    """With a GradScaler: its scale is a power of two, and nothing here under- or overflows, so no bit changes."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaling)
    ddp, optimizer, _ = made(lr=0.01, fused=fused, scaler=scaler if scaling else None)
    for step in range(STEPS):
        gradients = trained.given(SHAPES, rank, step)
        if overflow and step == 5:
            if not scaling:
                continue
            gradients["odd"][0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(ddp(gradients)).backward()
        scaler.step(optimizer)
        scaler.update()
    return trained.parameters_of(ddp), scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_changes_no_bit(fused: bool, overflow: bool) -> None:
    scaled, plain = run(2, _scaled, True, fused, overflow), run(2, _scaled, False, fused, overflow)
    for (found, scale), (meant, _) in zip(scaled, plain, strict=True):
        assert scale != 2.0**10  # it did change
        trained.agree([found], [meant])


def _scaler_not_named(rank: int, fused: bool) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ddp, optimizer, _ = made(fused=fused)
    errors = []
    for step in range(WARMUP + 1):
        optimizer.zero_grad()
        scaler.scale(ddp(trained.given(SHAPES, rank, step))).backward()
        before = trained.parameters_of(ddp)
        errors.append(faults.error_of(lambda: scaler.step(optimizer))[0])
        after = trained.parameters_of(ddp)
        scaler.update()
    return errors, all(same_bits(before[name], after[name]) for name in before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_was_not_named_is_refused_when_the_momentum_is_due(fused: bool) -> None:
    for errors, unchanged in run(2, _scaler_not_named, fused):
        assert errors[:WARMUP] == [None] * WARMUP
        assert isinstance(errors[-1], OptimizerError), errors
        assert "scaler=" in str(errors[-1])
        assert unchanged
