"""DDP with its options, hooked by hand, compiled: each leaves on every rank the bits that the model of a step says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trained
from ranks import play, run
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import CODEC, FEW, SEED, SHAPES, Given

import narrowcast as nc

pytestmark = pytest.mark.timeout(180)


def plain(rank: int) -> Any:
    ddp, state = trained.usual()
    return trained.steps(ddp, rank), len(state.stats().buckets)


def two_buckets(rank: int) -> Any:
    ddp, state = trained.usual(bucket_cap_mb=0.016)
    return trained.steps(ddp, rank), len(state.stats().buckets)


def many_buckets(rank: int) -> Any:
    ddp, state = trained.usual(bucket_cap_mb=FEW)
    return trained.steps(ddp, rank), len(state.stats().buckets)


def bucket_views(rank: int) -> Any:
    ddp, state = trained.usual(gradient_as_bucket_view=True, bucket_cap_mb=FEW)
    return trained.steps(ddp, rank), len(state.stats().buckets)


def static_graph(rank: int) -> Any:
    ddp, state = trained.usual(static_graph=True, bucket_cap_mb=FEW)
    return trained.steps(ddp, rank), len(state.stats().buckets)


def unused_nowhere(rank: int) -> Any:
    ddp, state = trained.usual(find_unused_parameters=True, bucket_cap_mb=FEW)
    return trained.steps(ddp, rank), len(state.stats().buckets)


def hook_and_state(rank: int) -> Any:
    ddp = DDP(Given(SHAPES), bucket_cap_mb=FEW)
    state = nc.GradientCompression(CODEC, error_feedback=True, model=ddp.module, seed=SEED)
    ddp.register_comm_hook(state, nc.gradient_hook)
    return trained.steps(ddp, rank), len(state.stats().buckets)


def compiled_module(rank: int) -> Any:
    ddp = DDP(torch.compile(Given(SHAPES), backend="eager"))  # type: ignore[arg-type]
    state = trained.compressed(ddp)
    return trained.steps(ddp, rank), len(state.stats().buckets)


def compiled_ddp(rank: int) -> Any:
    ddp = torch.compile(DDP(Given(SHAPES)), backend="aot_eager")
    state = trained.compressed(ddp)  # type: ignore[arg-type]
    return trained.steps(ddp, rank), len(state.stats().buckets)  # type: ignore[arg-type]


SAME = {
    scene.__name__: (scene, buckets)
    for scene, buckets in (
        (plain, 1),
        (two_buckets, 2),
        (many_buckets, 4),
        (bucket_views, 4),
        (static_graph, 4),
        (unused_nowhere, 4),
        (hook_and_state, 4),
        (compiled_module, 1),
        (compiled_ddp, 1),
    )
}


@pytest.fixture(scope="module")
def same() -> list[dict[str, Any]]:
    return run(3, play, {name: scene for name, (scene, _) in SAME.items()}, timeout=150)


@pytest.mark.parametrize("name", SAME)
def test_every_way_leaves_the_same_bits_however_gradients_are_spread_over_buckets(
    name: str, same: list[dict[str, Any]]
) -> None:
    right = trained.right(3)
    for of_rank in same:
        found, buckets = of_rank[name]
        assert buckets == SAME[name][1]
        trained.agree(found, right)
