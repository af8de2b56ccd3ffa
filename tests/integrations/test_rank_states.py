"""The states of all ranks in one checkpoint or in a folder, for DDP and FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainers import same, weights

import narrowcast as nc
from narrowcast.integrations import rank_states

WORLD = 3  # the last owner has fewer elements than the others, and of some parameters none


class Run:
    def __init__(self, engine: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 65), nn.Tanh(), nn.Linear(65, 32), nn.Linear(32, 16, bias=False))
        self.model: Any = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
        self.compression = nc.compress_gradients(self.model, "int4:stochastic=true", seed=3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def train(self, first: int, last: int) -> list[Tensor]:
        for step in range(first, last):
            seed = WORLD * step + dist.get_rank()
            self.model(torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return weights(self.model)


def train(rank: int, engine: str, folder: str) -> dict[str, Any]:
    run = Run(engine)
    run.train(0, 2)
    weights = copy.deepcopy(run.model.state_dict())
    gathered = rank_states.gather(run.compression, True)
    rank_states.save(run.compression, folder, True)
    box: list[Any] = [gathered]
    dist.broadcast_object_list(box, 0)  # as if every rank had read the checkpoint
    whole = run.train(2, 4)

    def resumed(way: str) -> bool:
        other = Run(engine)
        other.model.load_state_dict(weights)
        if way == "gathered":
            rank_states.pick(other.compression, box[0], True)
        else:
            rank_states.load(other.compression, folder, way == "folder")
        return same(other.train(2, 4), whole)

    ways = {way: resumed(way) for way in ("gathered", "folder", "without residuals")}
    return {"gathered": gathered if rank else len(gathered), "resumed": ways, "names": sorted(box[0][1]["sender"])}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_states_that_are_gathered_or_filed_resume_to_the_bit(engine: str, tmp_path: Any) -> None:
    found = ranks.run(WORLD, train, engine, str(tmp_path))
    assert [each["gathered"] for each in found] == [WORLD, [], []]
    for each in found:
        # Without residuals something else comes out: they are what the others bring back.
        assert each["resumed"] == {"gathered": True, "folder": True, "without residuals": False}
        assert each["names"] == ["0.weight", "2.weight", "3.weight"]
    assert len(list(tmp_path.iterdir())) == WORLD
