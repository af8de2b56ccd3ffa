"""Steps of ranks that train alone: skipped, scaled, accumulated, by several optimizers; and what is awaited where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trained
from meeting_runs import made, same_on_all_ranks, vector
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.distributed.gradients.meetings import PUT_OFF

pytestmark = pytest.mark.timeout(180)


def _loss(ddp: Any, rank: int, step: int) -> torch.Tensor:
    x = trained.batch(rank, step)
    return (ddp(x) - x[:, :4].sin()).square().mean()


def _scaled(rank: int, bad: dict[int, list[int]]) -> Any:
    """A GradScaler whose loss is infinite in some steps of some ranks; every rank tells its loss after each step."""
    ddp, optimizer, state = made(sync_every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    same, steps = [], 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    optimizer.register_step_post_hook(count)
    for step in range(8):
        optimizer.zero_grad()
        loss = _loss(ddp, rank, step)
        scaler.scale(loss * float("inf") if step in bad.get(rank, []) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        dist.all_reduce(torch.ones(1))  # a collective of the user's own, right after the step
        same.append(same_on_all_ranks(ddp))
    return same, steps, scaler.get_scale(), state.meetings.count, bool(vector(ddp).isfinite().all())


@pytest.mark.parametrize(
    ("bad", "met"),
    [
        ({}, [2, 5]),
        ({1: [1]}, [2, 5]),  # in the middle of an interval: it takes part with one step less
        ({1: [2]}, [3, 6]),  # when the meeting is due: it is put off, and intervals begin anew
        ({0: [2], 1: [3]}, [4, 7]),
        ({0: [2, 3, 4], 1: [2, 3, 4]}, [5]),
    ],
)
def test_a_step_that_a_gradscaler_leaves_out_on_one_rank_puts_the_meeting_off_on_all(
    bad: dict[int, list[int]], met: list[int]
) -> None:
    for rank, (same, steps, scale, count, finite) in enumerate(run(2, _scaled, bad)):
        assert [step for step, alike in enumerate(same) if alike] == met
        assert count == len(met)
        assert finite
        left_out = len(bad.get(rank, []))
        assert steps == 8 - left_out
        assert scale == 4.0 / 2**left_out  # the scaler of each rank is its own


def _never_finite(rank: int) -> Any:
    ddp, optimizer, state = made(sync_every=2)
    met = []
    for step in range(2 * (2 + PUT_OFF)):
        optimizer.zero_grad()
        (_loss(ddp, rank, step) * (float("nan") if rank else 1.0)).backward()
        optimizer.step()
        met.append(state.meetings.count)
    return met, bool(vector(ddp).isnan().any())


def test_a_rank_that_is_lost_is_noticed_by_the_others_after_some_meetings_put_off() -> None:
    for met, lost in run(2, _never_finite):
        assert met == ([0] * (1 + PUT_OFF) + [1]) * 1 + [1] * (1 + PUT_OFF) + [2]
        assert lost


def _skipped(rank: int, ranks: list[int]) -> Any:
    """Some ranks leave out the step after which a meeting is due, by a rule of their own."""
    ddp, optimizer, state = made(sync_every=2)
    counts = []
    for step in range(5):
        optimizer.zero_grad()
        loss = _loss(ddp, rank, step)
        counts.append(state.meetings.count)
        loss.backward()
        if not (step == 1 and rank in ranks):
            optimizer.step()
    state.sync()
    return counts, same_on_all_ranks(ddp), state.meetings.count


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_a_rank_that_leaves_out_a_step_meets_before_its_next_forward(ranks: list[int]) -> None:
    for counts, same, count in run(2, _skipped, ranks):
        assert counts == [0, 0, 1, 1, 2]
        assert same
        assert count == 3


def _evaluated(rank: int) -> Any:
    """A forward without gradients, on one rank alone, does not meet."""
    ddp, optimizer, state = made(sync_every=1)
    optimizer.zero_grad()
    _loss(ddp, rank, 0).backward()
    if rank == 0:
        with torch.no_grad():
            ddp.module(trained.batch(0, 1))
            ddp(trained.batch(0, 1))
    dist.all_reduce(torch.ones(1))
    due = state.meetings.due
    optimizer.step()
    return due, state.meetings.due, same_on_all_ranks(ddp)


def test_a_forward_that_records_no_gradients_meets_nobody() -> None:
    assert run(2, _evaluated) == [(True, False, True)] * 2


def _accumulated(rank: int) -> Any:
    ddp, optimizer, state = made(sync_every=2)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            with ddp.no_sync():
                (_loss(ddp, rank, 10 * step + part) / 3).backward()
        (_loss(ddp, rank, 10 * step + 2) / 3).backward()
        optimizer.step()
    return state.step, state.meetings.count, same_on_all_ranks(ddp), vector(ddp)


def _accumulated_alone(rank: int) -> torch.Tensor:
    """The gradient of one step of the above, without DDP."""
    model = trained.mlp(width=40)
    for part in range(3):
        (_loss(model, rank, part) / 3).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def _accumulated_grads(rank: int) -> Any:
    ddp, optimizer, _ = made(sync_every=2)
    optimizer.zero_grad()
    for part in range(2):
        with ddp.no_sync():
            (_loss(ddp, rank, part) / 3).backward()
    (_loss(ddp, rank, 2) / 3).backward()
    grads = torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])
    return torch.equal(grads, _accumulated_alone(rank))


def test_an_accumulation_is_one_step() -> None:
    for step, count, same, _ in run(2, _accumulated):
        assert (step, count, same) == (4, 2, True)


def test_gradients_are_those_of_the_rank_to_the_bit() -> None:
    assert run(2, _accumulated_grads) == [True, True]


def _two_optimizers(rank: int, second: bool) -> Any:
    ddp = DDP(trained.mlp(width=40))
    matrices = [p for p in ddp.parameters() if p.dim() > 1]
    vectors = [p for p in ddp.parameters() if p.dim() <= 1]
    one, other = torch.optim.SGD(matrices, 0.05), torch.optim.AdamW(vectors, 0.01)
    state = nc.compress_gradients(ddp, "int8", sync_every=2, optimizer=[one, other])
    counts = []
    for step in range(4):
        one.zero_grad()
        other.zero_grad()
        _loss(ddp, rank, step).backward()
        one.step()
        counts.append(state.meetings.count)
        if second:
            other.step()
        counts.append(state.meetings.count)
    state.sync()
    return counts, same_on_all_ranks(ddp)


def test_of_several_optimizers_all_step_before_ranks_meet() -> None:
    for counts, same in run(2, _two_optimizers, True):
        assert counts == [0, 0, 0, 1, 1, 1, 1, 2]
        assert same
    for counts, same in run(2, _two_optimizers, False):  # one of them never does: before the next forward, then
        assert counts == [0, 0, 0, 0, 1, 1, 1, 1]
        assert same


def _hostile(rank: int) -> Any:
    ddp, optimizer, state = made(sync_every=2)
    state.sync()  # before any step
    optimizer.step()  # without a backward, and without gradients
    assert state.meetings.count == 0
    trained.train(ddp, rank, range(1), optimizer)
    optimizer.step()  # once more with the same gradients: no step is counted
    assert state.meetings.since == 1
    optimizer.zero_grad()
    _loss(ddp, rank, 1).backward()
    optimizer.zero_grad()  # before the step, which then does nothing
    optimizer.step()
    assert state.meetings.count == 1
    assert same_on_all_ranks(ddp)
    state.sync()
    state.sync()  # there is nothing left to do
    assert state.meetings.count == 1
    trained.train(ddp, rank, range(2, 3), optimizer)
    state.sync()  # in the middle of an interval: the next one begins here
    assert same_on_all_ranks(ddp)
    trained.train(ddp, rank, range(3, 5), optimizer)
    return state.meetings.count, state.step, same_on_all_ranks(ddp)


def test_calls_in_odd_orders_leave_ranks_in_step() -> None:
    assert run(2, _hostile) == [(3, 5, True)] * 2


def _plain(rank: int) -> Any:
    ddp = DDP(trained.mlp(width=40))
    state = nc.compress_gradients(ddp, "int8")
    trained.train(ddp, rank, range(2), trained.sgd(ddp))
    before = vector(ddp)
    state.sync()
    return torch.equal(before, vector(ddp)), same_on_all_ranks(ddp)


def test_sync_has_nothing_to_do_where_gradients_travel_in_every_step() -> None:
    assert run(2, _plain) == [(True, True)] * 2


def _broken_backward(rank: int) -> Any:
    """A backward that breaks off on all ranks is no step."""
    ddp, optimizer, state = made(sync_every=2)
    trained.train(ddp, rank, range(1), optimizer)
    loss = _loss(ddp, rank, 1)
    handle = next(iter(ddp.parameters())).register_hook(_fail)
    failed = False
    try:
        loss.backward()
    except ZeroDivisionError:
        failed = True
    handle.remove()
    return failed, state.step, state.meetings.since


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_backward_that_breaks_off_is_no_step() -> None:
    assert run(2, _broken_backward) == [(True, 1, 1)] * 2
