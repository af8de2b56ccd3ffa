"""What a step of FSDP2 reduces: whose sum, divided how, after how many passes, in which codec or in none.

All scenes run in one launch, one after the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
import trained
from ranks import play, run
from sharded import STACK, Expected, Stack, every, shard, stack
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from trained import CODEC, SEED, STEPS, Given, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)


def summed(rank: int) -> Any:
    """torch asks for a sum, and divides it itself."""
    module = stack()
    for part in every(module):
        part.set_force_sum_reduction_for_comms(True)
    trained.compressed(module)
    return sharded.steps(module, rank)


def by_a_factor(rank: int) -> Any:
    """A divisor of one's own: torch asks for a sum of multiples, which gloo does not have."""
    module = stack()
    for part in every(module):
        part.set_gradient_divide_factor(5.0)
    trained.compressed(module)
    return sharded.steps(module, rank)


def accumulated(rank: int) -> Any:
    """Two backwards for each step; the first one is not synchronized. Each has half of the gradients."""
    module = stack()
    state = trained.compressed(module)
    found = []
    for step in range(STEPS):
        module.zero_grad()
        half = {name: g / 2 for name, g in given(STACK, rank, step).items()}
        module.set_requires_gradient_sync(False)
        module(half).backward()
        assert state.step == step
        module.set_requires_gradient_sync(True)
        module(half).backward()
        assert state.step == step + 1
        found.append(sharded.grads(module))
    return found


def compiled_blocks(rank: int) -> Any:
    module = Stack()
    module.first, module.second = (torch.compile(block, backend="eager") for block in (module.first, module.second))
    module = shard(module, "first", "second")
    trained.compressed(module)
    return [{key.replace("_orig_mod.", ""): g for key, g in one.items()} for one in sharded.steps(module, rank)]


def compiled_root(rank: int) -> Any:
    module = torch.compile(stack(), backend="eager")
    trained.compressed(module)
    return [{key.replace("_orig_mod.", ""): g for key, g in one.items()} for one in sharded.steps(module, rank)]


def twice_in_a_pass(rank: int) -> Any:
    """A block that is used twice in one forward."""
    torch.manual_seed(0)
    block = nn.Linear(40, 40)
    fully_shard(block)
    module = nn.Sequential(nn.Linear(8, 40), block, nn.Tanh(), block)
    fully_shard(module)
    state = trained.compressed(module)
    for step in range(2):
        module(trained.batch(rank, step)).square().mean().backward()
    return state.step, len(state.stats().buckets)


def dropped(rank: int) -> Any:
    """Each step leaves out one of two blocks, in turn: straight on, and resumed in the middle."""

    def train(module: nn.Module, steps: range) -> list[trained.Named]:
        found = []
        for step in steps:
            module.zero_grad()
            module(trained.batch(rank, step), step % 2).square().mean().backward()
            found.append(sharded.grads(module))
        return found

    found = []
    for called in (False, True):
        straight, other = sharded.dropping(called), sharded.dropping(called)
        state = trained.compressed(straight, "int4:stochastic=true")
        train(straight, range(3))
        loaded = trained.compressed(other, "int4:stochastic=true", seed=SEED + 1)
        loaded.load_state_dict(state.state_dict())
        found.append((train(straight, range(3, 5)), train(other, range(3, 5)), state.step, loaded.step))
    return found


def between_roots(rank: int) -> Any:
    """Two roots have a pass each in a step. It is saved between these in the second step, and resumed."""

    def made() -> Any:
        torch.manual_seed(0)
        module = nn.ModuleDict({"one": fully_shard(nn.Linear(40, 40)), "other": fully_shard(nn.Linear(40, 40))})
        return module, trained.compressed(module, "int4:stochastic=true", warmup_steps=1)

    def backward(module: Any, name: str, step: int) -> trained.Named:
        module[name].zero_grad()
        module[name](trained.batch(rank, step, 40)).square().mean().backward()
        return sharded.grads(module[name])

    (module, state), (other, loaded) = made(), made()
    for step in range(2):
        backward(module, "one", step)
        if step == 1:
            loaded.load_state_dict(state.state_dict())
            loaded.load_state_dict(loaded.state_dict())  # what was loaded is saved again as it is
        backward(module, "other", step)
    backward(other, "other", 1)
    ends = [[backward(each, name, 2) for name in ("one", "other")] for each in (module, other)]
    return ends, state.step, loaded.step


class Rerun(nn.Module):
    """Blocks that run again in backward, each in a pass within the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 40)
        self.blocks = nn.ModuleList(fully_shard(nn.Linear(40, 40)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def checkpointed(rank: int) -> Any:
    module = fully_shard(Rerun())
    state = trained.compressed(module)
    for step in range(2):
        module(trained.batch(rank, step)).square().mean().backward()
    return state.step, len(state.stats().buckets)


def warmed_up(rank: int) -> Any:
    module = stack()
    state = trained.compressed(module, "int2", warmup_steps=1, schedule=lambda step: "int4" if step == 2 else None)
    return sharded.steps(module, rank, 4), state.stats().uncompressed


def nothing_at_all(rank: int) -> Any:
    """codec=None: torch's own reduce-scatter, counted."""
    module = stack()
    state = trained.compressed(module, None, error_feedback=None)
    found = sharded.steps(module, rank, 1)
    return found, state.stats()


