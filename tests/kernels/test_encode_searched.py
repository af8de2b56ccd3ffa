"""Searched scales: ordinary rows, never worse than `encode` under the search's loss, the same bytes on every kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import block_size, kernels, mixed
from narrowcast.kernels.reference import search

SIZES = (1, 64, 200)


def block_losses(codec: nc.Codec, x: Tensor, rows: Tensor, importance: Tensor | None) -> Tensor:
    """The loss of each block, in fp64."""
    error = (codec.decode(rows, x.shape[1]) - x).double().square()
    error = error if importance is None else error * importance.double()
    size = block_size(codec, x.shape[1])
    padded = torch.nn.functional.pad(error, (0, -x.shape[1] % size))
    return padded.view(len(x), -1, size).sum(-1)


@pytest.mark.parametrize("weighted", [False, True])
def test_no_block_loses_more_than_with_nearest_rounding(codec: nc.Codec, weighted: bool) -> None:
    if codec.stochastic:
        pytest.skip("encode draws, and a draw may be lucky")
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(1)) * 0.02
    importance = torch.rand(200, generator=torch.Generator().manual_seed(2)) + 0.1 if weighted else None
    rows = codec.encode_searched(x, importance)
    assert rows.shape == (6, codec.row_bytes(200))
    nearest, searched = (block_losses(codec, x, some, importance) for some in (codec.encode(x), rows))
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
    for weights in (None, importance):
        expected = search.encode_searched(x, weights, recipe)
        for name, kernel in kernels("cpu").items():
            out = torch.full_like(expected, 7)
            kernel.encode_searched(out, x, weights, recipe)
            assert torch.equal(out, expected), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    codec = nc.codec("int4")
    x = torch.randn(70, 5, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    expected = search.encode_searched(x.contiguous(), None, codec.recipe(torch.device("cpu")))
    assert torch.equal(codec.encode_searched(x), expected)
    assert torch.equal(codec.encode_searched(x.reshape(1, 5, 70))[0], expected)


def test_rows_longer_than_a_task_and_extreme_values() -> None:
    recipe = nc.codec("int4:block=row").recipe(torch.device("cpu"))
    x = torch.randn(2, 70_000, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e30  # squares overflow: the scale stays that of nearest rounding
    expected = search.encode_searched(x, None, recipe)
    for kernel in kernels("cpu").values():
        out = torch.empty_like(expected)
        kernel.encode_searched(out, x, None, recipe)
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
