"""Small models on real FSDP2 for tests of compressed gradients, and the same step once more in one process.

`Expected` says what the ranks must end with: plain codec calls on padded shards, no groups, no pieces, no wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import model
import torch
from seeds import derived, section_key
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from trained import CHUNK, CODEC, SEED, STEPS, UNIT, Given, Named, Shapes, exempt, given

import narrowcast as nc
from narrowcast import Codec

SHAPES: Shapes = {
    "bias": (37,),  # exempt: it has one dimension
    "even": (32, 64),
    "tiny": (3, 5),  # exempt: less than 128 elements a rank
    "odd": (53, 41),
    "again": (53, 41),  # as large as its neighbour: a buffer with one of them may hold either
    "norm": (1200,),
    "prime": (1009, 1),
    "flat": (2, 700),  # with more than two ranks, some have nothing of it
}
"""With 2 to 4 ranks: exempt and compressed, evenly shared and not."""


class Stack(nn.Module):
    """Parameters of its own, and two blocks of them that can be sharded apart."""

    def __init__(self, shapes: Shapes = SHAPES) -> None:
        super().__init__()
        self.first, self.second = Given(shapes), Given(shapes)
        self.own = nn.Parameter(torch.zeros(31, 50))

    def forward(self, gradients: Named) -> Tensor:
        total = (self.own * gradients["own"]).sum()
        for name, block in (("first", self.first), ("second", self.second)):
            its = {key.removeprefix(f"{name}."): g for key, g in gradients.items() if key.startswith(f"{name}.")}
            total = total + block(its)
        return total


class Dropping(nn.Module):
    """Two blocks, of which a forward uses one. The other one is not called, or passes on what it is given."""

    def __init__(self, called: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(_Block(64, 64) for _ in range(2))
        self.called = called

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            if self.called or place == which:
                x = block(x, place == which)
        return x


class _Block(nn.Linear):
    def forward(self, x: Tensor, used: bool = True) -> Tensor:
        return super().forward(x) if used else x * 1.0


def dropping(called: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    return shard(Dropping(called), "blocks.0", "blocks.1", **options)


STACK: Shapes = {"own": (31, 50), **{f"{b}.{key}": SHAPES[key] for b in ("first", "second") for key in SHAPES}}


def shard(module: nn.Module, *blocks: str, **options: Any) -> Any:
    for name in blocks:
        fully_shard(module.get_submodule(name), **options)
    return fully_shard(module, **options)


def stack(**options: Any) -> Any:
    return shard(Stack(), "first", "second", **options)


def backward(module: nn.Module, gradients: Named) -> Named:
    """One step: the whole gradients, put together from all ranks."""
    module.zero_grad()
    module(gradients).backward()
    return grads(module)


def grads(module: nn.Module) -> Named:
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def parameters_of(module: nn.Module) -> Named:
    for part in every(module):
        part.reshard()  # a root keeps what it gathered until backward
    return {name: whole(p.detach()) for name, p in module.named_parameters()}


def whole(tensor: Any) -> Tensor:
    """Of a DTensor, what all ranks have of it together."""
    return tensor.full_tensor().clone()  # type: ignore[no-any-return]


def every(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def steps(module: nn.Module, rank: int, count: int = STEPS, first: int = 0) -> list[Named]:
    """The gradients of a `stack` after each of so many steps."""
    return [backward(module, given(STACK, rank, step)) for step in range(first, first + count)]


def right(world: int) -> list[Named]:
    """What `steps` must return, once `trained.compressed`."""
    expected = Expected(nc.codec(CODEC), world, True, [SEED] * world)
    return [expected.step([given(STACK, rank, step) for rank in range(world)]) for step in range(STEPS)]


# -- the same in one process ------------------------------------------------------------------------------------------


class Expected:
    """All ranks' steps in one process, with their residuals: what the ranks must end with, bit for bit.

    A parameter is a matrix with a row for each rank, its owner: as many of its own rows as the first rank has, padded
    with zeros. Columns are cut where `CHUNK` says; each cut is encoded on its own. The sum is not encoded.
    """

    def __init__(self, codec: Codec, world: int, feedback: bool, seeds: Sequence[int] | None = None) -> None:
        self.codec = codec
        self.world = world
        self.feedback = feedback
        self.seeds = seeds or [0] * world
        self.steps = 0
        self.sender: dict[str, Tensor] = {}
        """[rank, owner, column]"""
        self.meant: dict[str, Tensor] = {}
        self.sent: dict[str, Tensor] = {}

    def step(
        self,
        gradients: Sequence[Named],
        codec: Codec | None = None,
        *,
        before: float = 1,
        divisor: float = 0,
        after: float = 1,
        compressed: bool = True,
    ) -> Named:
        """The whole gradients, given those of all ranks: divided before, in between (by `world` for 0) and after."""
        found = {}
        for name, like in gradients[0].items():
            matrices = [padded(of_rank[name] / before, self.world) for of_rank in gradients]
            if compressed and not exempt(like.shape, self.world):
                sums = self._compressed(name, like.numel(), matrices, codec or self.codec)
            else:
                sums = _sum(torch.stack(matrices).float())
            sums = sums / torch.full_like(sums, divisor or self.world)
            found[name] = (sums.to(like.dtype) / after).reshape(-1)[: like.numel()].view(like.shape)
        self.steps += 1
        return found

    def _compressed(self, name: str, numel: int, matrices: Sequence[Tensor], codec: Codec) -> Tensor:
        world, part = matrices[0].shape
        width = CHUNK // (world * UNIT) * UNIT
        meant = torch.stack(list(matrices))
        if self.feedback:
            meant = self.sender.get(name, torch.zeros(meant.shape)) + meant
        sent = meant.float().clone()
        for start in range(0, part, width):
            cut = slice(start, min(part, start + width))
            key = section_key(name, start)
            for r in range(world):
                seed = derived(self.seeds[r], self.steps)
                for o in range(world):
                    if r != o:
                        row = meant[r, o, cut][None]
                        there = model.there(codec, row, model.seed_for(codec, seed, r, o, key), torch.float32)
                        sent[r, o, cut] = there[0]
        self.meant[name], self.sent[name] = meant, sent
        if self.feedback:
            residual = (meant - sent).nan_to_num(0.0, 0.0, 0.0).view(world, -1)
            residual[:, numel:] = 0.0
            self.sender[name] = residual.view(meant.shape)
        return _sum(sent)

    def state_of(self, rank: int, shapes: Shapes) -> Named:
        """The residuals that `state_dict` of a rank must hold."""
        return {name: kept[rank].reshape(-1)[: torch.Size(shapes[name]).numel()] for name, kept in self.sender.items()}


def padded(tensor: Tensor, world: int) -> Tensor:
    """A parameter or gradient as a matrix with a row for each rank."""
    rows = -(-tensor.shape[0] // world)
    flat = torch.zeros(world * rows, *tensor.shape[1:], dtype=tensor.dtype)
    flat[: tensor.shape[0]] = tensor
    return flat.view(world, -1)


def _sum(of_ranks: Tensor) -> Tensor:
    total = of_ranks[0]
    for one in of_ranks[1:]:
        total = total + one
    return total
