"""DDP on a part of the ranks: models of sub-groups side by side, and a rank alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import CODEC, SEED, SHAPES, STEPS, Expected, Given, given

import narrowcast as nc

pytestmark = pytest.mark.timeout(180)


def _apart(rank: int, hooked: bool) -> Any:
    """Ranks 0 and 2 train one model, 1 and 3 another in another codec; between steps all four meet."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    codec = (CODEC, "int8:block=256")[rank % 2]
    ddp = DDP(Given(SHAPES), process_group=mine)
    if hooked:
        state = nc.GradientCompression(codec, error_feedback=True, process_group=mine, model=ddp.module, seed=SEED)
        ddp.register_comm_hook(state, nc.gradient_hook)
    else:
        trained.compressed(ddp, codec)
    found = []
    for step in range(STEPS):
        found.append(trained.backward(ddp, given(SHAPES, rank, step)))
        if rank % 2:
            time.sleep(0.01)
        dist.barrier()
    return found


@pytest.mark.parametrize("hooked", [False, True])
def test_models_of_sub_groups_train_side_by_side(hooked: bool) -> None:
    found = run(4, _apart, hooked, timeout=150)
    for side, codec in enumerate((CODEC, "int8:block=256")):
        expected = Expected(nc.codec(codec), 2, True, [SEED] * 2)
        right = [expected.step([given(SHAPES, rank, step) for rank in (side, side + 2)]) for step in range(STEPS)]
        trained.agree(found[side], right)
        trained.agree(found[side + 2], right)


def _alone(rank: int) -> Any:
    """A sub-group of one rank, while the others train without it."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    ddp = DDP(Given(SHAPES), process_group=single if rank == 2 else pair)
    state = trained.compressed(ddp)
    return trained.steps(ddp, rank), state.step, state.stats().sent_bytes


def test_a_rank_alone_keeps_its_gradients_as_they_are() -> None:
    one, two, alone = run(3, _alone, timeout=150)
    trained.agree(one[0], trained.right(2))
    trained.agree(two[0], trained.right(2))
    steps, count, sent = alone
    trained.agree(steps, [given(SHAPES, 2, step) for step in range(STEPS)])
    assert (count, sent) == (STEPS, 0)
