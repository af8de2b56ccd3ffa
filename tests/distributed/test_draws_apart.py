"""Rounding at random: no two encodings of a program draw the same numbers, on any ranks, hosts, steps and seeds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sharded
import torch
import torch.distributed as dist
import trained
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import FEW, SHAPES, Given, given

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast.distributed.encoder import Encoder, derive_seed
from narrowcast.kernels.reference import draws

pytestmark = pytest.mark.timeout(180)

CODEC = "int4:block=32,stochastic=true"
WORLD = 4


# -- the seeds --------------------------------------------------------------------------------------------------------


def test_no_two_uses_of_near_seeds_lead_to_one_seed() -> None:
    words = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (-1,), (2**63,), (2**64 - 2,)]
    words += list(itertools.product(range(6), range(6), range(3)))
    seeds = [*range(-64, 64), 2**62, 2**62 + 1, 2**63 - 1, *(s << 32 for s in range(1, 64))]
    found = {derive_seed(derive_seed(seed, rank), *key) for seed in seeds for rank in range(8) for key in words}
    assert len(found) == len(seeds) * 8 * len(words)
    assert all(0 <= seed < 2**63 for seed in found)


def _recorded(rank: int) -> dict[str, list[int]]:
    """The seeds of all encodings of this rank, in each way to communicate, called with the seeds 0 to 3."""
    found: dict[str, list[int]] = {}
    name, own = "", Encoder._seed_of

    def recording(self: Encoder, key: tuple[int, ...]) -> int:
        if self.codec.stochastic:
            found.setdefault(name, []).append(own(self, key))
        return own(self, key)

    Encoder._seed_of = recording  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local"))
    ways: dict[str, Any] = {
        "all_reduce": lambda s: ncd.all_reduce(torch.ones(5000), codec=CODEC, seed=s),
        "mesh": lambda s: ncd.all_reduce(torch.ones(5000), group=mesh, codec=CODEC, seed=s),
        "mesh, local": lambda s: ncd.all_reduce(
            torch.ones(5000), group=mesh, codec=CODEC, local_codec="int8:stochastic=true", seed=s
        ),
        "all_gather": lambda s: ncd.all_gather_into_tensor(
            torch.empty(WORLD, 300), torch.ones(300), codec=CODEC, seed=s
        ),
        "all_to_all": lambda s: ncd.all_to_all_single(torch.empty(1200), torch.ones(1200), codec=CODEC, seed=s),
        "messages": lambda s: _messages(rank, s),
        "functional": lambda s: _functional(s),
    }
    for name, way in ways.items():  # noqa: B007 - recording reads it
        for seed in range(4):
            way(seed)
    for name in ("ddp", "fsdp", "hsdp"):
        _train(rank, name, mesh)
    Encoder._seed_of = own  # type: ignore[method-assign]
    return found


def _messages(rank: int, seed: int) -> None:
    """To the next rank and to the one after it, and twice by tags."""
    x, y = torch.ones(300), torch.empty(300)
    for distance, tag in ((1, 0), (1, 1), (2, 0)):
        work = ncd.isend(x, (rank + distance) % WORLD, tag=tag, codec=CODEC, seed=seed)
        ncd.recv(y, (rank - distance) % WORLD, tag=tag, codec=CODEC)
        assert work is not None
        work.wait()


def _functional(seed: int) -> None:
    x = torch.ones(400, requires_grad=True)
    ncd.functional.all_reduce(x, codec=CODEC, seed=seed).sum().backward()


def _train(rank: int, kind: str, mesh: Any) -> None:
    """Three steps of models that are given the same seed on all ranks."""
    if kind == "ddp":
        ddp = DDP(Given(SHAPES), bucket_cap_mb=FEW)
        nc.compress_gradients(ddp, CODEC, seed=1)
        for step in range(3):
            trained.backward(ddp, given(SHAPES, rank, step))
    else:
        module = sharded.stack(mesh=mesh) if kind == "hsdp" else sharded.stack()
        nc.compress_gradients(module, CODEC, seed=1)
        sharded.steps(module, rank)
    dist.barrier()


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, list[int]]]:
    return run(WORLD, _recorded, timeout=150)


@pytest.mark.parametrize(
    "name",
    ["all_reduce", "mesh", "mesh, local", "all_gather", "all_to_all", "messages", "functional", "ddp", "fsdp", "hsdp"],
)
def test_all_encodings_of_all_ranks_and_seeds_draw_apart(name: str, recorded: list[dict[str, list[int]]]) -> None:
    seeds = [seed for of_rank in recorded for seed in of_rank[name]]
    assert len(seeds) >= 3 * WORLD
    assert len(set(seeds)) == len(seeds)


# -- the numbers ------------------------------------------------------------------------------------------------------

SAMPLES = 4096


def _correlations(seeds: list[int]) -> Tensor:
    """Of all pairs of streams."""
    cpu = torch.device("cpu")
    rows = torch.stack([draws.uniform(seed, 1, 1, SAMPLES, cpu).view(-1) for seed in seeds]).double()
    rows -= rows.mean(1, keepdim=True)
    rows /= rows.norm(dim=1, keepdim=True)
    i, j = torch.triu_indices(len(seeds), len(seeds), 1)
    return (rows @ rows.T)[i, j]


@pytest.mark.parametrize("how", ["derived", "near"])
def test_streams_of_near_seeds_ranks_and_steps_are_independent(how: str) -> None:
    """The correlation of two independent streams of n numbers has a variance of 1/n. Of 32,640 pairs none is further
    than 6 standard deviations off (by chance: once in 15,000 runs; seeds are fixed, so it holds or does not), and their
    mean square is 1/n up to 6 of its own deviations, sqrt(2 / pairs).
    """
    seeds = list(range(256))
    if how == "derived":
        seeds = [
            derive_seed(derive_seed(derive_seed(seed, step), rank), rank, 0)
            for seed, step, rank in itertools.product(range(8), range(8), range(4))
        ]
    found = _correlations(seeds) * SAMPLES**0.5
    assert float(found.abs().max()) < 6
    assert abs(float(found.square().mean()) - 1) < 6 * (2 / len(found)) ** 0.5


CALLS, NUMEL = 64, 384


def _steady() -> Tensor:
    """Blocks of 32 that open with -7, followed by numbers up to 6 in size: nothing is cut, and a step is 1."""
    x = torch.rand(NUMEL // 32, 32, generator=torch.Generator().manual_seed(0)) * 12 - 6
    x[:, 0] = -7.0
    return x.view(-1)


def _averaged(rank: int) -> Tensor:
    """The mean of what all ranks sent, all of the same tensor, in calls with the seeds 0, 1, 2..."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(CALLS):
        output = torch.empty(WORLD, NUMEL)
        ncd.all_gather_into_tensor(output, _steady(), codec=CODEC, seed=step)
        total += output.double().sum(0)
    return total / (CALLS * WORLD)


def test_seeds_that_count_steps_average_as_well_as_independent_draws() -> None:
    """A number a fraction f above a level is rounded up with probability f: the mean of n independent roundings has a
    variance of f (1 - f) / n. Squared errors over their variances have a mean of 1, with a deviation of about
    sqrt(2 / elements); if ranks and steps shared draws, it would be as many times larger as share one.
    """
    x = _steady().double()
    fraction = x - x.floor()
    inside = (fraction > 0.05) & (fraction < 0.95)
    variance = (fraction * (1 - fraction) / (CALLS * WORLD))[inside]
    ratio = float(((run(WORLD, _averaged)[0] - x)[inside].square() / variance).mean())
    assert ratio < 1 + 5 * (2 / int(inside.sum())) ** 0.5
