"""FSDP2 on a mesh: models on a part of the ranks, and replicas of one (HSDP)."""

from __future__ import annotations

import math
from typing import Any

import faults
import pytest
import sharded
import torch
import torch.distributed as dist
import trained
from ranks import play, run
from sharded import STACK, Expected, stack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
    """HSDP: torch's own reduce-scatter within a replica, the codec between replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {}
    for name, given_mesh, options in (
        ("2-D", mesh, {}),
        ("2-D, owner", mesh, {"error_feedback": "owner"}),
        ("1-D", mesh["shard"], {"process_group": mesh}),
        ("gathered", mesh, {"gather": "raw"}),
    ):
        module = stack(mesh=given_mesh)
        state = trained.compressed(module, **options)
        found[name] = sharded.steps(module, rank), state.state_dict(), state.stats().sent_bytes
    return found


def divided(rank: int) -> Any:
    """Every way in which torch divides, and gradients that are not reduced between replicas in every pass."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for policy, factor in ((None, None), (None, 2.0), (None, 3.0), (torch.float16, None), (torch.float16, 2.0)):
        pair = []
        for compress in (True, False):
            module = stack(mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=policy))
            for part in sharded.every(module):
                if factor:
                    part.set_gradient_divide_factor(factor)
                    part.set_force_sum_reduction_for_comms(factor == 3.0)  # gloo has no PREMUL_SUM
            if compress:
                nc.compress_gradients(module, "raw")
            pair.append(sharded.backward(module, {k: g / 64 for k, g in given(STACK, rank, 0).items()}))
        found.append(pair)
    pair = []
    for compress in (True, False):
        module = stack(mesh=mesh)
        if compress:
            nc.compress_gradients(module, "raw")
        for step in range(3):
            module.set_requires_all_reduce(step == 2)
            module(given(STACK, rank, step)).backward()
        pair.append(sharded.grads(module))
    return [*found, pair]


