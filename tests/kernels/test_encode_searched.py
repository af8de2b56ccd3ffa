"""Searched scales: ordinary rows, never worse than `encode` under the search's loss, the same bytes on every kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import block_size, kernels, mixed
from narrowcast.kernels.reference import search

SIZES = (1, 64, 200)


def block_losses(codec: nc.Codec, x: Tensor, rows: Tensor, importance: Tensor | None, gain: float = 0.0) -> Tensor:
    """The loss of each block, in fp64."""
    error, weights = (x - codec.decode(rows, x.shape[1])).double(), 1.0 if importance is None else importance.double()
    size = block_size(codec, x.shape[1])

    def total(product: Tensor) -> Tensor:
        return torch.nn.functional.pad(product * weights, (0, -x.shape[1] % size)).view(len(x), -1, size).sum(-1)

    exact = x.double()
    return total(error * error) + gain * total(error * exact).square() / total(exact * exact)


def test_a_gain_keeps_the_size_of_blocks() -> None:
    codec = nc.codec("int3:block=64")
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    lacking = []
    for gain in (0.0, 4.0, 1e6):
        rows = codec.encode_searched(x, None, gain)
        losses = [float(block_losses(codec, x, some, None, gain).sum()) for some in (codec.encode(x), rows)]
        assert losses[1] < losses[0]
        decoded = codec.decode(rows, 512)
        lacking.append(1 - float((decoded * x).sum() / (x * x).sum()))
    # Squared error alone leaves out nearly as much as it loses, 3% of the energy here (15 dB at 3 bits). Codes change
    # with the fitted scale once more, so that no gain brings it to nothing.
    assert lacking[0] > 0.02
    assert lacking[1] < lacking[0] / 2
    assert 0 < lacking[2] < lacking[1]


@pytest.mark.parametrize("gain", [-1.0, float("nan"), float("inf")])
def test_a_gain_that_is_no_number_from_zero_up_is_refused(gain: float) -> None:
    with pytest.raises(nc.errors.SpecError, match="gain="):
        nc.codec("int4").encode_searched(torch.randn(2, 64), None, gain)


@pytest.mark.parametrize("gain", [0.0, 4.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_block_loses_more_than_with_nearest_rounding(codec: nc.Codec, weighted: bool, gain: float) -> None:
    if codec.stochastic:
        pytest.skip("encode draws, and a draw may be lucky")
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(1)) * 0.02
    importance = torch.rand(200, generator=torch.Generator().manual_seed(2)) + 0.1 if weighted else None
    rows = codec.encode_searched(x, importance, gain)
    assert rows.shape == (6, codec.row_bytes(200))
    nearest, searched = (block_losses(codec, x, some, importance, gain) for some in (codec.encode(x), rows))
    # A sum of at most 200 products of three fp32 factors: each rounds 3 times, each addition once (at most 10 in a
    # row, in lanes), so a loss is off by (3 + 10) * 2**-24 of itself. The difference of two is off by twice that.
    assert bool((searched <= nearest * (1 + 2.0**-18)).all())


@pytest.mark.parametrize("spec", ["int4", "int3", "nf4", "apot4", "int4:zero_point=true", "sign", "int4:block=row"])
def test_it_gains_on_gaussian_weights(spec: str) -> None:
    codec = nc.codec(spec)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    nearest, searched = (
        float((codec.decode(rows, 512) - x).square().sum()) for rows in (codec.encode(x), codec.encode_searched(x))
    )
    assert searched < nearest * (1.0 if spec == "sign" else 0.97)


@pytest.mark.parametrize("numel", SIZES)
def test_every_kernel_gives_the_bytes_of_the_reference(codec: nc.Codec, numel: int) -> None:
    recipe = codec.recipe(torch.device("cpu"))
    x = mixed(3 * numel, seed=numel).view(3, numel)
    x[1, 0] = float("nan")
    importance = torch.rand(numel, generator=torch.Generator().manual_seed(3)) + 0.1
    for weights, gain in ((None, 0.0), (None, 3.0), (importance, 0.0), (importance, 3.0)):
        expected = search.encode_searched(x, weights, gain, recipe)
        for name, kernel in kernels("cpu").items():
            out = torch.full_like(expected, 7)
            kernel.encode_searched(out, x, weights, gain, recipe)
            assert torch.equal(out, expected), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    codec = nc.codec("int4")
    x = torch.randn(70, 5, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    expected = search.encode_searched(x.contiguous(), None, 0.0, codec.recipe(torch.device("cpu")))
    assert torch.equal(codec.encode_searched(x), expected)
    assert torch.equal(codec.encode_searched(x.reshape(1, 5, 70))[0], expected)


def test_rows_longer_than_a_task_and_extreme_values() -> None:
    recipe = nc.codec("int4:block=row").recipe(torch.device("cpu"))
    x = torch.randn(2, 70_000, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e30  # squares overflow: the scale stays that of nearest rounding
    expected = search.encode_searched(x, None, 3.0, recipe)
    for kernel in kernels("cpu").values():
        out = torch.empty_like(expected)
        kernel.encode_searched(out, x, None, 3.0, recipe)
        assert torch.equal(out, expected)
    assert torch.equal(expected[1], nc.codec("int4:block=row").encode(x)[1])


def test_nothing_to_encode() -> None:
    assert nc.codec("int4").encode_searched(torch.empty(0, 64)).shape == (0, nc.codec("int4").row_bytes(64))
    assert nc.codec("int4").encode_searched(torch.empty(2, 0)).shape == (2, 0)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (torch.ones(63), r"importance: expected shape \(64,\), got \(63,\)"),
        (torch.ones(64, dtype=torch.float64), "importance: expected float32"),
    ],
)
def test_importance_of_another_shape_or_dtype_is_refused(importance: Tensor, message: str) -> None:
    with pytest.raises((nc.errors.ShapeError, nc.errors.DtypeError), match=message):
        nc.codec("int4").encode_searched(torch.randn(2, 64), importance)
