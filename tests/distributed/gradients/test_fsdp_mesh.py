"""FSDP2 on a mesh: models on a part of the ranks, and replicas of one (HSDP)."""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import trained
from ranks import play, run
from sharded import STACK, Expected, stack
from torch.distributed.device_mesh import init_device_mesh
from trained import CODEC, STEPS, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)


def half_of_the_ranks(rank: int) -> Any:
    """Two models, each on a mesh of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    module = stack(mesh=mesh["shard"])
    trained.compressed(module)
    return sharded.steps(module, rank)


def replicated(rank: int) -> Any:
    """HSDP: compressed among the ranks of a replica, not between replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = stack(mesh=mesh)
    state = trained.compressed(module)
    found = sharded.steps(module, rank)
    return found, (state.state_dict()["ranks"], state.state_dict()["rank"])


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run(4, play, {"half": half_of_the_ranks, "replicated": replicated}, timeout=150)


def test_a_mesh_of_some_ranks_is_a_world_of_its_own(four: list[dict[str, Any]]) -> None:
    for ranks in ((0, 1), (2, 3)):
        expected = Expected(nc.codec(CODEC), 2, True)
        for step in range(STEPS):
            right = expected.step([given(STACK, rank, step) for rank in ranks])
            for rank in ranks:
                assert all(same_bits(four[rank]["half"][step][name], value) for name, value in right.items())


def test_replicas_are_averaged_by_torch_and_their_ranks_keep_their_own_state(four: list[dict[str, Any]]) -> None:
    replicas = [Expected(nc.codec(CODEC), 2, True) for _ in range(2)]
    for step in range(STEPS):
        of_replicas = [
            r.step([given(STACK, rank, step) for rank in (2 * i, 2 * i + 1)]) for i, r in enumerate(replicas)
        ]
        for name, first in of_replicas[0].items():
            right = (first + of_replicas[1][name]) / 2
            for rank in range(4):
                assert same_bits(four[rank]["replicated"][0][step][name], right), (step, name)
    assert [of_rank["replicated"][1] for of_rank in four] == [(4, rank) for rank in range(4)]
