"""Small models on real DDP for tests of compressed gradients, and the same step once more in one process.

`Given` has the gradients that it is given, to the bit: the gradient of (p * g).sum() is g. `Expected` says what every
rank must end with: plain codec calls on padded matrices, no buckets, no pieces, no wire.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import model
import torch
from seeds import derived, section_key
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from cases import mixed, same_bits
from narrowcast import Codec

Shapes = Mapping[str, tuple[int, ...]]
Named = dict[str, Tensor]

UNIT = 128
CHUNK = 1 << 19

SHAPES: Shapes = {
    "bias": (37,),  # exempt: it has one dimension
    "tiny": (3, 5),  # exempt: less than 128 elements a rank
    "even": (32, 64),
    "odd": (53, 41),
    "norm": (1200,),
    "prime": (1009, 1),
}
"""With 2 to 7 ranks: exempt and compressed, with whole rows, a row cut short, and rows that are all padding."""


class Given(nn.Module):
    """Parameters of some shapes; the gradients are what `forward` is given. Those that are not given are not used."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Named) -> Tensor:
        return torch.stack([(self.get_parameter(name) * g).sum() for name, g in gradients.items()]).sum()


def given(shapes: Shapes, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Named:
    """A rank's gradients of a step: an eighth of `mixed`, so that sums of seven ranks stay within fp16."""
    found = {}
    for place, (name, shape) in enumerate(shapes.items()):
        size = torch.Size(shape)
        found[name] = (mixed(size.numel(), 1_000_000 * rank + 1000 * step + place, dtype) / 8).view(size)
    return found


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "").removeprefix("module.")


def backward(ddp: nn.Module, gradients: Named) -> Named:
    """One step: the gradients that this rank ends with."""
    ddp.zero_grad()
    ddp(gradients).backward()
    return grads(ddp)


def grads(ddp: nn.Module) -> Named:
    found = ((name, p.grad) for name, p in ddp.named_parameters())
    return {plain_name(name): grad.detach().clone() for name, grad in found if grad is not None}


def mlp(seed: int = 0, width: int = 24) -> nn.Module:
    """Three layers, of which the widest two are compressed with up to four ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(8, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
        )


def batch(rank: int, step: int, width: int = 8) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(7919 * rank + step))


def train(ddp: nn.Module, rank: int, steps: range, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    """So many steps of a regression that never ends."""
    for step in steps:
        x = batch(rank, step)
        optimizer.zero_grad()
        loss = (ddp(x) - x[:, :4].sin()).square().mean() * scale
        loss.backward()
        optimizer.step()


def saved(*parts: Any) -> bytes:
    """The states of a run's parts, as a file holds them."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    return file.getvalue()


def load(data: bytes, *parts: Any) -> None:
    for part, state in zip(parts, torch.load(io.BytesIO(data)), strict=True):
        part.load_state_dict(state)