def resumed(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = stack(mesh=mesh)
    state = trained.compressed(module, "int4:stochastic=true")
    sharded.steps(module, rank, 2)
    saved = state.state_dict()
    right = sharded.steps(module, rank, 1, first=2)
    other = stack(mesh=mesh)
    loaded = trained.compressed(other, "int4:stochastic=true", seed=99)
    loaded.load_state_dict(saved)
    again = sharded.steps(other, rank, 1, first=2)
    plain = trained.compressed(stack(), "int4:stochastic=true")
    error, _ = faults.error_of(lambda: plain.load_state_dict(saved))
    return all(same_bits(right[0][name], again[0][name]) for name in right[0]), str(error)


def wrong(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def error_of(module: Any, **options: Any) -> str:
        error, _ = faults.error_of(lambda: nc.compress_gradients(module, **options))
        return f"{type(error).__name__}: {error}"

    mixed = sharded.Stack()
    fully_shard(mixed.first, mesh=mesh)
    fully_shard(mixed, mesh=mesh["shard"])
    hooked = stack(mesh=mesh)
    hooked.set_all_reduce_hook(lambda output: None)
    return [
        error_of(stack(mesh=mesh["shard"]), process_group=dist.new_group()),
        error_of(stack(mesh=mesh), process_group=mesh),
        error_of(stack(mesh=mesh["replicate"]), process_group=mesh),
        error_of(stack(mesh=mesh["shard"]), error_feedback="owner"),
        error_of(mixed),
        error_of(hooked),
    ]


def failing(rank: int) -> Any:
    """A rank that fails between replicas. The last scene: ranks that leave break off what others wait for."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = stack(mesh=mesh)
    trained.compressed(module)
    first = sharded.steps(module, rank, 1)
    if rank == 3:
        faults.at("encoding", faults.run_out_of_memory)
    error, _ = faults.error_of(lambda: sharded.steps(module, rank, 1, first=1))
    return first, f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    scenes = half_of_the_ranks, replicated, divided, resumed, wrong, failing
    return run(4, play, {scene.__name__: scene for scene in scenes}, timeout=150)


def test_a_mesh_of_some_ranks_is_a_world_of_its_own(four: list[dict[str, Any]]) -> None:
    for ranks in ((0, 1), (2, 3)):
        expected = Expected(nc.codec(CODEC), 2, True)
        for step in range(STEPS):
            right = expected.step([given(STACK, rank, step) for rank in ranks])
            for rank in ranks:
                assert all(
                    same_bits(four[rank]["half_of_the_ranks"][step][name], value) for name, value in right.items()
                )


class Replicated:
    """What ranks must end with: the average of each shard over a replica, then what DDP's ranks do with it."""

    def __init__(self, feedback: Any) -> None:
        self.places = [trained.Expected(nc.codec(CODEC), 2, feedback) for _ in range(2)]

    def step(self, step: int) -> trained.Named:
        averages = [
            {name: (one + two) / 2 for (name, one), two in zip(a.items(), b.values(), strict=True)}
            for a, b in ((given(STACK, 2 * i, step), given(STACK, 2 * i + 1, step)) for i in range(2))
        ]
        done = [place.step([_shards(one, i) for one in averages]) for i, place in enumerate(self.places)]
        return {name: torch.cat([one[name] for one in done])[: STACK[name][0]] for name in STACK}


def _shards(gradients: trained.Named, place: int) -> trained.Named:
    """What a place has of each gradient: half of its rows, padded with zeros."""
    found = {}
    for name, gradient in gradients.items():
        rows = -(-len(gradient) // 2)
        padded = torch.zeros(2 * rows, *gradient.shape[1:])
        padded[: len(gradient)] = gradient
        found[name] = padded[place * rows : (place + 1) * rows]
    return found


@pytest.mark.parametrize("name", ["2-D", "2-D, owner", "1-D", "gathered"])
def test_replicas_average_their_shards_in_the_codec_and_keep_residuals_of_them_alone(
    name: str, four: list[dict[str, Any]]
) -> None:
    expected = Replicated("owner" if "owner" in name else True)
    right = [expected.step(step) for step in range(STEPS)]
    for rank in range(4):
        gradients, state, sent = four[rank]["replicated"][name]
        trained.agree(gradients, right)
        replica, place = divmod(rank, 2)
        holder = {"ranks": 4, "rank": rank, "hosts": 2, "host": replica, "place": place, "sharded": True}
        assert {key: state[key] for key in holder} == holder
        shapes = {key: value.shape for key, value in _shards(given(STACK, 0, 0), place).items()}
        sender, owner = expected.places[place].state_of(replica, shapes)
        for part, meant in (("sender", sender), ("owner", owner)):
            assert state[part].keys() == meant.keys()
            for parameter, residual in meant.items():
                assert same_bits(state[part][parameter], residual), (part, parameter)
        total = sum(math.prod(shape) for shape in shapes.values())
        assert sent < STEPS * (total * 3 + 3000)  # not 4 bytes an element: some are exempt, and there are headers


def test_replicas_divide_as_torch_does_and_only_when_they_reduce(four: list[dict[str, Any]]) -> None:
    for of_rank in four:
        for compressed, plain in of_rank["divided"]:
            assert compressed.keys() == plain.keys()
            for name in plain:
                torch.testing.assert_close(compressed[name], plain[name], rtol=2e-3, atol=1e-6)


def test_a_resumed_run_with_replicas_is_exact_and_its_state_fits_no_other_mesh(four: list[dict[str, Any]]) -> None:
    for of_rank in four:
        same, error = of_rank["resumed"]
        assert same
        assert "on host" in error
        assert "of 2), loaded by rank" in error


def test_meshes_that_do_not_fit_are_refused(four: list[dict[str, Any]]) -> None:
    for of_rank in four:
        world, twice, across, owner, mixed, hooked = of_rank["wrong"]
        assert "SpecError: process_group: an FSDP2 model exchanges gradients over the mesh" in world
        assert "ShapeError: process_group: " in twice
        assert "ShapeError: process_group: " in across
        assert "Pass the mesh whose second dimension was given to fully_shard" in across
        assert "SpecError: error_feedback='owner': FSDP2 keeps sums" in owner
        assert "ModelKindError: model: some of it is replicated" in mixed
        assert "CollectiveError: model: FSDPStack has an all-reduce hook already" in hooked


def test_a_rank_that_fails_between_replicas_breaks_backward_off_on_all(four: list[dict[str, Any]]) -> None:
    expected = Replicated(True)
    right = [expected.step(0)]
    errors = []
    for of_rank in four:
        first, error = of_rank["failing"]
        trained.agree(first, right)
        errors.append(error)
    assert errors[3] == "MemoryError: no room left for codes"
    assert "CollectiveError: gradients: rank 3 failed in it: MemoryError" in errors[1]  # it has the same shard
    for rank in (0, 2):  # they wait in torch's own reduce-scatter, which ends as it does without narrowcast
        assert "Error" in errors[rank]
