"""Residuals that go on with other ranks: what they add to the average stays, and owners own what is theirs now."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import faults
import pytest
import torch
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.distributed.gradients.error_feedback.redistribution import redistributed
from narrowcast.distributed.gradients.error_feedback.residuals import Holder
from narrowcast.distributed.gradients.layout import sections_of
from narrowcast.errors import SpecError, StateDictError

pytestmark = pytest.mark.timeout(120)

WORLDS = {
    "1": [Holder(1, 0)],
    "2": [Holder(2, rank) for rank in range(2)],
    "3": [Holder(3, rank) for rank in range(3)],
    "5": [Holder(5, rank) for rank in range(5)],
    "2 hosts of 2": [Holder(4, rank, 2, rank // 2, rank % 2) for rank in range(4)],
    "3 hosts of 2": [Holder(6, rank, 3, rank // 2, rank % 2) for rank in range(6)],
}
NUMELS = {"exact": 128 * 60, "ragged": 10_007, "small": 700}


def _sizes(name: str, holder: Holder) -> tuple[int, int, int]:
    """Where a rank's elements of a parameter begin, how many it sends and how many it owns: as layout.py has it."""
    section = sections_of(name, NUMELS[name], holder.ranks)[0]
    start = holder.place * holder.hosts * section.part
    if holder.hosts:
        section = section.share(holder.place, holder.hosts)
    row = holder.host if holder.hosts else holder.rank
    return start, section.numel, max(0, min(section.part, section.numel - row * section.part))


def _states(world: str) -> list[dict[str, Any]]:
    """States of all ranks, whose residuals say which rank and element they are of."""
    states = []
    for holder in WORLDS[world]:
        state: dict[str, Any] = {"version": 1, "step": 5, "seed": 3, "codec": "int4", "error_feedback": True}
        state |= {**asdict(holder), "sender": {}, "owner": {}}
        for name in NUMELS:
            start, sent, owned = _sizes(name, holder)
            generator = torch.Generator().manual_seed(holder.rank)
            state["sender"][name] = torch.randn(sent, generator=generator)
            first = (
                start
                + (holder.host if holder.hosts else holder.rank) * sections_of(name, NUMELS[name], holder.ranks)[0].part
            )
            state["owner"][name] = torch.arange(first, first + owned, dtype=torch.float32)
        states.append(state)
    return states


def _average(states: list[Any], world: str, name: str) -> torch.Tensor:
    """What all senders' residuals add to the average."""
    total = torch.zeros(NUMELS[name], dtype=torch.float64)
    for state, holder in zip(states, WORLDS[world], strict=True):
        start, sent, _ = _sizes(name, holder)
        total[start : start + sent] += state["sender"][name].double()
    return total / len(states)


@pytest.mark.parametrize("there", WORLDS)
@pytest.mark.parametrize("here", WORLDS)
def test_what_residuals_add_stays_and_owners_are_those_of_now(there: str, here: str) -> None:
    states = _states(there)
    dealt = [redistributed(states, holder) for holder in WORLDS[here]]
    for name, numel in NUMELS.items():
        owners = torch.cat(
            [state["owner"][name] for state in sorted(dealt, key=lambda s: (s["place"], s["host"], s["rank"]))]
        )
        assert torch.equal(owners, torch.arange(numel, dtype=torch.float32))
        for state, holder in zip(dealt, WORLDS[here], strict=True):
            _, sent, owned = _sizes(name, holder)
            assert (state["sender"][name].numel(), state["owner"][name].numel()) == (sent, owned)
        before, after = _average(states, there, name), _average(dealt, here, name)
        # Each sum of up to 6 terms, a product and a division round to 2**-24 of values under 8.
        assert float((before - after).abs().max()) <= 8 * 8 * 2.0**-24


def _trained(rank: int, states: list[Any] | None, how: str | None) -> Any:
    ddp = DDP(trained.mlp(width=25), bucket_cap_mb=0.002)
    compression = nc.compress_gradients(ddp, "int4")
    if states is not None:
        compression.load_state_dict(states if how == "redistribute" else states[0], residuals=how)  # type: ignore[arg-type]
    first = compression.step
    trained.train(ddp, rank, range(first, first + 2), trained.sgd(ddp))
    assert compression.step == first + 2
    return compression.state_dict()


