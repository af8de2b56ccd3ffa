"""Steps of FSDP2 that are skipped since a gradient is not finite: all ranks learn of it, and no residual keeps a trace.

A rank sees its own shards only, so the others have to tell it.
"""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
import trained
from ranks import play, run
from sharded import STACK, stack
from test_ddp_skipped import same_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trained import given

pytestmark = pytest.mark.timeout(180)

WORLD = 4
BAD_STEP, END = 2, 5


def _scene(rank: int, name: str, place: int, codec: str = "int4", bad_rank: int = 1, mesh: Any = None) -> Any:
    """Steps with a bad one among them, and the same without: the gradients of the rest, and the states."""
    found = []
    for spoiled in (True, False):
        module = stack() if mesh is None else stack(mesh=mesh)
        state = trained.compressed(module, codec)
        gradients, states = [], []
        for step in range(END):
            given_here = given(STACK, rank, step)
            if step == BAD_STEP and spoiled:
                if rank == bad_rank:
                    given_here[name].view(-1)[place] = float("inf")
                results = sharded.backward(module, given_here)
                assert not results[name].isfinite().all()
                assert results["first.even"].isfinite().all(), "another group"
            elif step == BAD_STEP:
                state.step += 1
            else:
                gradients.append(sharded.backward(module, given_here))
            states.append(state.state_dict())
        found.append((gradients, states))
    return found


def own_part(rank: int) -> Any:
    """It is in a part that its rank owns itself: nobody else ever sees it."""
    return _scene(rank, "second.odd", 0, bad_rank=0)


def travelled(rank: int) -> Any:
    return _scene(rank, "second.odd", 0, bad_rank=3)


def exempt(rank: int) -> Any:
    return _scene(rank, "second.bias", 20)


def last_group(rank: int) -> Any:
    return _scene(rank, "own", 5)


def stochastic(rank: int) -> Any:
    return _scene(rank, "second.odd", 700, codec="int4:stochastic=true")


def replicas(rank: int) -> Any:
    """HSDP: what is not finite in one replica is so in the average of all."""
    return _scene(rank, "second.odd", 700, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def _model(rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(fully_shard(nn.Linear(8, 96)), nn.Tanh(), fully_shard(nn.Linear(96, 96)), nn.Linear(96, 4))
    fully_shard(module)
    return module, trained.compressed(module, "int4")


def scaled(rank: int) -> Any:
    """A scaler, with skipped steps and without."""
    runs = []
    for skipped in ({0, 3}, set()):
        module, state = _model(rank)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scales, states = [], []
        for step in range(6):
            if step in {0, 3} and not skipped:
                state.step += 1
                continue
            optimizer.zero_grad()
            loss = module(trained.batch(rank, step)).square().mean()
            if step in skipped and rank == 2:
                loss = loss * float("nan")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            scaler.update(64.0)
            if step not in {0, 3}:
                states.append(state.state_dict())
        runs.append((scales, sharded.parameters_of(module), states))
    return runs


def two_passes(rank: int) -> Any:
    """A step of two backward passes, each for some of the groups; the second one is not finite. Once someone looks at
    statistics, and saves, between them."""
    found = []
    for spoiled, looks in ((True, False), (True, True), (False, False)):
        torch.manual_seed(0)
        first, second = (fully_shard(nn.Linear(64, 64)) for _ in range(2))
        state = trained.compressed(nn.ModuleList([first, second]), "int4")
        kept = []
        for step in range(3):
            if step == 1 and not spoiled:
                state.step += 1
                continue
            x = trained.batch(rank, step, 64)
            first(x).square().mean().backward()
            if looks:
                state.stats()
                state.state_dict()
            bad = float("inf") if step == 1 and rank == 1 else 1.0
            (second(x).square().mean() * bad).backward()
            kept.append(state.step)
        kept.append(state.state_dict())
        found.append(kept)
    return found


def dropped(rank: int) -> Any:
    """Each step leaves out one of two blocks, in turn; the one in the middle is not finite."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    found = {}
    for name, called, options in (("not called", False, {}), ("called", True, {}), ("replicas", False, {"mesh": mesh})):
        runs = []
        for spoiled in (True, False):
            module = sharded.dropping(called, **options)
            state = trained.compressed(module, "int4")
            gradients, states = [], []
            for step in range(END):
                if step == BAD_STEP and not spoiled:
                    state.step += 1
                    continue
                module.zero_grad()
                bad = float("inf") if step == BAD_STEP and rank == 1 else 1.0
                (module(trained.batch(rank, step), step % 2).square().mean() * bad).backward()
                if step != BAD_STEP:
                    gradients.append(sharded.grads(module))
            states.append(state.state_dict())
            runs.append((gradients, states))
        found[name] = runs
    return found


SCENES = {scene.__name__: scene for scene in (own_part, travelled, exempt, last_group, stochastic, replicas)}
OTHERS = {scene.__name__: scene for scene in (scaled, two_passes, dropped)}


def _play(rank: int) -> dict[str, Any]:
    return play(rank, {**SCENES, **OTHERS})


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return run(WORLD, _play, timeout=170)


@pytest.mark.parametrize("name", SCENES)
def test_a_step_that_is_not_finite_leaves_residuals_on_all_ranks_as_if_it_had_never_been(
    name: str, played: list[dict[str, Any]]
) -> None:
    for of_rank in played:
        (gradients, states), (right, right_states) = of_rank[name]
        trained.agree(gradients, right)
        assert all(same_state(one, other) for one, other in zip(states, right_states, strict=True))
        assert same_state(states[BAD_STEP], states[BAD_STEP - 1])
        assert not same_state(states[BAD_STEP + 1], states[BAD_STEP])


def test_training_with_a_scaler_that_skips_steps_is_training_without_these_steps(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        (scales, parameters, states), (_, right, right_states) = of_rank["scaled"]
        assert scales == [32.0, 64.0, 64.0, 32.0, 64.0, 64.0], "every rank's scaler has skipped two"
        trained.agree([parameters], [right])
        assert all(same_state(one, other) for one, other in zip(states, right_states, strict=True))


def test_a_step_of_several_passes_is_skipped_whole(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        *with_skip, without = of_rank["two_passes"]
        for kept in with_skip:
            assert [n for n in kept if isinstance(n, int)] == [1, 2, 3], "two passes, one step"
            assert same_state(kept[-1], without[-1])


@pytest.mark.parametrize("name", ["not called", "called", "replicas"])
def test_blocks_that_steps_leave_out_do_not_tie_these_steps_together(name: str, played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        (gradients, states), (right, right_states) = of_rank["dropped"][name]
        trained.agree(gradients, right)
        assert all(same_state(one, other) for one, other in zip(states, right_states, strict=True))
        assert states[0]["step"] == END
        assert all(kept.any() for kept in states[0]["sender"].values())
