"""Steps of a travelling momentum that are left out, lost or taken by some ranks only; and runs that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
import trained
from ranks import outcomes_of, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import CollectiveError, SpecError

pytestmark = pytest.mark.timeout(180)

WARMUP, STEPS = 3, 12


def _made(model: nn.Module | None = None, **ddp_options: Any) -> Any:
    ddp = DDP(model or trained.mlp(width=40), bucket_cap_mb=0.002, **ddp_options)
    optimizer = nc.optim.AdamW(ddp.parameters(), 0.01)
    options: Any = {"warmup_steps": WARMUP, "seed": trained.SEED}
    return ddp, optimizer, nc.compress_gradients(ddp, "sign", momentum=optimizer, **options)


# -- steps that are left out ------------------------------------------------------------------------------------------


def _left_out(rank: int, saved: bool) -> Any:
    found = []
    for skips in (True, False):
        ddp, optimizer, compression = _made()
        trained.train(ddp, rank, range(7), optimizer)
        if skips:
            ddp(trained.batch(rank, 77)).sum().backward()
            compression.stats()
            optimizer.zero_grad()
        if saved:
            state = compression.state_dict()
            compression.load_state_dict(state)
        trained.train(ddp, rank, range(7, STEPS), optimizer)
        found.append((trained.parameters_of(ddp), compression.state_dict()["sender"]))
    return found


@pytest.mark.parametrize("saved", [False, True])
def test_a_step_that_no_optimizer_takes_leaves_no_residuals(saved: bool) -> None:
    for skipped, plain in run(2, _left_out, saved):
        trained.agree(skipped, plain)


def _wrapped_anew(rank: int, steps: int, leaves_out_last: bool) -> Any:
    """After so many steps the model is wrapped and compressed anew, with its optimizer; a later step is left out."""
    found = []
    for skips in (True, False):
        model = trained.mlp(width=40)
        optimizer = nc.optim.AdamW(model.parameters(), 0.01)
        options: Any = {"momentum": optimizer, "warmup_steps": WARMUP, "seed": trained.SEED}
        ddp = DDP(model)
        first = nc.compress_gradients(ddp, "sign", **options)
        trained.train(ddp, rank, range(steps), optimizer)
        if skips and leaves_out_last:
            ddp(trained.batch(rank, 77)).sum().backward()
            optimizer.zero_grad()
        ddp = DDP(model)
        compression = nc.compress_gradients(ddp, "sign", **options)
        compression.load_state_dict(first.state_dict())
        trained.train(ddp, rank, range(steps, 7), optimizer)
        if skips and not leaves_out_last:
            ddp(trained.batch(rank, 77)).sum().backward()
            optimizer.zero_grad()
        trained.train(ddp, rank, range(7, STEPS), optimizer)
        found.append((trained.parameters_of(ddp), compression.state_dict()["sender"]))
    return found


@pytest.mark.parametrize(("steps", "leaves_out_last"), [(WARMUP, False), (5, False), (5, True)])
def test_a_step_that_is_left_out_leaves_no_residuals_in_a_model_that_was_wrapped_anew(
    steps: int, leaves_out_last: bool
) -> None:
    for skipped, plain in run(2, _wrapped_anew, steps, leaves_out_last):
        trained.agree(skipped, plain)


def _joined(rank: int) -> Any:
    ddp, optimizer, _ = _made()

    def uneven() -> None:
        with ddp.join():
            trained.train(ddp, rank, range(5 + rank), optimizer)

    return faults.error_of(uneven)[0]


def test_join_is_refused_since_a_rank_without_inputs_takes_no_step() -> None:
    for error in run(2, _joined):
        assert type(error) is SpecError, error
        assert str(error).startswith("join() with momentum=: ")


# -- parameters that are not used -------------------------------------------------------------------------------------


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = trained.mlp(width=40)[0], nn.Linear(40, 40), nn.Linear(40, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                generator = torch.Generator().manual_seed(parameter.numel())
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        hidden = self.trunk(x).tanh()
        return self.head(hidden + self.branch(hidden).tanh() if uses else hidden)


def _unused(rank: int, set_to_none: bool, as_view: bool) -> Any:
    """No rank uses the branch in steps 6 and 7; rank 0 alone does in step 8."""
    ddp, optimizer, _ = _made(_Branch(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
    weight, alone = ddp.module.branch.weight, []
    for step in range(STEPS):
        uses = step not in (6, 7) and (step != 8 or rank == 0)
        before = weight.detach().clone(), optimizer.momentum_of(weight).clone()
        optimizer.zero_grad(set_to_none=set_to_none)
        x = trained.batch(rank, step)
        (ddp(x, uses) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()
        alone.append(same_bits(before[0], weight.detach()) and same_bits(before[1], optimizer.momentum_of(weight)))
    return alone, trained.parameters_of(ddp)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_that_no_rank_used_is_left_alone(set_to_none: bool) -> None:
    first, second = run(2, _unused, set_to_none, False)
    assert first[0] == [step in (6, 7) for step in range(STEPS)]
    trained.agree([first[1]], [second[1]])


def test_where_gradients_are_views_of_buckets_ranks_agree_on_unused_parameters_too() -> None:
    first, second = run(2, _unused, False, True)
    trained.agree([first[1]], [second[1]])


# -- runs that are killed ---------------------------------------------------------------------------------------------


def _trained(rank: int, folder: Path | None, dies_in: int | None = None) -> trained.Named:
    """Train from the last checkpoint that all ranks have, saving every fourth step; rank 1 may die in a backward."""
    ddp, optimizer, compression = _made()
    parts = ddp.module, optimizer, compression
    done = [{int(file.name) for file in folder.glob(f"{each}/*")} for each in range(3)] if folder else [{0}]
    first = max(set.intersection(*done) | {0})
    if first:
        assert folder is not None
        for part, state in zip(parts, torch.load(folder / f"{rank}/{first}"), strict=True):
            part.load_state_dict(state)
    for step in range(first, 14):
        if step == dies_in and rank == 1:
            ddp.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        trained.train(ddp, rank, range(step, step + 1), optimizer)
        if folder and step % 4 == 3:
            torch.save([part.state_dict() for part in parts], folder / f"part {rank}")
            (folder / f"part {rank}").rename(folder / f"{rank}/{step + 1}")
    return trained.parameters_of(ddp)


def test_a_run_of_three_ranks_that_is_killed_twice_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """In step 5, where the momentum travels already, and in step 10."""
    for rank in range(3):
        (tmp_path / f"{rank}").mkdir()
    for dies_in in (5, 10):
        outcomes = outcomes_of(3, _trained, tmp_path, dies_in)
        assert outcomes[1].exitcode == -signal.SIGKILL
        for rank in (0, 2):
            assert isinstance(outcomes[rank].error, CollectiveError), outcomes[rank].trace
    resumed = run(3, _trained, tmp_path)
    for found, meant in zip(resumed, run(3, _trained, None), strict=True):
        trained.agree([found], [meant])
