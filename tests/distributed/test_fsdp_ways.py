"""The ways in which FSDP2 is used: each leaves the bits that the model of a step says.

All scenes of one number of ranks run in one launch, one after the other; each is a test of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
import trained
from ranks import run
from sharded import SHAPES, STACK, Expected, Stack, every, shard, stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from trained import Given, Named, given

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import MismatchError

pytestmark = pytest.mark.timeout(180)

CODEC, SEED, STEPS = "int4:block=row", 11, 3


def _steps(module: nn.Module, rank: int, steps: int = STEPS, first: int = 0) -> list[Named]:
    return [sharded.backward(module, given(STACK, rank, step)) for step in range(first, first + steps)]


def _right(world: int, steps: int = STEPS, codec: str = CODEC) -> list[Named]:
    expected = Expected(nc.codec(codec), world, True, [SEED] * world)
    return [expected.step([given(STACK, rank, step) for rank in range(world)]) for step in range(steps)]


def _compressed(module: Any, codec: Any = CODEC, **options: Any) -> Any:
    return nc.compress_gradients(module, codec, **{"error_feedback": True, "seed": SEED, **options})


# -- options of FSDP2 -------------------------------------------------------------------------------------------------


def plain(rank: int) -> Any:
    module = stack()
    _compressed(module)
    return _steps(module, rank)


def one_group(rank: int) -> Any:
    module = shard(Stack())
    _compressed(module)
    return _steps(module, rank)


def two_blocks_in_a_group(rank: int) -> Any:
    module = Stack()
    fully_shard([module.second, module.first])
    fully_shard(module)
    _compressed(module)
    return _steps(module, rank)


def never_resharded(rank: int) -> Any:
    module = stack(reshard_after_forward=False)
    _compressed(module)
    return _steps(module, rank)


def always_resharded(rank: int) -> Any:
    module = stack(reshard_after_forward=True)
    _compressed(module)
    return _steps(module, rank)


def asynchronous_unshard(rank: int) -> Any:
    module = stack()
    module._set_unshard_async_op(True)
    _compressed(module, gather="raw")
    return _steps(module, rank)


def gathered_without_loss(rank: int) -> Any:
    module = stack(reshard_after_forward=True)
    _compressed(module, gather="raw")
    return _steps(module, rank)


def from_meta(rank: int) -> Any:
    with torch.device("meta"):
        module = Stack()
    module = shard(module, "first", "second")
    _compressed(module)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return _steps(module, rank)


def resumed(rank: int) -> Any:
    """The last step by another model, which loads what the first one saved."""
    before = stack()
    state = _compressed(before)
    found = _steps(before, rank, STEPS - 1)
    saved = state.state_dict()
    after = stack()
    fresh = _compressed(after, seed=SEED + 1)
    fresh.load_state_dict(saved)
    assert fresh.step == STEPS - 1
    return found + _steps(after, rank, 1, STEPS - 1)


SAME = {
    scene.__name__: scene
    for scene in (
        plain,
        one_group,
        two_blocks_in_a_group,
        never_resharded,
        always_resharded,
        asynchronous_unshard,
        gathered_without_loss,
        from_meta,
        resumed,
    )
}


@pytest.fixture(scope="module")
def same() -> list[dict[str, Any]]:
    return run(3, sharded.play, SAME, timeout=150)


@pytest.mark.parametrize("name", SAME)
def test_every_way_leaves_the_same_bits(name: str, same: list[dict[str, Any]]) -> None:
    right = _right(3)
    for of_rank in same:
        for found, meant in zip(of_rank[name], right, strict=True):
            assert found.keys() == meant.keys()
            assert all(same_bits(found[key], meant[key]) for key in meant)


# -- other sums, fewer parameters, other ranks ------------------------------------------------------------------------


def summed(rank: int) -> Any:
    """torch asks for a sum, and divides it itself."""
    module = stack()
    for part in every(module):
        part.set_force_sum_reduction_for_comms(True)
    _compressed(module)
    return _steps(module, rank)


def by_a_factor(rank: int) -> Any:
    """A divisor of one's own: torch asks for a sum of multiples, which gloo does not have."""
    module = stack()
    for part in every(module):
        part.set_gradient_divide_factor(5.0)
    _compressed(module)
    return _steps(module, rank)


