"""Codecs that round stochastically, in collectives: what a seed settles, and that nothing is biased."""

from __future__ import annotations

import math

import torch
from ranks import run
from torch import Tensor

from cases import mixed, same_bits
from narrowcast import distributed as ncd

CODEC = "int4:block=32,stochastic=true"


def draws(rank: int) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}

    def reduced(key: str, seed: int | None) -> None:
        x = mixed(2000, seed=rank)
        ncd.all_reduce(x, codec=CODEC, seed=seed)
        found.setdefault(key, []).append(x)

    for key, seed in (("seven", 7), ("seven", 7), ("eight", 8), ("free", None), ("free", None)):
        reduced(key, seed)
    for _ in range(2):
        torch.manual_seed(rank)
        reduced("settled", None)
    work, outputs = [], []
    for _ in range(2):  # and so it is for calls in flight, whose seeds are drawn by the caller
        torch.manual_seed(rank)
        outputs.append([mixed(2000, seed=rank) for _ in range(3)])
        work += [ncd.all_reduce(x, codec=CODEC, async_op=True) for x in outputs[-1]]
    for one in work:
        one.wait()  # type: ignore[union-attr]
    found["flight"], found["again"] = outputs
    gathered = torch.empty(3, 2000)
    ncd.all_gather_into_tensor(gathered, mixed(2000), codec=CODEC, seed=7)
    found["gathered"] = list(gathered)
    return found


def test_a_seed_settles_a_call_and_calls_differ_without_one() -> None:
    for found in run(3, draws):
        assert same_bits(*found["seven"])
        assert not torch.equal(found["seven"][0], found["eight"][0])
        assert not torch.equal(*found["free"])
        assert same_bits(*found["settled"])
        assert all(map(same_bits, found["flight"], found["again"]))
        assert not torch.equal(found["flight"][0], found["flight"][1])


def test_ranks_with_one_seed_and_the_same_data_draw_apart() -> None:
    first, second, third = run(3, draws)[0]["gathered"]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


WORLD, CALLS, NUMEL = 3, 200, 3 * 128


def steady(rank: int) -> Tensor:
    """Blocks of 32 that open with -7, followed by numbers up to 6 in size: nothing is cut, and a step is 1."""
    x = torch.rand(NUMEL // 32, 32, generator=torch.Generator().manual_seed(rank)) * 12 - 6
    x[:, 0] = -7.0
    return x.view(-1)


def averaged(rank: int, codec: str) -> Tensor:
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for seed in range(CALLS):
        x = steady(rank)
        ncd.all_reduce(x, codec=codec, seed=seed)
        total += x
    return total / CALLS


def test_the_mean_of_many_calls_is_the_exact_sum() -> None:
    """Rounding to one of two neighbours a step apart, unbiased, has a variance of at most step**2 / 4.

    An element is rounded by the N - 1 ranks that do not own it, with a step of 1 (7 over the 7 codes on each side), and
    once as a sum, with a step of N (blocks of sums open with -7 N). The draws are independent and each is unbiased
    given those before it, so the variance of a call is at most (N - 1 + N**2) / 4, and that of the mean is 1 / CALLS
    of it. Seeds are fixed, so this either holds or does not; six standard deviations would be passed by chance once in
    a billion elements. Scales are stored in bf16, which holds 1 and 3 exactly.
    """
    sigma = math.sqrt((WORLD - 1 + WORLD**2) / 4 / CALLS)
    exact = torch.stack([steady(rank) for rank in range(WORLD)]).double().sum(0)
    assert bool(((run(WORLD, averaged, CODEC)[0] - exact).abs() <= 6 * sigma).all())
    # Rounding to nearest is off by the same in every call, and does not pass.
    nearest = run(WORLD, averaged, "int4:block=32")[0]
    assert not bool(((nearest - exact).abs() <= 6 * sigma).all())
