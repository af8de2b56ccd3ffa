"""FSDP2 with its options, made on meta, resumed: each leaves the bits that the model of a step says."""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
import trained
from ranks import play, run
from sharded import Stack, shard, stack
from torch import nn
from torch.distributed.fsdp import fully_shard
from trained import SEED, STEPS

pytestmark = pytest.mark.timeout(180)


def plain(rank: int) -> Any:
    module = stack()
    trained.compressed(module)
    return sharded.steps(module, rank)


def one_group(rank: int) -> Any:
    module = shard(Stack())
    trained.compressed(module)
    return sharded.steps(module, rank)


def two_blocks_in_a_group(rank: int) -> Any:
    module = Stack()
    fully_shard([module.second, module.first])
    fully_shard(module)
    trained.compressed(module)
    return sharded.steps(module, rank)


def never_resharded(rank: int) -> Any:
    module = stack(reshard_after_forward=False)
    trained.compressed(module)
    return sharded.steps(module, rank)


def always_resharded(rank: int) -> Any:
    module = stack(reshard_after_forward=True)
    trained.compressed(module)
    return sharded.steps(module, rank)


def asynchronous_unshard(rank: int) -> Any:
    module = stack()
    module._set_unshard_async_op(True)
    trained.compressed(module, gather="raw")
    return sharded.steps(module, rank)


def gathered_without_loss(rank: int) -> Any:
    module = stack(reshard_after_forward=True)
    trained.compressed(module, gather="raw")
    return sharded.steps(module, rank)


def from_meta(rank: int) -> Any:
    with torch.device("meta"):
        module = Stack()
    module = shard(module, "first", "second")
    trained.compressed(module)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return sharded.steps(module, rank)


def resumed(rank: int) -> Any:
    """The last step by another model, which loads what the first one saved."""
    before = stack()
    state = trained.compressed(before)
    found = sharded.steps(before, rank, STEPS - 1)
    saved = state.state_dict()
    after = stack()
    fresh = trained.compressed(after, seed=SEED + 1)
    fresh.load_state_dict(saved)
    assert fresh.step == STEPS - 1
    return found + sharded.steps(after, rank, 1, STEPS - 1)


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
    return run(3, play, SAME, timeout=150)


@pytest.mark.parametrize("name", SAME)
def test_every_way_leaves_the_same_bits(name: str, same: list[dict[str, Any]]) -> None:
    right = sharded.right(3)
    for of_rank in same:
        trained.agree(of_rank[name], right)