def accumulated(rank: int) -> Any:
    """Two backwards for each step; the first one is not synchronized. Each has half of the gradients."""
    module = stack()
    state = _compressed(module)
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
    _compressed(module)
    return [{key.replace("_orig_mod.", ""): g for key, g in one.items()} for one in _steps(module, rank)]


def compiled_root(rank: int) -> Any:
    module = torch.compile(stack(), backend="eager")
    _compressed(module)
    return [{key.replace("_orig_mod.", ""): g for key, g in one.items()} for one in _steps(module, rank)]


def some(rank: int) -> Any:
    """Each step with a part of the parameters; those left out may be as large as those that are there."""
    module = fully_shard(Given(SHAPES))
    _compressed(module)
    found = []
    for step, names in enumerate(SOME):
        gradients = {name: g for name, g in given(SHAPES, rank, step).items() if name in names}
        found.append(sharded.backward(module, gradients))
    return found


SOME = [list(SHAPES), ["even", "odd", "bias"], ["even", "again", "prime"], list(SHAPES), ["norm"]]


def frozen(rank: int) -> Any:
    """Parameters that are not trained have no residual."""
    module = Given(SHAPES)
    module.get_parameter("odd").requires_grad_(False)
    fully_shard(module)
    state = _compressed(module)
    found = [sharded.backward(module, given(SHAPES, rank, step)) for step in range(2)]
    return found, sorted(state.state_dict()["sender"])


