"""Observers: the statistics they collect, and the clips that follow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.errors import CalibrationError
from narrowcast.nn.qat.grids import codec_grid
from narrowcast.nn.qat.observers import LeastSquares, MinMax, MovingAverage, Observer, Percentile

INT8 = codec_grid("int8")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def seen(observer: Observer, *rows: Tensor) -> Observer:
    for some in rows:
        observer.observe(some)
    return observer


def test_min_max_remembers_the_extremes_of_every_batch() -> None:
    observer = seen(MinMax(), torch.tensor([[-1.0, 2.0], [0.0, 0.5]]), torch.tensor([[3.0, 0.0], [-9.0, 0.1]]))
    assert observer.low.tolist() == [-1.0, -9.0]
    assert observer.high.tolist() == [3.0, 0.5]
    # int8 holds -128 to 127: a clip is what 127 stands for
    assert observer.clip(INT8).tolist() == [3.0, 9.0 / 128 * 127]


def test_a_moving_average_goes_a_tenth_of_the_way() -> None:
    observer = seen(MovingAverage(), torch.tensor([[-1.0, 1.0]]), torch.tensor([[-2.0, 11.0]]))
    torch.testing.assert_close(observer.high, torch.tensor([2.0]))
    torch.testing.assert_close(observer.low, torch.tensor([-1.1]))


def test_a_percentile_is_that_of_everything_seen_within_one_bin() -> None:
    parts = [torch.randn(1, 5000) * scale for scale in (0.01, 1.0, 3.0)]
    observer = seen(Percentile(0.99), *parts)
    exact = torch.cat(parts, 1).abs().quantile(0.99)
    bin_width = float(observer.reach) * 2 / 2048  # type: ignore[arg-type]
    assert abs(float(observer.clip(INT8)) - float(exact)) <= 2 * bin_width


@pytest.mark.parametrize("spec", ["int4", "apot4", "nf4"])
def test_the_least_squares_clip_is_that_of_a_search_over_all_data(spec: str) -> None:
    made = codec_grid(spec)
    parts = [torch.randn(2, 3000) * torch.tensor([[1.0], [20.0]]) for _ in range(3)]
    clip = seen(LeastSquares(), *parts).clip(made)
    errors = []
    for factor in (1.0, 0.93, 1.07):
        quantizer = nc.nn.FakeQuantize(spec, 0, signed=True)
        quantizer.set_clip(clip * factor)
        whole = torch.cat(parts, 1)
        errors.append((quantizer(whole) - whole).detach().square().sum(1))
    assert bool((errors[0] <= errors[1]).all())
    assert bool((errors[0] <= errors[2]).all())


def test_a_histogram_counts_everything_however_its_range_grew() -> None:
    observer = seen(LeastSquares(), torch.zeros(1, 5), torch.full((1, 7), 1e-3), torch.full((1, 11), 1e5))
    assert float(observer.counts.sum()) == 23  # type: ignore[arg-type]
    assert int(observer.batches) == 3


def test_observers_keep_their_statistics_in_a_state_dict_and_go_on() -> None:
    for kind in (MinMax, MovingAverage, Percentile, LeastSquares):
        one, two = torch.randn(3, 50), torch.randn(3, 50) * 4
        whole = seen(kind(), one, two)
        resumed = kind()
        resumed.load_state_dict(seen(kind(), one).state_dict())
        seen(resumed, two)
        assert torch.equal(resumed.clip(INT8), whole.clip(INT8))
        assert torch.equal(resumed.half().low, whole.low)  # never rounded


@pytest.mark.parametrize("kind", [MinMax, MovingAverage, Percentile, LeastSquares])
def test_a_channel_of_zeros_gets_the_largest_clip_of_the_others(kind: type[Observer]) -> None:
    x = torch.randn(3, 500) * torch.tensor([[1.0], [0.0], [3.0]])
    clip = seen(kind(), x, x).clip(INT8)
    assert clip[1] == clip[2] > clip[0]
    assert seen(kind(), torch.zeros(1, 5)).clip(INT8).tolist() == [1.0]


def test_observers_refuse_what_is_not_finite_and_clips_of_nothing() -> None:
    observer = seen(MinMax(), torch.ones(1, 3))
    with pytest.raises(CalibrationError, match="batch 2"):
        observer.observe(torch.tensor([[math.inf]]))
    assert observer.high.item() == 1.0
    with pytest.raises(CalibrationError, match="no data was observed"):
        MinMax().clip(INT8)
