"""A momentum that travels, after a resume: the same bits, or an error that says what is missing."""

from __future__ import annotations

import io
from typing import Any

import faults
import pytest
import torch
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.errors import NarrowcastError, StateDictError

pytestmark = pytest.mark.timeout(180)


class _Run:
    def __init__(self, rank: int, *, state: str | None = None, **options: Any) -> None:
        self.rank = rank
        self.ddp = DDP(trained.mlp(width=72 if state else 40), bucket_cap_mb=0.002)
        self.optimizer = nc.optim.AdamW(self.ddp.parameters(), 0.01, state=state)
        options = {"warmup_steps": 2, "refresh": "growing", **options}
        self.state = nc.compress_gradients(self.ddp, "sign", momentum=self.optimizer, **options)

    def train(self, first: int, end: int) -> trained.Named:
        trained.train(self.ddp, self.rank, range(first, end), self.optimizer)
        return trained.parameters_of(self.ddp)

    def save(self) -> bytes:
        return trained.saved(self.ddp.module, self.optimizer, self.state)

    def load(self, data: bytes) -> None:
        trained.load(data, self.ddp.module, self.optimizer, self.state)


def _resumed(rank: int, stop: int, state: str | None = None) -> Any:
    first = _Run(rank, state=state)
    first.train(0, stop)
    data = first.save()
    second = _Run(rank, state=state)
    second.load(data)
    held = {key for each in first.optimizer.state.values() for key in each}
    return first.train(stop, 24), second.train(stop, 24), held


@pytest.mark.parametrize("stop", [1, 2, 5, 17, 18])
def test_a_run_that_is_resumed_gives_the_same_bits(stop: int) -> None:
    """In the warm-up, at its end, in the middle, and around a step that refreshes the second moment."""
    for one, other, _ in run(3, _resumed, stop):
        trained.agree([one], [other])


def test_a_momentum_that_is_held_in_rows_travels_too() -> None:
    results = run(2, _resumed, 5, "int8")
    for one, other, held in results:
        assert "exp_avg_rows" in held
        trained.agree([one], [other])
    trained.agree([results[0][0]], [results[1][0]])


def _resumed_without_the_optimizer(rank: int) -> Any:
    first = _Run(rank)
    first.train(0, 5)
    second = _Run(rank)
    second.state.load_state_dict(first.state.state_dict())
    return faults.error_of(lambda: second.train(5, 6))[0]


def test_a_run_that_is_resumed_without_its_optimizer_is_told_so() -> None:
    for error in run(2, _resumed_without_the_optimizer):
        assert isinstance(error, NarrowcastError), error
        assert "state_dict" in str(error)


def _of_gradients(rank: int) -> Any:
    ddp = DDP(trained.mlp(width=40))
    state = nc.compress_gradients(ddp, "int4")
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    trained.train(ddp, rank, range(3), optimizer)
    momentum = _Run(rank)
    momentum.optimizer.load_state_dict(optimizer.state_dict())
    error, _ = faults.error_of(lambda: momentum.state.load_state_dict(state.state_dict()))
    momentum.state.load_state_dict(state.state_dict(), residuals="drop")
    momentum.train(0, 4)
    return error, momentum.state.state_dict()["momentum"]


def test_residuals_of_gradients_are_none_of_the_momentum() -> None:
    for error, of_momentum in run(2, _of_gradients):
        assert isinstance(error, StateDictError)
        assert "momentum=" in str(error)
        assert of_momentum is True


def _saved(rank: int) -> bytes:
    first = _Run(rank)
    first.train(0, 5)
    return first.save()


def _on_other_ranks(rank: int, saved: list[bytes]) -> Any:
    """Model and optimizer of any rank, and the residuals of all: as they are, dealt anew, and dropped."""
    (model, optimizer, _), *_ = loaded = [torch.load(io.BytesIO(data)) for data in saved]
    states = [state for _, _, state in loaded]
    error, _ = faults.error_of(lambda: _Run(rank).state.load_state_dict(states[rank]))
    ends = []
    for given, residuals in ((states, "redistribute"), (states[0], "drop")):
        second = _Run(rank)
        second.ddp.module.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        second.state.load_state_dict(given, residuals=residuals)
        ends.append(second.train(5, 9))
    return error, ends


def test_a_momentum_goes_on_with_fewer_ranks_if_it_is_told_what_becomes_of_residuals() -> None:
    saved = run(3, _saved)
    (error, ends), (other_error, other_ends) = run(2, _on_other_ranks, saved)
    for each in (error, other_error):
        assert isinstance(each, StateDictError), each
        assert 'residuals="redistribute"' in str(each)
    trained.agree(ends, other_ends)
    assert all(value.isfinite().all() for end in ends for value in end.values())
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0])  # residuals count
