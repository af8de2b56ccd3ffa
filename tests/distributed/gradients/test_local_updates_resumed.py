"""Ranks that train alone, after a resume: the same bits, or an error that says what is missing."""

from __future__ import annotations

import io
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
import trained
from meeting_runs import same_on_all_ranks, vector
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.errors import MismatchError, StateDictError

pytestmark = pytest.mark.timeout(180)


class _Run:
    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.ddp = DDP(trained.mlp(width=40).to(options.pop("dtype", torch.float32)), bucket_cap_mb=0.002)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), 0.01)
        options = {"sync_every": 4, "warmup_steps": 2, "codec": "int4", "outer_momentum": 0.5, **options}
        self.state = nc.compress_gradients(self.ddp, optimizer=self.optimizer, **options)

    def train(self, first: int, end: int) -> trained.Named:
        for step in range(first, end):
            x = trained.batch(self.rank, step)
            self.optimizer.zero_grad()
            dtype = next(self.ddp.parameters()).dtype
            (self.ddp(x.to(dtype)) - x[:, :4].sin()).square().mean().backward()
            self.optimizer.step()
        return trained.parameters_of(self.ddp)

    def save(self) -> bytes:
        return trained.saved(self.ddp.module, self.optimizer, self.state)

    def load(self, data: bytes) -> None:
        trained.load(data, self.ddp.module, self.optimizer, self.state)


def _resumed(rank: int, stop: int, options: dict[str, Any]) -> Any:
    first = _Run(rank, **options)
    first.train(0, stop)
    data = first.save()
    second = _Run(rank, **options)
    second.load(data)
    again = second.save()
    third = _Run(rank, **options)
    third.load(again)  # a state that was loaded and saved at once
    runs = [each.train(stop, 21) for each in (first, second, third)]
    return runs, [each.state.meetings.count for each in (first, second, third)], first.state.stats().meetings


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6, 7, 15])
def test_a_run_that_is_resumed_gives_the_same_bits(stop: int) -> None:
    """In the warm-up, at its end, in the middle of an interval, at a meeting, and after one."""
    for (one, other, third), counts, _ in run(3, _resumed, stop, {}):
        trained.agree([one, one], [other, third])
        assert counts == [4, 4, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": "growing"},
        {"dtype": torch.bfloat16},
        {"codec": "sign", "outer_momentum": 0.0, "residual_codec": "int8"},
        {"codec": "int8:stochastic=true", "seed": 5},
    ],
    ids=str,
)
def test_so_does_one_of_another_kind(options: dict[str, Any]) -> None:
    for stop in (7, 10):
        for (one, other, third), _, _ in run(2, _resumed, stop, options):
            trained.agree([one, one], [other, third])


def _between_backward_and_step(rank: int) -> Any:
    """Saved when the meeting is due and the step is still to come."""
    first = _Run(rank, warmup_steps=0)
    first.train(0, 3)
    x = trained.batch(rank, 3)
    first.optimizer.zero_grad()
    (first.ddp(x) - x[:, :4].sin()).square().mean().backward()
    data = first.save()
    grads = [p.grad.clone() for p in first.ddp.parameters() if p.grad is not None]
    second = _Run(rank, warmup_steps=0)
    second.load(data)
    for parameter, grad in zip(second.ddp.parameters(), grads, strict=True):
        parameter.grad = grad
    first.optimizer.step()
    second.optimizer.step()
    return vector(first.ddp), vector(second.ddp), same_on_all_ranks(second.ddp)


def test_a_meeting_that_was_due_when_a_run_was_saved_is_held() -> None:
    for one, other, same in run(2, _between_backward_and_step):
        assert same
        assert torch.equal(one, other)


def _of_the_first_rank(rank: int) -> Any:
    """In the middle of an interval, with the model of the first rank on all."""
    first = _Run(rank)
    first.train(0, 5)
    model = [first.ddp.module.state_dict()]
    dist.broadcast_object_list(model, src=0)
    second = _Run(rank)
    second.ddp.module.load_state_dict(model[0])
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.state.load_state_dict(first.state.state_dict())
    return faults.error_of(lambda: second.train(5, 12))[0]


