"""Stochastic rounding: right on average, the same from the same seed, and without pattern.

Each statistic below is a sum of many independent draws whose mean and variance are known exactly when rounding is
unbiased and draws are independent, so that divided by its standard deviation it is N(0, 1). A test fails beyond
`Z = 5.6`: P(|N(0, 1)| > 5.6) = 2.2e-8, and fewer than 1,000 such statistics are looked at, so a sound codec would
be blamed with a probability below 1 in 45,000. Seeds are fixed: a test that passes once passes always.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import STOCHASTIC, mixed
from narrowcast import Codec

Z = 5.6
COINS = nc.codec("int8:block=row,scale=e8m0,stochastic=true")
"""With 100 as the largest element the scale is 2**0 (100 / 127 rounded up), so a code is floor(x) plus one draw."""


def draws(probability: float, seed: int, rows: int = 1, numel: int = 20000) -> Tensor:
    """Whether each of `numel` elements of `probability` in each row was rounded up: 0.0 or 1.0."""
    x = torch.full((rows, numel + 1), probability)
    x[:, -1] = 100.0
    y = COINS.decode(COINS.encode(x, seed), numel + 1)
    assert (y[:, -1] == 100.0).all()
    assert set(y[:, :-1].unique().tolist()) <= {0.0, 1.0}
    return y[:, :-1].double()


def z_of_mean(sample: Tensor, probability: float) -> float:
    deviation = math.sqrt(sample.numel() * probability * (1 - probability))
    return float((sample - probability).sum()) / deviation


def z_of_product(a: Tensor, b: Tensor, probability: float) -> float:
    """Correlation of two samples with this mean: products of independent centred draws have variance (p(1-p))**2."""
    centred = (a - probability) * (b - probability)
    return float(centred.sum()) / (math.sqrt(centred.numel()) * probability * (1 - probability))


@pytest.mark.parametrize("probability", [2.0**-10, 0.01, 0.25, 0.5, 0.75, 0.9, 1 - 2.0**-10])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**62, 12345])
def test_an_element_is_rounded_up_as_often_as_it_should(probability: float, seed: int) -> None:
    assert abs(z_of_mean(draws(probability, seed, rows=4), probability)) < Z


@pytest.mark.parametrize("name", STOCHASTIC)
def test_rounding_is_unbiased_element_by_element(name: str) -> None:
    # 4,000 draws of one block: 40 seeds of 100 rows. The error of one element in one draw lies within one step, with
    # variance f(1 - f) step**2 <= step**2 / 4 for the fraction f; so z = mean error / (step / 2 / sqrt(count)) has a
    # deviation of at most 1. A clipped end or a truncated draw is off by a part of a step, that is by dozens of z. The
    # last term allows for the arithmetic itself: draws have 24 bits, and y and the product round to 2**-24.
    codec = STOCHASTIC[name]
    x = torch.tensor([1.0, -1.0, 0.93, -0.93, 0.5, 0.31, -0.21, 1e-3, -1e-3, 0.0, 0.77, -0.66])
    rows = x.expand(100, -1)
    y = torch.cat([codec.decode(codec.encode(rows, seed), x.numel()) for seed in range(40)]).double()
    gaps = y.unique().diff()
    step = float(gaps[gaps > 1e-6].min())
    bias = (y.mean(0) - x).abs()
    assert bool((bias < Z * step / 2 / math.sqrt(len(y)) + step * 2.0**-20).all()), (bias / step).tolist()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_rounding_never_moves_by_a_whole_step(name: str) -> None:
    codec = STOCHASTIC[name]
    x = torch.linspace(-1, 1, 24)
    y = torch.stack([codec.decode(codec.encode(x, seed), 24) for seed in range(50)])
    for element in range(24):
        values = y[:, element].unique()
        assert len(values) <= 2
        # Either side of x: of two values one is below and one above, to within the rounding of the product.
        if len(values) == 2:
            assert float(values[0]) <= float(x[element]) * (1 + 2.0**-20) + 1e-6
            assert float(values[1]) >= float(x[element]) * (1 - 2.0**-20) - 1e-6


@pytest.mark.parametrize("name", STOCHASTIC)
def test_multiples_of_the_step_stay_what_they_are(name: str) -> None:
    codec = STOCHASTIC[name]
    top = 2.0 ** (codec.bits - 1) - 1
    if codec.config().get("zero_point"):
        pytest.skip("the step of affine codes is not known from the largest element alone")
    x = torch.tensor([top, -top, 0.0, 1.0, -1.0])
    assert all(torch.equal(codec.decode(codec.encode(x, seed), 5), x) for seed in range(20))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(name: str, device: str) -> None:
    codec = STOCHASTIC[name]
    x = mixed(500).to(device)
    assert torch.equal(codec.encode(x, 3), codec.encode(x, 3))
    assert not torch.equal(codec.encode(x, 3), codec.encode(x, 4))
    assert torch.equal(nc.encode(x, codec, seed=3).data, nc.encode(x, codec, seed=3).data)


def test_seeds_are_taken_modulo_2_to_the_64(device: str) -> None:
    x = mixed(500).to(device)
    codec = nc.codec("int4:stochastic=true")
    assert torch.equal(codec.encode(x, -1), codec.encode(x, 2**64 - 1))
    assert torch.equal(codec.encode(x, -(2**63)), codec.encode(x, 2**63))
    assert not torch.equal(codec.encode(x, 0), codec.encode(x, 2**32))


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, 2**32), (7, -7), (1, 2**63 - 1)])
def test_draws_of_two_seeds_are_not_correlated(one: int, other: int) -> None:
    assert abs(z_of_product(draws(0.5, one, rows=4), draws(0.5, other, rows=4), 0.5)) < Z


def test_draws_of_two_rows_are_not_correlated() -> None:
    sample = draws(0.5, 9, rows=8)
    for a in range(8):
        for b in range(a):
            assert abs(z_of_product(sample[a], sample[b], 0.5)) < Z


def test_row_r_of_one_seed_is_not_row_r_minus_1_of_the_next() -> None:
    here, there = draws(0.5, 20, rows=3), draws(0.5, 21, rows=3)
    assert abs(z_of_product(here[1:], there[:-1], 0.5)) < Z
    assert abs(z_of_product(here[:-1], there[1:], 0.5)) < Z


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 32, 64, 127, 128, 256, 1024, 4096])
def test_draws_have_no_memory(lag: int) -> None:
    sample = draws(0.5, 17, rows=4)
    assert abs(z_of_product(sample[:, lag:], sample[:, :-lag], 0.5)) < Z


def test_every_bit_of_the_index_matters() -> None:
    # Of each pair (i, i with bit b turned) half agree if draws are independent.
    sample = draws(0.5, 23, numel=16384)[0]
    index = torch.arange(16384)
    for bit in range(14):
        low = index[(index >> bit) % 2 == 0]
        assert abs(z_of_product(sample[low], sample[low | (1 << bit)], 0.5)) < Z


def test_the_draw_of_an_element_depends_on_its_seed_row_and_place_alone() -> None:
    # Not on the block, the width, the values around it or how many rows and elements come after it.
    long = draws(0.5, 31, rows=3, numel=3000)
    assert torch.equal(draws(0.5, 31, rows=2, numel=700), long[:2, :700])
    assert torch.equal(draws(0.5, 31, rows=1, numel=700), long[:1, :700])
    x = torch.full((3000,), 0.5)
    for spec in ("int8:block=8,scale=e8m0", "int8:block=24,scale=e8m0", "int4:block=8,scale=e8m0"):
        codec = nc.codec(f"{spec},stochastic=true")
        top = 100.0 if codec.bits == 8 else 6.0
        padded = x.clone()
        padded[7::8] = top  # keeps the scale of every block at 2**0
        y = codec.decode(codec.encode(padded, 31), 3000)
        keep = torch.arange(3000) % 8 != 7
        assert torch.equal(y[keep].double(), long[0, :3000][keep])


def test_a_higher_fraction_is_rounded_up_whenever_a_lower_one_is() -> None:
    # One uniform number decides, so the elements that went up at 0.3 are among those at 0.6.
    assert bool((draws(0.3, 5) <= draws(0.6, 5)).all())


def test_torch_manual_seed_decides_where_no_seed_is_given(device: str) -> None:
    x = mixed(500).to(device)
    codec = nc.codec("int4:stochastic=true")
    torch.manual_seed(0)
    first, second = codec.encode(x), codec.encode(x)
    torch.manual_seed(0)
    assert torch.equal(codec.encode(x), first)
    assert torch.equal(nc.encode(x, codec).data, second)
    assert not torch.equal(first, second)


def test_a_given_seed_leaves_torchs_generator_alone() -> None:
    x = mixed(100)
    state = torch.get_rng_state()
    nc.encode(x, "int4:stochastic=true", seed=1)
    nc.encode(x, "int4")
    nc.codec("int4:stochastic=true").max_error(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_codecs_that_round_to_nearest_ignore_the_seed(codec: Codec) -> None:
    if codec.stochastic:
        pytest.skip("this one does not")
    x = mixed(300)
    assert torch.equal(codec.encode(x, 1), codec.encode(x, 2))
    assert torch.equal(codec.encode(x), codec.encode(x, 2))
