"""Models whose ranks meet seldom, for the tests of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import trained
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc

RATE = 0.05


def made(codec: Any = "int4", sync_every: Any = 3, width: int = 40, **options: Any) -> Any:
    """A small regression under AdamW."""
    ddp = DDP(trained.mlp(width=width), bucket_cap_mb=0.002)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    return ddp, optimizer, nc.compress_gradients(ddp, codec, sync_every=sync_every, optimizer=optimizer, **options)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


def same_on_all_ranks(model: nn.Module) -> bool:
    mine = vector(model)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(each, mine) for each in everyones)


class Sites:
    """All ranks of `trained.Given` under SGD in one process: what their parameters must be, bit for bit."""

    def __init__(self, shapes: trained.Shapes, reducer: Any, world: int, outer: tuple[float, float] = (1.0, 0.0)):
        self.last = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.velocity = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.sites = [dict(self.last) for _ in range(world)]
        self._reducer, self._outer = reducer, outer

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        for site, given in zip(self.sites, gradients, strict=True):
            for name, gradient in given.items():
                site[name] = site[name].add(gradient, alpha=-RATE)

    def step_with(self, average: Mapping[str, Tensor]) -> None:
        """A step of the warm-up."""
        self.step([average] * len(self.sites))
        self.last = dict(self.sites[0])

    def meet(self) -> None:
        rate, momentum = self._outer
        changes = [{name: value - self.last[name] for name, value in site.items()} for site in self.sites]
        for name, average in self._reducer.step(changes).items():
            if momentum:
                self.velocity[name] = self.velocity[name].mul(momentum).add(average)
                average = average.add(self.velocity[name], alpha=momentum)
            self.last[name] = self.last[name].add(average, alpha=rate)
        self.sites = [dict(self.last) for _ in self.sites]
