"""The reduction over a wire whose rows leave together: the real NCCL wire, over a stand-in for NCCL's group."""

from __future__ import annotations

import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
from by_hand import reduced_by_hand
from ranks import run

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast.distributed.protocols import together
from narrowcast.distributed.protocols.together import in_one_stage
from narrowcast.distributed.transport import nccl
from narrowcast.distributed.transport.group import group_for

pytestmark = pytest.mark.timeout(60)
SIZES = (0, 1, 127, 128, 129, 1000, 3 * 128, 5 * 128, 40_000, 3 * 128 * 50, 40_001)


def sample(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + numel)).to(dtype)


def _reduced(rank: int) -> None:
    nccl_stand_in.use()
    nccl.HALVED = 1000  # so that long rows go in two halves here
    together.SPARE_BYTES = 4000  # and not only small tensors in two stages
    world = dist.get_world_size()
    group = group_for(dist.group.WORLD, torch.device("cpu"))
    for turn in range(2):  # the second time with what the first one prepared
        for codec, dtype in (("int8", torch.float32), ("int4", torch.bfloat16), ("raw", torch.float64), ("nf4", None)):
            for numel in SIZES:
                kind = dtype or torch.float32
                x = sample(rank, numel, kind)
                ncd.reset_stats()
                ncd.all_reduce(x, dist.ReduceOp.AVG, codec=codec)
                one = in_one_stage(nc.codec(codec).row_bytes(numel), world)
                everyone = [sample(peer, numel, kind) for peer in range(world)]
                right = reduced_by_hand(everyone, codec, world, one_stage=one)
                assert torch.equal(x, right), (codec, numel, turn)
        group.buffers.clear()  # memory that was given back is not used again
    y = sample(rank, 1 << 16, torch.float32).view(256, 256).t()  # not contiguous, and a sum
    ncd.all_reduce(y, codec="int8")
    everyone = [sample(peer, 1 << 16, torch.float32).view(256, 256).t().reshape(-1) for peer in range(world)]
    right = reduced_by_hand(everyone, "int8", 1, one_stage=in_one_stage(nc.codec("int8").row_bytes(1 << 16), world))
    assert torch.equal(y.reshape(-1), right)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_sums_are_those_made_by_hand(world: int) -> None:
    run(world, _reduced, timeout=55)


def _counted(rank: int) -> int:
    nccl_stand_in.use()
    ncd.all_reduce(torch.ones(4096), codec="int8")
    ncd.reset_stats()
    ncd.all_reduce(torch.ones(4096), codec="int8")
    return ncd.stats()["all_reduce"].sent_bytes


def test_bytes_are_counted() -> None:
    row = 4096 + 4096 // 128 * 4  # codes, and an fp32 scale for each block of 128; a known call has no header
    assert run(2, _counted, timeout=55) == [row] * 2
