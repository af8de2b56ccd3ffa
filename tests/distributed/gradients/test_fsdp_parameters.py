"""Which parameters a step of FSDP2 reduces: those with a gradient, the same on every rank, by rows or by columns."""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
import trained
from ranks import play, run
from sharded import SHAPES, Expected
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from trained import CODEC, Given, given

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import MismatchError, StateDictError

pytestmark = pytest.mark.timeout(180)


def some(rank: int) -> Any:
    """Each step with a part of the parameters; those left out may be as large as those that are there."""
    module = fully_shard(Given(SHAPES))
    trained.compressed(module)
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
    state = trained.compressed(module)
    found = [sharded.backward(module, given(SHAPES, rank, step)) for step in range(2)]
    return found, sorted(state.state_dict()["sender"])


def columns(rank: int) -> Any:
    """Sharded by columns: rank r has columns of each row."""
    module = Given({"wide": (30, 64), "bias": (64,)})
    fully_shard(module, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    state = trained.compressed(module, "int4")
    gradient = given({"wide": (30, 64), "bias": (64,)}, rank, 0)
    found = sharded.backward(module, gradient)
    by_rows = trained.compressed(fully_shard(Given({"wide": (30, 64), "bias": (64,)})), "int4")
    with pytest.raises(StateDictError) as caught:
        by_rows.load_state_dict(state.state_dict())
    return found, state.state_dict()["sender"]["wide"], str(caught.value)


def disagreed(rank: int) -> Any:
    """A parameter that has a gradient on one rank only, and otherwise a step as any other."""
    module = fully_shard(Given(SHAPES))
    state = trained.compressed(module)
    sharded.backward(module, given(SHAPES, rank, 0))
    before = state.state_dict()["sender"]
    gradients = given(SHAPES, rank, 1)
    if rank == 1:
        del gradients["odd"]
    with pytest.raises(MismatchError) as caught:
        sharded.backward(module, gradients)
    return before, state.state_dict()["sender"], str(caught.value)


SCENES = {scene.__name__: scene for scene in (some, frozen, columns, disagreed)}


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return run(2, play, SCENES, timeout=150)


def test_parameters_without_a_gradient_are_left_out_and_keep_their_residual(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step, names in enumerate(SOME):
        gradients = [{n: g for n, g in given(SHAPES, rank, step).items() if n in names} for rank in range(2)]
        right = expected.step(gradients)
        for of_rank in played:
            found = of_rank["some"][step]
            assert found.keys() == right.keys()
            assert all(same_bits(found[name], value) for name, value in right.items()), (step, names)


def test_frozen_parameters_have_no_residual_and_leave_the_others_as_they_are(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True)
    for step in range(2):
        right = expected.step([given(SHAPES, rank, step) for rank in range(2)])
        for of_rank in played:
            found = of_rank["frozen"][0][step]
            assert found.keys() == right.keys() - {"odd"}
            assert all(same_bits(found[name], right[name]) for name in found)
    assert played[0]["frozen"][1] == ["again", "even", "flat", "prime"]


def test_parameters_sharded_by_columns_are_reduced_by_columns(played: list[dict[str, Any]]) -> None:
    gradients = [given({"wide": (30, 64), "bias": (64,)}, rank, 0) for rank in range(2)]
    turned = [{"wide": torch.cat(g["wide"].chunk(2, 1))} for g in gradients]
    expected = Expected(nc.codec("int4"), 2, True)
    right = torch.cat(expected.step(turned)["wide"].chunk(2, 0), 1)
    for rank, of_rank in enumerate(played):
        found, residual, words = of_rank["columns"]
        assert same_bits(found["wide"], right)
        assert same_bits(residual, expected.sender["wide"][rank].reshape(-1))
        assert "the residuals of wide are in another order: shards along dimension 1 there, contiguous here" in words


def test_ranks_that_reduce_different_parameters_are_told_so_and_keep_their_residuals(
    played: list[dict[str, Any]],
) -> None:
    for of_rank in played:
        before, after, said = of_rank["disagreed"]
        assert before.keys() == after.keys()
        assert all(same_bits(before[name], after[name]) for name in before)
        assert said == played[0]["disagreed"][2]
        assert "ranks disagree on a collective: rank 0 called gradients(" in said
