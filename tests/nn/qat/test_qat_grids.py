"""The grids that training quantizes to: the codecs' own, signed and unsigned, and rows written from them."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from cases import same_bits
from narrowcast.codecs import Levels
from narrowcast.errors import SpecError
from narrowcast.kernels import reference
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.nn.qat.grids import codec_grid, write_rows

TRAINABLE = [name for name in nc.list_codecs() if name not in ("raw", "fp16", "bf16", "levels")]


@pytest.mark.parametrize("spec", [*TRAINABLE, "apot4:k=1", "apot5:k=4", "levels:table=-0.3|-0.1|0.0|0.7|5.0"])
def test_with_a_codecs_own_scale_a_grid_rounds_as_the_codec_does(spec: str) -> None:
    torch.manual_seed(0)
    grid = codec_grid(spec)
    x = torch.randn(7, 203)
    rows = grid.codec.encode(x)
    scale = grid.codec.split(rows, 203).scales.view(-1)
    assert same_bits(fake_quantize(x, scale, grid.kernel, 0), grid.codec.decode(rows, 203))


@pytest.mark.parametrize("spec", [*TRAINABLE, "levels:table=-0.3|-0.1|0.0|0.7|5.0"])
def test_rows_are_written_with_the_scale_given_and_decode_to_the_same_bits(spec: str) -> None:
    torch.manual_seed(1)
    grid = codec_grid(spec)
    x, scale = torch.randn(6, 97), torch.rand(6) * 0.37 + 1e-3
    values = fake_quantize(x, scale, grid.kernel, 0)
    rows = write_rows(values, scale, grid)
    assert torch.equal(grid.codec.split(rows, 97).scales.view(-1), scale)
    assert torch.equal(grid.codec.decode(rows, 97), values)


def test_every_level_of_an_fp8_grid_and_every_tie_goes_where_a_cast_sends_it() -> None:
    for spec in ("fp8_e4m3", "fp8_e5m2"):
        for signed in (True, False):
            grid = codec_grid(spec, signed).kernel
            ties = torch.cat([grid.levels, (grid.levels[1:] + grid.levels[:-1]) / 2])
            cast = torch.float8_e4m3fn if spec == "fp8_e4m3" else torch.float8_e5m2
            assert torch.equal(
                fake_quantize(ties, torch.ones(1), codec_grid(spec, signed).kernel, None), ties.to(cast).float()
            )


@pytest.mark.parametrize(
    ("spec", "levels"),
    [
        ("int2", [0, 1, 2, 3]),
        ("apot3", [0, 1, 2, 3, 4, 6, 8, 10]),
        ("apot2", [0, 1, 2, 4]),
        ("pot3", [0, 1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_unsigned_grids_spend_every_code_above_zero(spec: str, levels: list[int]) -> None:
    assert codec_grid(spec, signed=False).levels.tolist() == levels


@pytest.mark.parametrize("bits", range(2, 9))
def test_unsigned_apot_levels_are_the_papers_and_integers(bits: int) -> None:
    levels = codec_grid(f"apot{bits}", signed=False).levels.double()
    torch.testing.assert_close(levels / levels[-1], nc.codecs.apot_levels(bits, signed=False), rtol=1e-12, atol=0)
    assert torch.equal(levels, levels.round())


@pytest.mark.parametrize("spec", [f"apot{bits}" for bits in range(2, 9)] + ["pot3", "pot4", "pot5"])
def test_unsigned_tables_mean_the_same_to_every_kernel(spec: str) -> None:
    # Wide tables that are not symmetric took a way of their own in the native core, and a wrong one.
    torch.manual_seed(2)
    grid = codec_grid(spec, signed=False)
    x, scale = torch.randn(5, 203) * grid.top / 2, torch.tensor([0.7])
    expected = reference.fake_quantize(x.view(1, 1, -1), scale, grid.kernel).view_as(x)
    assert same_bits(fake_quantize(x, scale, grid.kernel, None), expected)
    codec = Levels(grid.levels, block="row")
    assert torch.equal(codec.encode(x), reference.encode(x, codec.recipe(x.device), 0))


@pytest.mark.parametrize(
    ("spec", "signed", "offset"),
    [
        ("apot6", True, 0),  # the largest is 100
        ("apot5", False, 0),
        ("apot6", False, None),  # the largest is 448
        ("int8", True, 0),
        ("int8", False, 128),
        ("nf4", True, None),
        ("fp8_e4m3", True, None),
    ],
)
def test_levels_that_fit_a_byte_are_known(spec: str, signed: bool, offset: int | None) -> None:
    assert codec_grid(spec, signed).integer_offset() == offset


@pytest.mark.parametrize(
    ("spec", "signed", "words"),
    [
        ("bf16", True, "has no scale to learn"),
        ("int4:zero_point=true", True, "zero points are not trained"),
        ("int4:stochastic=true", True, "drop stochastic=true"),
        ("int4:block=32", True, "drop block=32"),
        ("int4:scale=e8m0", True, "drop scale=e8m0"),
        ("nf4", False, "has no unsigned grid"),
        ("apot8:k=8", False, "more than fp32 does"),
    ],
)
def test_a_codec_that_cannot_be_trained_with_says_why(spec: str, signed: bool, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        codec_grid(spec, signed)