def sgd(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def parameters_of(ddp: nn.Module) -> Named:
    return {plain_name(name): p.detach().clone() for name, p in ddp.named_parameters()}


# -- the usual run, which every way of training is compared with ------------------------------------------------------

CODEC, SEED, STEPS = "int4:block=row", 11, 3
FEW = 0.004
"""MB, or 1,000 elements: buckets of one or two parameters."""


def compressed(model: Any, codec: Any = CODEC, **options: Any) -> nc.GradientCompression:
    return nc.compress_gradients(model, codec, **{"error_feedback": True, "seed": SEED, **options})


def usual(codec: str = CODEC, **options: Any) -> tuple[DDP, nc.GradientCompression]:
    ddp = DDP(Given(SHAPES), **options)
    return ddp, compressed(ddp, codec)


def steps(ddp: nn.Module, rank: int, count: int = STEPS) -> list[Named]:
    """The gradients after each of so many steps."""
    return [backward(ddp, given(SHAPES, rank, step)) for step in range(count)]


def right(world: int, codec: str = CODEC) -> list[Named]:
    """What `steps` must return."""
    expected = Expected(nc.codec(codec), world, True, [SEED] * world)
    return [expected.step([given(SHAPES, rank, step) for rank in range(world)]) for step in range(STEPS)]


def agree(found: Sequence[Named], meant: Sequence[Named]) -> None:
    """Fail unless these are the same gradients, step by step, to the bit."""
    for step, (one, other) in enumerate(zip(found, meant, strict=True)):
        assert one.keys() == other.keys(), step
        for name in other:
            assert same_bits(one[name], other[name]), (step, name)


# -- the same in one process ------------------------------------------------------------------------------------------


def exempt(shape: Sequence[int], world: int) -> bool:
    """By default: 1-D parameters, and those with less than 128 elements a rank."""
    return len(shape) <= 1 or torch.Size(shape).numel() < UNIT * world


def average(gradients: Sequence[Tensor], divisor: int | None = None) -> Tensor:
    """Without loss: the fp32 sum in rank order, divided, in the gradients' dtype; with a divisor, in fp32."""
    total = gradients[0].float()
    for one in gradients[1:]:
        total = total + one.float()
    if divisor is not None:
        return total if divisor == 1 else total / torch.full_like(total, divisor)
    return (total / torch.full_like(total, len(gradients))).to(gradients[0].dtype)


class Expected:
    """All ranks' steps in one process, with their residuals: what every rank must end with, bit for bit.

    A parameter is a matrix with a row for each rank, padded with zeros to a multiple of 128 columns. Columns are cut
    where `CHUNK` says; each cut is encoded on its own.
    """

    def __init__(self, codec: Codec, world: int, feedback: Any, seeds: Sequence[int] | None = None) -> None:
        self.codec = codec
        self.world = world
        self.feedback = feedback
        self.seeds = seeds or [0] * world
        self.steps = 0
        self.part = 0
        """Columns of a parameter, where they do not follow from its size."""
        self.cut_by = world
        """Sections are cut as among so many ranks."""
        self.divisor: int | None = None
        self.sender: dict[str, Tensor] = {}
        """[rank, owner, column]"""
        self.owner: Named = {}
        """[owner, column]"""
        self.meant: dict[str, Tensor] = {}
        self.sent: dict[str, Tensor] = {}
        self.owner_meant: Named = {}

    def step(self, gradients: Sequence[Named], codec: Codec | None = None) -> Named:
        """What every rank ends with, given the gradients of all."""
        found = {}
        for name, like in gradients[0].items():
            of_ranks = [of_rank[name] for of_rank in gradients]
            if exempt(like.shape, self.world):
                found[name] = average(of_ranks)
            else:
                found[name] = self._compressed(name, of_ranks, codec or self.codec)
        self.steps += 1
        return found

    def _compressed(self, name: str, gradients: Sequence[Tensor], codec: Codec) -> Tensor:
        numel, dtype = gradients[0].numel(), gradients[0].dtype
        part = self.part or -(-numel // (UNIT * self.world)) * UNIT
        width = CHUNK // (self.cut_by * UNIT) * UNIT
        padded = [torch.zeros(self.world * part, dtype=dtype) for _ in gradients]
        for row, gradient in zip(padded, gradients, strict=True):
            row[:numel] = gradient.reshape(-1)
        meant = torch.stack(padded).view(self.world, self.world, part)
        if self.feedback is True:
            meant = self.sender.get(name, torch.zeros(meant.shape)) + meant  # not -0.0, at first either
        result = torch.empty(self.world, part, dtype=dtype)
        sent, sums = meant.float().clone(), torch.empty(self.world, part)
        owner = self.owner.get(name, torch.zeros(self.world, part))
        new_owner = torch.zeros(self.world, part)
        for start in range(0, part, width):
            cut = slice(start, min(part, start + width))
            key = section_key(name, start)
            for o in range(self.world):
                for r in range(self.world):
                    if r != o:
                        sent[r, o, cut] = self._trip(codec, meant[r, o, cut], r, r, o, key)
                sums[o, cut] = average(list(sent[:, o, cut]), self.divisor)
                if self.feedback:
                    sums[o, cut] += owner[o, cut]
                result[o, cut] = self._trip(codec, sums[o, cut], o, o, self.world, key, dtype=dtype)
                new_owner[o, cut] = sums[o, cut] - self._trip(codec, sums[o, cut], o, o, self.world, key)
        self.meant[name], self.sent[name], self.owner_meant[name] = meant, sent, sums
        if self.feedback is True:
            self.sender[name] = self._without_padding((meant - sent).nan_to_num(0.0, 0.0, 0.0), numel)
        if self.feedback:
            self.owner[name] = self._without_padding(new_owner.nan_to_num(0.0, 0.0, 0.0)[None], numel)[0]
        return result.view(-1)[:numel].view(gradients[0].shape)

    def _trip(self, codec: Codec, row: Tensor, who: int, *key: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A row as it arrives."""
        seed = model.seed_for(codec, derived(self.seeds[who], self.steps), *key)
        return model.there(codec, row[None], seed, dtype)[0]

    def _without_padding(self, residuals: Tensor, numel: int) -> Tensor:
        flat = residuals.reshape(len(residuals), -1).clone()
        flat[:, numel:] = 0.0
        return flat.view(residuals.shape)

    def state_of(self, rank: int, shapes: Shapes) -> tuple[Named, Named]:
        """The residuals that `state_dict` of a rank must hold: the sender's, and the owner's."""
        sender, owner = {}, {}
        for name, found in self.owner.items():
            numel, part = torch.Size(shapes[name]).numel(), found.shape[1]
            owner[name] = found[rank, : max(0, min(part, numel - rank * part))]
            if self.feedback is True:
                sender[name] = self.sender[name][rank].reshape(-1)[:numel]
        return sender, owner