def test_runs_go_on_with_more_and_with_fewer_ranks() -> None:
    two = run(2, _trained, None, None)
    assert any(float(residual.abs().max()) for residual in two[0]["sender"].values())
    three = run(3, _trained, two, "redistribute")
    assert [state["step"] for state in three] == [4] * 3
    again = run(2, _trained, three, "redistribute")
    assert [(state["step"], state["ranks"]) for state in again] == [(6, 2)] * 2
    dropped = run(3, _trained, two, "drop")
    assert [state["step"] for state in dropped] == [4] * 3


def _gradients(rank: int, states: list[Any] | None, factors: list[float]) -> list[dict[str, torch.Tensor]]:
    """The gradients of one batch, times each factor, one step after the other."""
    ddp = DDP(trained.mlp(width=25), bucket_cap_mb=0.002)
    compression = nc.compress_gradients(ddp, "int4")
    if states is not None:
        compression.load_state_dict(states, residuals="redistribute")
    batch = trained.batch(rank, 0)
    steps = []
    for factor in factors:
        ddp.zero_grad()
        (ddp(batch).sum() * factor).backward()
        steps.append({name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None})
    assert not compression.state_dict()["sender"]
    assert "everyone" not in compression.state_dict() or states is None
    return steps


def test_one_rank_adds_the_residuals_of_all_to_the_first_step_that_is_applied() -> None:
    states = run(3, _trained, None, None)
    (plain,) = run(1, _gradients, None, [1.0])[0]
    overflow, first, second = run(1, _gradients, states, [float("nan"), 1.0, 1.0])[0]
    assert states[0]["sender"]
    for name, gradient in plain.items():
        expected = gradient.clone()
        if name in states[0]["sender"]:
            senders = torch.stack([state["sender"][name].double() for state in states]).mean(0)
            owners = torch.cat([state["owner"][name] for state in states]).double()
            assert float((senders + owners).abs().max()) > 0
            expected = (gradient.double().flatten() + senders + owners).view_as(gradient).float()
        assert not overflow[name].isfinite().all()
        # Three divisions by 3, four sums and the last rounding, each of 2**-24 of values below 64.
        assert expected.abs().max() < 64
        assert float((first[name] - expected).abs().max()) <= 8 * 64 * 2.0**-24
        assert torch.equal(second[name], gradient)


def _wrong(rank: int, states: list[Any]) -> list[BaseException | None]:
    compression = nc.compress_gradients(DDP(trained.mlp(width=25)), "int4")
    before = compression.state_dict()
    tries: list[tuple[Any, Any]] = [
        (states, None),
        (states[0], "redistribute"),
        (states[:1], "redistribute"),
        ([states[0], states[0]], "redistribute"),
        ([states[0], {**states[1], "step": 9}], "redistribute"),
        (states, "share"),
        ([], "drop"),
        ([1, 2], "redistribute"),
    ]
    errors = [faults.error_of(lambda s=state, h=how: compression.load_state_dict(s, h))[0] for state, how in tries]  # type: ignore[misc]
    assert compression.state_dict() == before
    return errors


def test_what_cannot_be_dealt_is_refused() -> None:
    states = run(2, _trained, None, None)
    for errors in run(2, _wrong, states):
        assert [type(error) for error in errors] == [StateDictError] * 5 + [SpecError] + [StateDictError] * 2
        assert "rank 0 of 2" in str(errors[2])


def test_states_that_were_not_asked_for_yet_are_saved_whole() -> None:
    states = run(2, _trained, None, None)
    for pending in run(3, _pending, states):
        assert pending["step"] == 2
        assert len(pending["everyone"]) == 2
        assert run(1, _alone, pending) == [3]


def _pending(rank: int, states: list[Any]) -> Any:
    compression = nc.GradientCompression("int4", model=trained.mlp(width=25))
    compression.load_state_dict(states, residuals="redistribute")
    return compression.state_dict()


def _alone(rank: int, state: Any) -> int:
    ddp = DDP(trained.mlp(width=25))
    compression = nc.compress_gradients(ddp, "int4")
    compression.load_state_dict(state)
    trained.train(ddp, rank, range(2, 3), trained.sgd(ddp))
    return int(compression.step)
