"""cuda/sums.cu on a CPU, as test_cuda_emulated.py runs the others: the reference's bits, whatever the rows hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_emulated import emulator, host

import narrowcast as nc
from narrowcast.kernels import reference
from narrowcast.kernels.cuda import sums
from narrowcast.kernels.layout import Recipe

__all__ = ["emulator", "host"]  # fixtures

SPECS = ("int4", "nf4", "apot4", "int4:block=1024", "nf4:block=32", "apot4:block=128")
FLT_MAX = torch.finfo(torch.float32).max


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any size, on what stands for a Hopper GPU; two warps, so that more than one block has work."""
    monkeypatch.setattr(sums, "FEWEST", 1)
    monkeypatch.setattr(sums, "MOST_WARPS", 2)
    monkeypatch.setattr(sums, "_launches", {})
    monkeypatch.setattr(sums, "runs_on", lambda device: True)


def recipe_of(spec: str) -> Recipe:
    return nc.codec(spec).recipe(torch.device("cpu"))


def rows_of(ranks: int, numel: int) -> Tensor:
    """Random rows with blocks of zeros, of denormals, of very different sizes, with a NaN and with an infinity."""
    rows = torch.randn(ranks, numel, generator=torch.Generator().manual_seed(numel + ranks))
    place = torch.arange(numel)
    rows *= torch.exp2((place // 40 % 25 - 12).float())
    rows[:, place // 96 % 7 == 3] *= 2.0**-130
    rows[:, place // 128 % 9 == 4] = 0.0
    rows[0, place // 128 % 11 == 5] = -0.0
    if numel > 1500:
        rows[1, 1300], rows[ranks - 1, numel - 1], rows[0, 700] = torch.nan, -torch.inf, FLT_MAX
    return rows


def check(spec: str, data: Tensor, numel: int, own: Tensor | None = None, rank: int = 0, divisor: int = 1) -> None:
    recipe = recipe_of(spec)
    out = torch.full((data.shape[1],), 0xA5, dtype=torch.uint8)
    assert sums.decode_sum_encode(out, data, numel, recipe, own, rank, divisor)
    expected = reference.decode_sum_encode(data, numel, recipe, own, rank, divisor, 0)
    assert torch.equal(out, expected)


def encoded(spec: str, ranks: int, numel: int) -> Tensor:
    return reference.encode(rows_of(ranks, numel), recipe_of(spec), 0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("ranks", "numel"), [(8, 4096), (8, 2989), (2, 1), (3, 33), (11, 1087)])
def test_sums_equal_the_reference_bit_for_bit(spec: str, ranks: int, numel: int) -> None:
    check(spec, encoded(spec, ranks, numel), numel)


@pytest.mark.parametrize("spec", ["int4", "nf4", "apot4"])
@pytest.mark.parametrize(
    ("ranks", "rank", "divisor", "dtype"),
    [(4, 0, 4, torch.float32), (3, 2, 3, torch.bfloat16), (10, 9, 10, torch.float16), (2, 0, 1, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("numel", [29, 2001])
def test_own_rows_and_divisors(spec: str, ranks: int, rank: int, divisor: int, dtype: torch.dtype, numel: int) -> None:
    own = -rows_of(ranks, numel)[0].clamp(-60000, 60000).to(dtype)
    check(spec, encoded(spec, ranks, numel), numel, own, rank, divisor)


@pytest.mark.parametrize("spec", ["int4", "nf4", "apot4"])
def test_any_bytes_are_summed_as_the_reference_does(spec: str) -> None:
    data = encoded(spec, 8, 2048)
    noise = torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    check(spec, noise, 2048)
    huge = data.clone()  # scales of which products overflow one way or the other
    huge[:, 1024:] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)[torch.randint(0, 2, (8, 1))]
    huge[:, 1024::2] = 0x20
    check(spec, huge, 2048)


@pytest.mark.parametrize("spec", ["int4", "nf4"])
def test_rows_may_be_apart(spec: str) -> None:
    data = encoded(spec, 4, 1100)
    wide = torch.full((4, data.shape[1] + 48), 0xFF, dtype=torch.uint8)
    wide[:, : data.shape[1]] = data
    check(spec, wide[:, : data.shape[1]], 1100)


@pytest.mark.parametrize(
    "spec",
    [
        "int4:scale=fp16",
        "int4:block=96",
        "int4:block=row",
        "int4:stochastic=true",
        "int8",
        "fp8_e4m3",
        "pot4",
        "nf4:block=16",
    ],
)
def test_formats_that_it_is_not_made_for_are_declined(spec: str) -> None:
    data = encoded(spec, 2, 2048)
    assert not sums.takes(recipe_of(spec), torch.device("cpu"))
    assert not sums.decode_sum_encode(data[0].clone(), data, 2048, recipe_of(spec), None, 0, 1)


def test_rows_that_it_is_not_made_for_are_declined() -> None:
    data, recipe = encoded("int4", 17, 2048), recipe_of("int4")
    out, own = data[0].clone(), torch.zeros(2049)
    assert not sums.decode_sum_encode(out, data, 2048, recipe, None, 0, 1)
    assert not sums.decode_sum_encode(out, data[:1], 2048, recipe, None, 0, 1)
    assert not sums.decode_sum_encode(out, data[:2], 2048, recipe, own[:2048].double(), 0, 1)
    assert not sums.decode_sum_encode(out, data[:2], 2048, recipe, own[1:], 0, 1)
    assert sums.decode_sum_encode(out, data[:2], 2048, recipe, own[:2048], 0, 1)


def test_tables_of_bytes_tell_the_numbers_of_both_codes() -> None:
    for spec in ("int4", "nf4", "apot4"):
        recipe = recipe_of(spec)
        tables = sums.tables_of(recipe, torch.device("cpu"))
        assert tables is not None
        pairs = tables.numbers[:512].view(torch.float32).view(256, 2)
        assert float(pairs[0x21, 0]) == float(pairs[0x12, 1])
        assert tables.fused == (spec != "nf4")
