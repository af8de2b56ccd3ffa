"""Every codec keeps `max_error`, on any finite numbers; and the bound is not so wide that anything would keep it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import narrowcast as nc
from cases import CODECS, DTYPES, FLT_MAX, affine, scale_name
from narrowcast import Codec
from narrowcast.codecs import Levels

FLT_MIN = 2.0**-126
DENORMAL = 2.0**-149
EDGES = [
    *[0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, 127.5, -128.0, 448.0, 464.0, 57344.0, 61440.0, 65504.0, 65520.0],
    *[FLT_MAX, -FLT_MAX, FLT_MAX / 2, FLT_MIN, -FLT_MIN, FLT_MIN / 2, DENORMAL, -DENORMAL, 3 * DENORMAL],
    *[2.0**-9, 2.0**-10, 2.0**-14, 2.0**-16, 2.0**-17, 2.0**-24, 2.0**-25, 2.0**-133, 2.0**-134],
]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NUMBERS = st.one_of(FINITE, st.sampled_from(EDGES), st.floats(-1, 1, width=32))
DOUBLES = st.floats(allow_nan=False, allow_infinity=False)


def excess(codec: Codec, x: Tensor) -> Tensor:
    """Error over bound, elementwise; above 1 the bound is broken. An error of zero counts as zero."""
    error = (x.double() - nc.decode(nc.encode(x, codec, seed=7)).double()).abs()
    bound = codec.max_error(x).double()
    # An infinite bound on finite data would let everything pass: only |x| near FLT_MAX may overflow fp32's range.
    assert bool((bound.isfinite() | (x.double().abs() > FLT_MAX / 4)).all())
    return torch.where(error == 0, 0.0, error / bound)


def assert_kept(codec: Codec, x: Tensor) -> None:
    ratio = excess(codec, x)
    if not bool((ratio <= 1).all()):
        worst = int(ratio.argmax())
        value = x.flatten()[worst]
        pytest.fail(f"{codec.spec}: error is {ratio.max()} of the bound at {value} in place {worst} of {x}")


@pytest.mark.parametrize("name", CODECS)
def test_the_bound_holds_for_any_floats_of_any_dtype(name: str) -> None:
    codec = CODECS[name]

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.lists(NUMBERS, min_size=1, max_size=20), st.integers(-140, 120), st.sampled_from(DTYPES))
    def check(values: list[float], exponent: int, dtype: torch.dtype) -> None:
        for x in (torch.tensor(values, dtype=torch.float64), torch.tensor(values, dtype=torch.float64) * 2.0**exponent):
            top = torch.finfo(dtype).max
            assert_kept(codec, x.clamp(-top, top).to(dtype))

    check()


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(st.lists(DOUBLES, min_size=1, max_size=12), st.sampled_from(sorted(CODECS)))
def test_the_bound_holds_for_doubles_beyond_fp32(values: list[float], name: str) -> None:
    assert_kept(CODECS[name], torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_holds_for_a_sweep_of_bit_patterns(codec: Codec, dtype: torch.dtype, device: str) -> None:
    # Every exponent and sign as likely as the next: blocks of 8 or more then mix magnitudes as wildly as can be, so
    # the sweep also scales whole stretches together, where codes other than the lowest are used.
    generator = torch.Generator().manual_seed(dtype.itemsize)
    patterns = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32)
    wild = patterns.view(torch.float32).nan_to_num(nan=1.0, posinf=FLT_MAX, neginf=-FLT_MAX).double()
    stretch = 2.0 ** torch.randint(-150, 128, (64,), generator=generator).double().repeat_interleave(64)
    tame = torch.randn(4096, generator=generator, dtype=torch.float64) * stretch
    top = torch.finfo(dtype).max
    assert_kept(codec, torch.cat([wild, tame]).clamp(-top, top).to(dtype).to(device))


def test_the_bound_holds_for_constant_blocks(codec: Codec) -> None:
    # 1536 is a multiple of every block in the table: no block mixes two edges.
    assert_kept(codec, torch.tensor(EDGES).unsqueeze(1).expand(-1, 1536))


def test_the_bound_is_the_rounding_and_not_much_more(codec: Codec) -> None:
    if codec.name == "raw":
        pytest.skip("raw has no error to compare with")
    # Among 4096 Gaussian numbers some lie nearly half way between two codes (for stochastic rounding: nearly a whole
    # step from where they land), so a sound bound is met to more than half. A bound of infinity, or one that is twice
    # too wide, fails here.
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    ratio = excess(codec, x)
    assert 0.5 < float(ratio.max()) <= 1.0
    assert float(codec.max_error(x).max()) < math.inf


def test_the_bound_of_raw_is_a_millionth() -> None:
    x = torch.randn(1000)
    assert bool((nc.codec("raw").max_error(x) <= x.abs() * 2.0**-19 + 2.0**-147).all())


def test_a_bound_that_is_a_little_too_small_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = nc.codec("int4")
    genuine = codec.max_error
    monkeypatch.setattr(codec, "max_error", lambda x: genuine(x) * 0.9)
    with pytest.raises(pytest.fail.Exception, match="int4: error is"):
        assert_kept(codec, torch.randn(4096, generator=torch.Generator().manual_seed(1)))


# -- worked examples: the error of known blocks, by hand ---------------------------------------------------------------


def test_int8_rounds_half_to_even_in_steps_of_the_largest_over_128() -> None:
    x = torch.tensor([-128.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.0, 127.5])
    assert nc.decode(nc.encode(x, "int8")).tolist() == [-128, 0, 2, 2, 0, -2, -2, 126, 127, 127]
    assert nc.decode(nc.encode(-x, "int8")).tolist() == [128, 0, -2, -2, 0, 2, 2, -126, -127, -127]


def test_bf16_scales_are_rounded_up_so_that_the_largest_element_is_never_clipped() -> None:
    # 8 * (1 + 2**-9) needs the scale 1 + 2**-9, which bf16 (8 bits) does not have: 1 + 2**-7 is the next above.
    x = torch.tensor([-8.0 * (1 + 2.0**-9), 1.0])
    step = 1 + 2.0**-7
    assert nc.decode(nc.encode(x, "int4")).tolist() == [-8 * step, step]


def test_e8m0_scales_are_the_next_power_of_two() -> None:
    x = torch.tensor([7.0, 3.0, 7.5, -0.5])
    codec = nc.codec("int4:scale=e8m0")
    assert nc.decode(nc.encode(x[:2], codec)).tolist() == [7.0, 3.0]
    assert nc.decode(nc.encode(x[1:], codec)).tolist() == [4.0, 8.0, 0.0]


def test_affine_codes_cover_the_range_from_lowest_to_highest() -> None:
    # The step is 15 * fl(1/15), one or two roundings from 1: codes times the step are right to 2**-22.
    for x, expected in (
        ([0.0, 15.0, 7.0, 3.25], [0.0, 15.0, 7.0, 3.0]),
        ([-3.0, 12.0, 0.0, 4.75], [-3.0, 12.0, 0.0, 5.0]),
        ([-15.0, -1.0, -4.75, -14.5], [-15.0, -1.0, -5.0, -14.0]),
    ):
        y = nc.decode(nc.encode(torch.tensor(x), "int4:zero_point=true,scale=fp32"))
        assert y.tolist() == pytest.approx(expected, rel=2.0**-22, abs=0)


def test_sign_decodes_to_the_mean_magnitude() -> None:
    x = torch.tensor([3.0, -1.0, 2.0, -2.0, 0.0, -0.0, 8.0, 0.0])
    assert nc.decode(nc.encode(x, "sign")).tolist() == [2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, 2.0]


def test_a_block_of_the_largest_float_decodes_to_finite_numbers(codec: Codec) -> None:
    for x in (torch.full((40,), FLT_MAX), torch.full((40,), -FLT_MAX), torch.tensor([FLT_MAX, -FLT_MAX] * 20)):
        assert bool(nc.decode(nc.encode(x, codec, seed=1)).isfinite().all())


def test_the_largest_floats_of_both_signs_keep_their_signs(codec: Codec) -> None:
    if isinstance(codec, Levels) and not codec.levels[0] < 0 < codec.levels[-1]:
        pytest.skip("the table has one sign")
    if affine(codec) and scale_name(codec) == "fp16":
        pytest.skip("no fp16 scale spans both, so that the zero point can only keep one end")
    y = nc.decode(nc.encode(torch.tensor([FLT_MAX, -FLT_MAX] * 4), codec, seed=1))
    assert y.sign().tolist() == [1.0, -1.0] * 4


def test_the_bound_holds_where_gaps_are_as_small_as_the_smallest_number() -> None:
    codec = Levels([0.0, 2.0**-148, 1.0], scale="fp32")
    x = torch.tensor([2.0**100, 1.25 * 2.0**-49])
    assert bool(((x - nc.decode(nc.encode(x, codec))).abs() <= codec.max_error(x)).all())