def chosen(rank: int) -> Any:
    module = stack()
    state = trained.compressed(module, "auto", error_feedback=None)
    return len(sharded.steps(module, rank, 1)), state.plan is not None, state.codec and state.codec.spec


def not_a_number(rank: int) -> Any:
    """An Inf and a NaN on one rank, each in a block of its own; then a step as any other."""
    module = fully_shard(Given({"weight": (8, 128)}))
    state = trained.compressed(module, "int4:block=128")
    gradients = given({"weight": (8, 128)}, rank, 0)
    if rank == 1:
        gradients["weight"][0, 3], gradients["weight"][7, 5] = float("inf"), float("nan")
    first = sharded.backward(module, gradients)
    return first, state.state_dict()["sender"], sharded.backward(module, given({"weight": (8, 128)}, rank, 1))


SCENES = {
    scene.__name__: scene
    for scene in (
        summed,
        by_a_factor,
        accumulated,
        compiled_blocks,
        compiled_root,
        twice_in_a_pass,
        dropped,
        between_roots,
        checkpointed,
        warmed_up,
        nothing_at_all,
        chosen,
        not_a_number,
    )
}


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return run(2, play, SCENES, timeout=150)


def test_a_sum_that_torch_divides_is_the_average(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(STEPS):
        right = expected.step([given(STACK, rank, step) for rank in range(2)], divisor=1, after=2)
        for of_rank in played:
            assert all(same_bits(of_rank["summed"][step][name], value) for name, value in right.items())


def test_a_divisor_of_ones_own_multiplies_the_sum(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(STEPS):
        right = expected.step([given(STACK, rank, step) for rank in range(2)], divisor=1)
        for of_rank in played:
            found = of_rank["by_a_factor"][step]
            assert all(same_bits(found[name], value * (1 / 5.0)) for name, value in right.items())


def test_gradients_of_several_passes_are_reduced_once(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(STEPS):
        halves = [{name: g / 2 for name, g in given(STACK, rank, step).items()} for rank in range(2)]
        right = expected.step([{name: half + half for name, half in of_rank.items()} for of_rank in halves])
        for of_rank in played:
            assert all(same_bits(of_rank["accumulated"][step][name], value) for name, value in right.items())


@pytest.mark.parametrize("name", ["compiled_blocks", "compiled_root"])
def test_compiled_modules_leave_the_same_bits(name: str, played: list[dict[str, Any]]) -> None:
    right = sharded.right(2)
    for of_rank in played:
        trained.agree(of_rank[name], right)


def test_a_block_that_is_used_twice_is_reduced_once_a_step(played: list[dict[str, Any]]) -> None:
    assert [of_rank["twice_in_a_pass"] for of_rank in played] == [(2, 2), (2, 2)]


def test_each_pass_is_a_step_of_its_own_whichever_blocks_it_leaves_out(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        for right, again, step, resumed in of_rank["dropped"]:
            assert (step, resumed) == (5, 5)
            trained.agree(again, right)


def test_a_step_that_is_saved_between_passes_of_its_roots_goes_on_in_the_next_pass(
    played: list[dict[str, Any]],
) -> None:
    for of_rank in played:
        (right, again), step, resumed = of_rank["between_roots"]
        assert (step, resumed) == (3, 3)
        trained.agree(again, right)


def test_backward_passes_within_a_backward_make_one_step(played: list[dict[str, Any]]) -> None:
    assert [of_rank["checkpointed"] for of_rank in played] == [(2, 3), (2, 3)]


def test_warm_up_and_a_schedule_send_without_loss_and_count_so(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec("int4"), 2, True)
    for step in range(4):
        right = expected.step([given(STACK, rank, step) for rank in range(2)], compressed=step == 2)
        for of_rank in played:
            assert all(same_bits(of_rank["warmed_up"][0][step][name], value) for name, value in right.items())
    assert played[0]["warmed_up"][1] == {"warm-up": 3, "schedule": 6}


def test_without_a_codec_torch_reduces_and_it_is_counted(played: list[dict[str, Any]]) -> None:
    right = Expected(nc.codec("raw"), 2, False).step([given(STACK, rank, 0) for rank in range(2)], compressed=False)
    found, stats = played[0]["nothing_at_all"]
    assert all(same_bits(found[0][name], value) for name, value in right.items())  # two terms: one order
    assert stats.uncompressed == {"codec=None": 3}
    assert (stats.ratio, stats.steps) == (1.0, 1)


def test_auto_makes_a_plan_and_every_rank_takes_the_same(played: list[dict[str, Any]]) -> None:
    assert played[0]["chosen"] == played[1]["chosen"]
    assert played[0]["chosen"][:2] == (1, True)


def test_what_is_not_finite_spoils_its_block_alone_and_no_residual(played: list[dict[str, Any]]) -> None:
    for first, residuals, second in (of_rank["not_a_number"] for of_rank in played):
        bad = ~first["weight"].isfinite()
        assert bad[0].all()  # a block that travelled
        assert bad[7].nonzero().flatten().tolist() == [5]  # one that rank 1 owns itself
        assert not bad[1:7].any()
        assert all(kept.isfinite().all() for kept in residuals.values())
        assert second["weight"].isfinite().all()
