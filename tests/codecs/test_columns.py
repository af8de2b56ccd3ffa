"""How much errors count in each column of a weight, told by the weight alone."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from narrowcast.codecs import tiles
from narrowcast.codecs.columns import PRIOR, column_weights


def weights_of(matrix: torch.Tensor) -> torch.Tensor | None:
    return column_weights(*matrix.shape, lambda start, stop: matrix[start:stop])


def test_a_column_counts_in_inverse_proportion_to_its_mean_square() -> None:
    matrix = torch.randn(4096, 3) * torch.tensor([0.5, 1.0, 2.0])
    found = weights_of(matrix)
    squares = torch.cat([matrix, matrix.square().mean().sqrt().expand(PRIOR, 3)]).double().square().mean(0)
    assert found is not None
    torch.testing.assert_close(found.double(), squares.mean() / squares, rtol=2.0**-8, atol=0)  # it has 8 bits


def test_a_column_of_zeros_counts_most_and_not_without_bound() -> None:
    matrix = torch.ones(48, 4)
    matrix[:, 2] = 0.0
    found = weights_of(matrix)
    assert found is not None
    assert found.argmax() == 2
    assert 1 < found[2] <= (48 + PRIOR) / PRIOR * (1 + 2.0**-8)


def test_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(100, 64)
    whole = weights_of(matrix)
    monkeypatch.setattr(tiles, "TILE", 64 * 7)
    parts = weights_of(matrix)
    assert whole is not None
    assert parts is not None
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("matrix", [torch.zeros(4, 8), torch.full((4, 8), torch.nan), torch.empty(0, 8)])
def test_where_nothing_can_be_told_all_columns_count_alike(matrix: torch.Tensor) -> None:
    assert weights_of(matrix) is None


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("codec", ["int4:block=64", "int3:block=64", "nf4"])
def test_searched_scales_lose_less_than_nearest_ones_however_few_rows_there_are(rows: int, codec: str) -> None:
    draws = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 2048, generator=draws) * (0.2 + torch.rand(2048, generator=draws))
    errors = []
    for rounding in ("nearest", "search"):
        layer = torch.nn.Sequential(torch.nn.Linear(2048, rows, bias=False)).requires_grad_(False)
        layer[0].weight.copy_(weight)  # type: ignore[operator]
        nc.quantize_(layer, codec, rounding=rounding)
        nc.dequantize_(layer)
        errors.append(float((layer[0].weight - weight).square().sum()))  # type: ignore[operator]
    assert errors[1] < errors[0]