def columns(rank: int) -> Any:
    """Sharded by columns: rank r has columns of each row."""
    module = Given({"wide": (30, 64), "bias": (64,)})
    fully_shard(module, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    state = _compressed(module, "int4")
    gradient = given({"wide": (30, 64), "bias": (64,)}, rank, 0)
    return sharded.backward(module, gradient), state.state_dict()["sender"]["wide"]


def twice_in_a_pass(rank: int) -> Any:
    """A block that is used twice in one forward."""
    torch.manual_seed(0)
    block = nn.Linear(40, 40)
    fully_shard(block)
    module = nn.Sequential(nn.Linear(8, 40), block, nn.Tanh(), block)
    fully_shard(module)
    state = _compressed(module)
    for step in range(2):
        module(trained.batch(rank, step)).square().mean().backward()
    return state.step, len(state.stats().buckets)


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
    state = _compressed(module)
    for step in range(2):
        module(trained.batch(rank, step)).square().mean().backward()
    return state.step, len(state.stats().buckets)


def warmed_up(rank: int) -> Any:
    module = stack()
    state = _compressed(module, "int2", warmup_steps=1, schedule=lambda step: "int4" if step == 2 else None)
    return _steps(module, rank, 4), state.stats().uncompressed


def nothing_at_all(rank: int) -> Any:
    """codec=None: torch's own reduce-scatter, counted."""
    module = stack()
    state = _compressed(module, None, error_feedback=None)
    found = _steps(module, rank, 1)
    return found, state.stats()


def chosen(rank: int) -> Any:
    module = stack()
    state = _compressed(module, "auto", error_feedback=None)
    return len(_steps(module, rank, 1)), state.plan is not None, state.codec and state.codec.spec


def not_a_number(rank: int) -> Any:
    """An Inf and a NaN on one rank, each in a block of its own; then a step as any other."""
    module = fully_shard(Given({"weight": (8, 128)}))
    state = _compressed(module, "int4:block=128")
    gradients = given({"weight": (8, 128)}, rank, 0)
    if rank == 1:
        gradients["weight"][0, 3], gradients["weight"][7, 5] = float("inf"), float("nan")
    first = sharded.backward(module, gradients)
    return first, state.state_dict()["sender"], sharded.backward(module, given({"weight": (8, 128)}, rank, 1))


def half_of_the_ranks(rank: int) -> Any:
    """Two models, each on a mesh of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    module = stack(mesh=mesh["shard"])
    _compressed(module)
    return _steps(module, rank)


def replicated(rank: int) -> Any:
    """HSDP: compressed among the ranks of a replica, not between replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = stack(mesh=mesh)
    state = _compressed(module)
    found = _steps(module, rank)
    return found, (state.state_dict()["ranks"], state.state_dict()["rank"])


def disagreed(rank: int) -> Any:
    """A parameter that has a gradient on one rank only, and otherwise a step as any other."""
    module = fully_shard(Given(SHAPES))
    state = _compressed(module)
    sharded.backward(module, given(SHAPES, rank, 0))
    before = state.state_dict()["sender"]
    gradients = given(SHAPES, rank, 1)
    if rank == 1:
        del gradients["odd"]
    with pytest.raises(MismatchError) as caught:
        sharded.backward(module, gradients)
    return before, state.state_dict()["sender"], str(caught.value)


MORE = {
    scene.__name__: scene
    for scene in (
        summed,
        by_a_factor,
        accumulated,
        compiled_blocks,
        compiled_root,
        some,
        frozen,
        columns,
        twice_in_a_pass,
        checkpointed,
        warmed_up,
        nothing_at_all,
        chosen,
        not_a_number,
        disagreed,
    )
}


@pytest.fixture(scope="module")
def more() -> list[dict[str, Any]]:
    return run(2, sharded.play, MORE, timeout=150)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run(4, sharded.play, {"half": half_of_the_ranks, "replicated": replicated}, timeout=150)


def _given(rank: int, step: int, shapes: Any = STACK) -> Named:
    return given(shapes, rank, step)


def test_a_sum_that_torch_divides_is_the_average(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(STEPS):
        right = expected.step([_given(rank, step) for rank in range(2)], divisor=1, after=2)
        for of_rank in more:
            assert all(same_bits(of_rank["summed"][step][name], value) for name, value in right.items())


def test_a_divisor_of_ones_own_multiplies_the_sum(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(STEPS):
        right = expected.step([_given(rank, step) for rank in range(2)], divisor=1)
        for of_rank in more:
            found = of_rank["by_a_factor"][step]
            assert all(same_bits(found[name], value * (1 / 5.0)) for name, value in right.items())


def test_gradients_of_several_passes_are_reduced_once(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(STEPS):
        halves = [{name: g / 2 for name, g in _given(rank, step).items()} for rank in range(2)]
        right = expected.step([{name: half + half for name, half in of_rank.items()} for of_rank in halves])
        for of_rank in more:
            assert all(same_bits(of_rank["accumulated"][step][name], value) for name, value in right.items())


@pytest.mark.parametrize("name", ["compiled_blocks", "compiled_root"])
def test_compiled_modules_leave_the_same_bits(name: str, more: list[dict[str, Any]]) -> None:
    for step, right in enumerate(_right(2)):
        for of_rank in more:
            assert all(same_bits(of_rank[name][step][key], value) for key, value in right.items())


def test_parameters_without_a_gradient_are_left_out_and_keep_their_residual(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step, names in enumerate(SOME):
        gradients = [{n: g for n, g in _given(rank, step, SHAPES).items() if n in names} for rank in range(2)]
        right = expected.step(gradients)
        for of_rank in more:
            found = of_rank["some"][step]
            assert found.keys() == right.keys()
            assert all(same_bits(found[name], value) for name, value in right.items()), (step, names)


def test_frozen_parameters_have_no_residual_and_leave_the_others_as_they_are(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(2):
        right = expected.step([_given(rank, step, SHAPES) for rank in range(2)])
        for of_rank in more:
            found = of_rank["frozen"][0][step]
            assert found.keys() == right.keys() - {"odd"}
            assert all(same_bits(found[name], right[name]) for name in found)
    assert more[0]["frozen"][1] == ["again", "even", "flat", "prime"]


def test_parameters_sharded_by_columns_are_reduced_by_columns(more: list[dict[str, Any]]) -> None:
    gradients = [given({"wide": (30, 64), "bias": (64,)}, rank, 0) for rank in range(2)]
    turned = [{"wide": torch.cat(g["wide"].chunk(2, 1))} for g in gradients]
    expected = Expected(nc.codec("int4"), 2, True)
    right = torch.cat(expected.step(turned)["wide"].chunk(2, 0), 1)
    for rank, of_rank in enumerate(more):
        found, residual = of_rank["columns"]
        assert same_bits(found["wide"], right)
        assert same_bits(residual, expected.sender["wide"][rank].reshape(-1))


def test_a_block_that_is_used_twice_is_reduced_once_a_step(more: list[dict[str, Any]]) -> None:
    assert [of_rank["twice_in_a_pass"] for of_rank in more] == [(2, 2), (2, 2)]


def test_backward_passes_within_a_backward_make_one_step(more: list[dict[str, Any]]) -> None:
    assert [of_rank["checkpointed"] for of_rank in more] == [(2, 3), (2, 3)]


def test_warm_up_and_a_schedule_send_without_loss_and_count_so(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec("int4"), 2, True)
    for step in range(4):
        right = expected.step([_given(rank, step) for rank in range(2)], compressed=step == 2)
        for of_rank in more:
            assert all(same_bits(of_rank["warmed_up"][0][step][name], value) for name, value in right.items())
    assert more[0]["warmed_up"][1] == {"warm-up": 3, "schedule": 6}


def test_without_a_codec_torch_reduces_and_it_is_counted(more: list[dict[str, Any]]) -> None:
    right = Expected(nc.codec("raw"), 2, False).step([_given(rank, 0) for rank in range(2)], compressed=False)
    found, stats = more[0]["nothing_at_all"]
    assert all(same_bits(found[0][name], value) for name, value in right.items())  # two terms: one order
    assert stats.uncompressed == {"codec=None": 3}
    assert (stats.ratio, stats.steps) == (1.0, 1)


def test_auto_makes_a_plan_and_every_rank_takes_the_same(more: list[dict[str, Any]]) -> None:
    assert more[0]["chosen"] == more[1]["chosen"]
    assert more[0]["chosen"][:2] == (1, True)


def test_what_is_not_finite_spoils_its_block_alone_and_no_residual(more: list[dict[str, Any]]) -> None:
    for first, residuals, second in (of_rank["not_a_number"] for of_rank in more):
        bad = ~first["weight"].isfinite()
        assert bad[0].all()  # a block that travelled
        assert bad[7].nonzero().flatten().tolist() == [5]  # one that rank 1 owns itself
        assert not bad[1:7].any()
        assert all(kept.isfinite().all() for kept in residuals.values())
        assert second["weight"].isfinite().all()


def test_ranks_that_reduce_different_parameters_are_told_so_and_keep_their_residuals(
    more: list[dict[str, Any]],
) -> None:
    for of_rank in more:
        before, after, said = of_rank["disagreed"]
        assert before.keys() == after.keys()
        assert all(same_bits(before[name], after[name]) for name in before)
        assert said == more[0]["disagreed"][2]
        assert "ranks disagree on a collective: rank 0 called gradients(" in said


def test_a_mesh_of_some_ranks_is_a_world_of_its_own(four: list[dict[str, Any]]) -> None:
    for ranks in ((0, 1), (2, 3)):
        expected = Expected(nc.codec(CODEC), 2, True)
        for step in range(STEPS):
            right = expected.step([_given(rank, step) for rank in ranks])
            for rank in ranks:
                assert all(same_bits(four[rank]["half"][step][name], value) for name, value in right.items())


def test_replicas_are_averaged_by_torch_and_their_ranks_keep_their_own_state(four: list[dict[str, Any]]) -> None:
    replicas = [Expected(nc.codec(CODEC), 2, True) for _ in range(2)]
    for step in range(STEPS):
        of_replicas = [r.step([_given(rank, step) for rank in (2 * i, 2 * i + 1)]) for i, r in enumerate(replicas)]
        for name, first in of_replicas[0].items():
            right = (first + of_replicas[1][name]) / 2
            for rank in range(4):
                assert same_bits(four[rank]["replicated"][0][step][name], right), (step, name)
    assert [of_rank["replicated"][1] for of_rank in four] == [(4, rank) for rank in range(4)]