def test_the_model_of_another_rank_is_noticed_in_the_middle_of_an_interval() -> None:
    mine, error = run(2, _of_the_first_rank)
    # The first rank has its own model, and learns of it from the other one when they meet.
    assert mine is not None
    assert type(error) is StateDictError, error
    assert "3 steps after a meeting, when each rank has parameters of its own" in str(error)
    assert "call compression.sync() before you save" in str(error)


def _one_file_for_all(rank: int) -> Any:
    """After sync() the first rank's model and compression serve all ranks, residuals and moments aside."""
    first = _Run(rank)
    first.train(0, 5)
    first.state.sync()
    file = [first.save()]
    dist.broadcast_object_list(file, src=0)
    model, _, state = torch.load(io.BytesIO(file[0]))
    second = _Run(rank)
    second.ddp.module.load_state_dict(model)
    second.state.load_state_dict(state, residuals="drop")
    second.train(5, 9)
    return same_on_all_ranks(second.ddp), second.state.meetings.count


def test_after_sync_one_file_serves_all_ranks() -> None:
    assert run(2, _one_file_for_all) == [(True, 2)] * 2


def _states(rank: int, steps: int) -> Any:
    each = _Run(rank)
    each.train(0, steps)
    return each.state.state_dict(), each.ddp.module.state_dict()


def _on_other_ranks(rank: int, states: list[Any], model: Any, how: str) -> Any:
    each = _Run(rank)
    each.ddp.module.load_state_dict(model)
    error = faults.error_of(
        lambda: each.state.load_state_dict(states if how == "redistribute" else states[0], residuals=how)
    )[0]
    if error is None:
        each.train(6, 10)
    return error, same_on_all_ranks(each.ddp) if error is None else None, each.state.meetings.count


@pytest.mark.parametrize("how", ["redistribute", "drop"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_state_goes_to_other_ranks_after_a_meeting_only(how: str, ranks: int) -> None:
    met, apart = run(2, _states, 6), run(2, _states, 7)
    for error, same, count in run(ranks, _on_other_ranks, [state for state, _ in met], met[0][1], how):
        assert error is None
        assert same
        assert count == 2
    for error, _, _ in run(ranks, _on_other_ranks, [state for state, _ in apart], apart[0][1], how):
        assert type(error) is StateDictError
        assert "for the same rank of as many" in str(error)


def _of_another_kind(rank: int) -> Any:
    ddp = DDP(trained.mlp(width=40))
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    gradients = nc.compress_gradients(ddp, "int4", error_feedback=True)
    trained.train(ddp, rank, range(3), optimizer)
    meeting = _Run(rank)
    meeting.train(0, 6)
    errors = [
        faults.error_of(lambda: meeting.state.load_state_dict(gradients.state_dict()))[0],
        faults.error_of(lambda: gradients.load_state_dict(meeting.state.state_dict()))[0],
    ]
    meeting.state.load_state_dict(gradients.state_dict(), residuals="drop")
    meeting.train(3, 5)
    return errors, meeting.state.meetings.since


def test_residuals_of_gradients_are_not_those_of_changes() -> None:
    for errors, since in run(2, _of_another_kind):
        for error in errors:
            assert type(error) is StateDictError, error
            assert "sync_every=" in str(error)
        assert since == 2


def _at_other_steps(rank: int) -> Any:
    first = _Run(rank)
    first.train(0, 5)
    early = first.save()
    first.train(5, 6)
    late = first.save()
    second = _Run(rank)
    second.load(early if rank else late)
    return faults.error_of(lambda: second.train(6, 12))[0]


def test_states_of_different_steps_are_noticed() -> None:
    for error in run(2, _at_other_steps):
        assert type(error) is MismatchError, error
        assert "step=" in str(error)
