"""FakeQuantize: what comes out, the gradients of the clip, how it starts, and what it refuses."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import (
    CalibrationError,
    ClipWarning,
    GradientError,
    QuantizeError,
    ShapeError,
    SpecError,
    StateDictError,
)
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.nn.qat.fake_quantize import FLOOR, FakeQuantize


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def started(codec: str, clip: float, **options: object) -> FakeQuantize:
    made = FakeQuantize(codec, **options)
    made._set_clip(torch.tensor([clip]))  # whatever training may have made of it
    return made


# -- values and gradients -------------------------------------------------------------------------------------------


def test_a_hand_worked_example_of_the_papers_gradient() -> None:
    # apot3 has the levels -4, -2, -1, 0, 1, 2, 4 (a sign and two bits); a clip of 2 makes the scale 1/2, and so
    # x =    0.3   -0.9   5.0  -2.0
    # v =    0.6   -1.8  10.0  -4.0
    # q =    1     -2     4    -4
    # y =    0.5   -1.0   2.0  -2.0, and dy/dalpha = (q - v) / 4 inside, q / 4 beyond: 0.1, -0.05, 1, 0.
    quantizer = started("apot3", 2.0)
    x = torch.tensor([0.3, -0.9, 5.0, -2.0], requires_grad=True)
    y = quantizer(x)
    assert y.tolist() == [0.5, -1.0, 2.0, -2.0]
    y.backward(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 0.0, 4.0]
    # 0.1 - 0.1 + 3 + 0: four terms, each rounded a few times to 2**-24 of at most 3
    assert quantizer.alpha.grad is not None
    assert abs(quantizer.alpha.grad.item() - 3.0) < 16 * 3 * 2.0**-24


@pytest.mark.parametrize("codec", ["apot4", "int4", "nf4"])
@pytest.mark.parametrize("normalize", [None, "through"])
def test_gradients_are_the_finite_differences_of_the_straight_through_surrogate(
    codec: str, normalize: str | None
) -> None:
    # The surrogate holds Q(v) - v fixed inside and q beyond: that is differentiable, and the rule is its derivative.
    quantizer = FakeQuantize(codec, 0, channels=3, signed=True, gradient_scale=False, normalize=normalize)
    x, grad = torch.randn(3, 40), torch.randn(3, 40)
    quantizer.start_from(x)
    quantizer.set_clip(quantizer.clip * 0.93)  # nothing lies on the edge, where fp64 might see it on the other side
    x.requires_grad_()
    quantizer(x).backward(grad)
    levels, top = quantizer.levels.double(), quantizer.top

    def parts(x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        scale = (alpha / top).view(-1, 1)
        if normalize is None:
            return x, scale
        deviation, mean = torch.std_mean(x, correction=0)
        return x - mean, scale * deviation

    exact, clip = x.detach().double(), quantizer.alpha.detach().double()
    shifted, scale = parts(exact, clip)
    v = shifted / scale
    q = levels[(v.unsqueeze(-1) - levels).abs().argmin(-1)]
    inside = (v >= levels[0]) & (v <= levels[-1])
    fixed = q - v

    def surrogate(x: Tensor, alpha: Tensor) -> float:
        shifted, scale = parts(x, alpha)
        return float((torch.where(inside, shifted + fixed * scale, q * scale) * grad.double()).sum())

    step, flat_x = 1e-6, exact.flatten()
    for given, other in ((clip, quantizer.alpha.grad), (exact, x.grad)):
        assert other is not None
        flat, found = given.flatten(), other.flatten().double()
        for place in range(min(flat.numel(), 5)):
            moved = torch.zeros_like(flat)
            moved[place] = step
            there = (moved if given is clip else moved.new_zeros(3)), (moved if given is exact else 0 * flat_x)
            ends = [surrogate(exact + sign * there[1].view(3, 40), clip + sign * there[0]) for sign in (1, -1)]
            difference = (ends[0] - ends[1]) / (2 * step)
            # fp32 terms: 40 of a size of about 1, each off by a few 2**-24
            assert abs(difference - float(found[place])) < 40 * 8 * 2.0**-24


def test_a_step_of_sgd_moves_the_scale_as_in_lsq() -> None:
    x, grad, rate = torch.randn(500), torch.randn(500), 0.01
    quantizer = FakeQuantize("int4", signed=True)
    quantizer.start_from(x)
    scale, high = quantizer.clip / 7, 7
    v = x / scale
    terms = torch.where(v < -8, -8.0, torch.where(v > high, float(high), v.round() - v))
    of_scale = (grad * terms).sum() / math.sqrt(500 * high)  # Esser et al. 2020, eq. 3 and section 2.2
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=rate)
    quantizer(x).backward(grad)
    optimizer.step()
    torch.testing.assert_close(quantizer.clip / 7, scale - rate * of_scale, rtol=1e-5, atol=0)


def test_gradients_stop_at_mean_and_deviation_where_they_are_detached() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    quantizer = FakeQuantize("apot4", signed=True, normalize="detached")
    quantizer.set_clip(torch.tensor([10.0]))
    quantizer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 16))  # nothing is clipped, and nothing else depends on x


def test_a_normalized_weight_is_centred_and_keeps_its_size() -> None:
    weight = torch.randn(32, 64) * 0.01 + 0.5
    quantizer = FakeQuantize("apot6", 0, channels=32, signed=True, normalize="through")
    quantizer.start_from(weight)
    centred = weight - weight.mean()
    assert quantizer.clip.min() > 0.5  # in units of the deviation
    error = (quantizer(weight) - centred).square().mean() / centred.square().mean()
    assert error < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_results_have_the_dtype_of_x_and_clips_stay_fp32(dtype: torch.dtype) -> None:
    quantizer = FakeQuantize("apot4").to(dtype)
    x = torch.randn(10, dtype=dtype)
    assert quantizer(x).dtype == dtype
    assert quantizer.alpha.dtype == quantizer.levels.dtype == torch.float32
    clip = quantizer.clip
    assert torch.equal(quantizer.half().clip, clip)


def test_autocast_and_compile_change_nothing() -> None:
    quantizer = FakeQuantize("apot4")
    x = torch.randn(100, requires_grad=True)
    y = quantizer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(quantizer(x), y)
    compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), y)
    compiled(x).sum().backward()
    found = quantizer.alpha.grad
    quantizer.alpha.grad = None
    quantizer(x).sum().backward()
    assert quantizer.alpha.grad is not None
    assert torch.equal(found, quantizer.alpha.grad)
    torch._dynamo.reset()


# -- the start ------------------------------------------------------------------------------------------------------


def test_inputs_that_are_never_negative_get_the_unsigned_grid() -> None:
    quantizer = FakeQuantize("apot4")
    quantizer(torch.rand(100))
    assert quantizer.levels.numel() == 16
    assert quantizer.levels[0] == 0
    signed = FakeQuantize("apot4")
    signed(torch.randn(100))
    assert signed.levels.numel() == 15
    forced = FakeQuantize("apot4", signed=True)
    forced(torch.rand(100))
    assert forced.levels.numel() == 15


def test_max_clips_nothing_and_percentile_clips_outliers() -> None:
    x = torch.cat([torch.linspace(-1, 1, 9999), torch.tensor([100.0])])
    whole = FakeQuantize("int8", start="max")
    whole(x)
    assert whole.clip.item() == 100.0
    most = FakeQuantize("int8", start="percentile")
    most(x)
    assert 0.99 < most.clip.item() < 1.01


@pytest.mark.parametrize("codec", ["apot4", "int4", "int2", "nf4", "pot4"])
def test_the_mse_start_is_better_than_any_clip_nearby_and_than_max(codec: str) -> None:
    x = torch.randn(2000)
    errors = []
    for factor in (1.0, 0.9, 1.1):
        quantizer = FakeQuantize(codec, signed=True, start="mse")
        quantizer.start_from(x)
        quantizer.set_clip(quantizer.clip * factor)
        errors.append((quantizer(x) - x).square().mean().item())
    largest = FakeQuantize(codec, signed=True, start="max")
    errors.append((largest(x) - x).square().mean().item())
    assert errors[0] == min(errors)


def test_channels_have_clips_of_their_own_along_any_axis() -> None:
    x = torch.randn(5, 3, 7) * torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1)
    for axis in (1, -2):
        quantizer = FakeQuantize("int8", axis, start="max", signed=True)
        y = quantizer(x)
        assert quantizer.alpha.shape == (3,)
        for channel in range(3):
            alone = FakeQuantize("int8", start="max", signed=True)
            assert torch.equal(alone(x[:, channel]), y[:, channel])


@pytest.mark.parametrize("start", ["max", "percentile", "mse"])
def test_a_channel_of_zeros_starts_at_the_largest_clip_of_the_others_and_stays_zero(start: str) -> None:
    x = torch.randn(3, 50)
    x[1] = 0
    quantizer = FakeQuantize("apot4", 0, signed=True, start=start)
    assert torch.equal(quantizer(x)[1], torch.zeros(50))
    assert quantizer.clip[1] == max(quantizer.clip[0], quantizer.clip[2])
    empty = FakeQuantize("apot4", 0, start=start)
    assert torch.equal(empty(torch.zeros(3, 4)), torch.zeros(3, 4))
    assert empty.clip.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("options", [{}, {"channel_axis": 1}, {"learn": False, "observer": "minmax"}], ids=str)
def test_a_batch_without_elements_starts_nothing_and_passes(options: dict[str, Any]) -> None:
    quantizer = FakeQuantize("int4", **options)
    empty = torch.empty(0, 3, requires_grad=True)
    quantizer(empty).sum().backward()
    assert empty.grad is not None
    assert not quantizer.is_started
    quantizer(torch.randn(8, 3))
    before = quantizer.clip
    assert quantizer(empty).shape == (0, 3)
    assert torch.equal(quantizer.clip, before)


def test_without_learning_a_clip_follows_its_observer() -> None:
    quantizer = FakeQuantize("int8", learn=False, observer="minmax", signed=True)
    quantizer(torch.tensor([-1.0, 1.0]))
    assert quantizer.clip.item() == 1.0
    quantizer(torch.tensor([-1.0, 3.0]))
    assert quantizer.clip.item() == 3.0
    quantizer.eval()(torch.tensor([9.0]))
    assert quantizer.clip.item() == 3.0
    assert not quantizer.alpha.requires_grad


# -- a clip that leaves the positive numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_bad_clip_counts_as_the_floor_is_counted_and_reported_once(bad: float) -> None:
    quantizer = started("apot4", bad)
    x = torch.randn(10, requires_grad=True)
    with pytest.warns(ClipWarning, match="alpha_lr"):
        y = quantizer(x)
    assert y.abs().max() <= FLOOR
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantizer(x).sum().backward()
    assert int(quantizer.floored) == 2
    assert quantizer.clip.item() == FLOOR


@pytest.mark.filterwarnings("ignore::narrowcast.errors.ClipWarning")
def test_training_recovers_from_a_negative_clip() -> None:
    quantizer = started("int4", -1e-3, gradient_scale=False)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1)
    x = torch.rand(100)
    for _ in range(200):
        optimizer.zero_grad()
        (quantizer(x) - x).square().mean().backward()
        optimizer.step()
    assert 0.5 < quantizer.clip.item() < 1.5


def test_a_nan_stays_one_and_reaches_the_clips_gradient() -> None:
    quantizer = started("apot4", 1.0)
    y = quantizer(torch.tensor([1.0, math.nan]))
    assert y[0] == 1.0
    assert y[1].isnan()
    y.sum().backward()
    assert quantizer.alpha.grad is not None
    assert quantizer.alpha.grad.isnan().all()


# -- refused --------------------------------------------------------------------------------------------------------


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ShapeError, match=r"channel_axis=2: x has 2 dimensions.*from -2 to 1"):
        FakeQuantize("int8", 2)(torch.randn(3, 4))
    quantizer = FakeQuantize("int8", 0)
    quantizer(torch.randn(3, 4))
    with pytest.raises(ShapeError, match="4 slices along channel_axis=0, and this quantizer 3 clips"):
        quantizer(torch.randn(4, 4))


def test_data_that_is_not_finite_starts_nothing() -> None:
    quantizer = FakeQuantize("int8")
    with pytest.raises(QuantizeError, match="an infinity or a NaN"):
        quantizer(torch.tensor([1.0, math.nan]))
    assert not quantizer.is_started


def test_eval_mode_and_compilation_do_not_start_a_clip() -> None:
    with pytest.raises(CalibrationError, match=r"eval mode.*calibrate_"):
        FakeQuantize("int8").eval()(torch.randn(3))
    with pytest.raises(Exception, match="no clip yet"):
        torch.compile(FakeQuantize("int8"), fullgraph=True, backend="eager")(torch.randn(3))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": "median"}, "start='median'"),
        ({"normalize": True}, "normalize=True"),
        ({"observer": "best"}, "observer='best'"),
        ({"channel_axis": 0.5}, "channel_axis=0.5"),
        ({"codec": "apot9"}, "apot9"),
        ({"codec": "apot4:k=7"}, "k=7 makes no grid of 4 bits"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        FakeQuantize(**{"codec": "int8", **options})


# -- state dicts ----------------------------------------------------------------------------------------------------


def through_a_file(module: nn.Module) -> dict:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_dict_keeps_clips_signs_and_statistics() -> None:
    for axis in (None, 1):
        first = FakeQuantize("apot4", axis, observer="mse")
        x = torch.rand(20, 3)
        y = first(x)
        other = FakeQuantize("apot4", axis, observer="mse").eval()
        other.load_state_dict(through_a_file(first))
        assert torch.equal(other(x), y)
        assert other.levels[0] == 0
        assert torch.equal(other.observer.counts, first.observer.counts)  # type: ignore[union-attr]
        assert torch.equal(copy.deepcopy(other)(x), y)


@pytest.mark.parametrize("other", ["apot3", "int4", "apot4:k=1"])
def test_a_state_dict_of_another_grid_is_refused_and_changes_nothing(other: str) -> None:
    quantizer, wrong = FakeQuantize("apot4"), FakeQuantize(other)
    quantizer(torch.randn(10))
    wrong(torch.randn(10) * 7)
    before = copy.deepcopy(quantizer.state_dict())
    with pytest.raises(StateDictError, match=r"another grid.*Nothing was loaded"):
        quantizer.load_state_dict(wrong.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in quantizer.state_dict().items())


def test_a_state_dict_of_the_other_sign_or_of_other_channels_is_refused() -> None:
    unsigned, signed = FakeQuantize("apot4"), FakeQuantize("apot4", signed=True)
    unsigned(torch.rand(10))
    with pytest.raises(StateDictError, match="16 levels from 0 to 48"):
        signed.load_state_dict(unsigned.state_dict())
    several = FakeQuantize("apot4", 0, channels=3)
    with pytest.raises(StateDictError, match="1 clip"):
        several.load_state_dict(FakeQuantize("apot4").state_dict())


def test_the_front_door_has_it() -> None:
    assert nc.nn.FakeQuantize is FakeQuantize


# -- one node ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [None, "through", "detached"])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("spec", ["apot4", "int4", "int8"])
def test_one_node_gives_the_bits_of_single_operations(spec: str, axis: int | None, normalize: str | None) -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(5))
    for tensor in (x, torch.full((6, 50), 0.3)):
        quantizer = nc.nn.FakeQuantize(spec, axis, normalize=normalize)
        quantizer.start_from(x)
        leaf, grad = tensor.clone().requires_grad_(), torch.randn(6, 50)
        y = quantizer(leaf)
        assert type(y.grad_fn).__name__ == "QuantizeBackward"
        shifted, scale = quantizer.prepared(leaf)
        slow = fake_quantize(shifted, scale, quantizer.grid, axis)
        assert same_bits(y, slow)
        found = torch.autograd.grad(y, (leaf, quantizer.alpha), grad)
        wanted = torch.autograd.grad(slow, (leaf, quantizer.alpha), grad)
        assert same_bits(found[0], wanted[0])
        assert same_bits(found[1], wanted[1])


def test_one_node_refuses_to_be_differentiated_twice() -> None:
    quantizer = nc.nn.FakeQuantize("apot4", normalize="through")
    x = torch.randn(8, requires_grad=True)
    (first,) = torch.autograd.grad(quantizer(x).sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="differentiated twice"):
        first.sum().backward()
