"""What stands beside a weight counts: tables that are added, tokens that are padding."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.rounding.search import round_by_search


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Tables(nn.Module):
    """Words, positions and types, added; `apart` also looks types up alone."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 64, padding_idx=0), nn.Embedding(16, 64)
        self.types, self.apart = nn.Embedding(2, 64), apart

    def forward(self, tokens: Tensor) -> Tensor:
        types = torch.zeros_like(tokens)
        x = self.words(tokens) + self.types(types)
        x = x + self.positions(torch.arange(tokens.shape[1])[None])
        return x * self.types(types) if self.apart else x


def tokens(count: int = 8) -> Tensor:
    return torch.randint(1, 50, (count, 16))


def test_tables_that_are_added_make_up_for_each_other() -> None:
    model, judged = Tables(), tokens(64)
    exact, data = model(judged).detach(), [tokens(), tokens()]

    def error(**options: object) -> float:
        rounded = copy.deepcopy(model)
        report = nc.quantize_(rounded, "int4:block=64", **options)
        assert [entry.name for entry in report.entries] == ["words.weight", "positions.weight", "types.weight"]
        assert all(entry.error <= entry.nearest_error for entry in report.entries)
        assert bool((rounded.words(torch.tensor([0])) == 0).all())  # padding stays zero
        return float((rounded(judged) - exact).detach().square().sum())

    alone = error(rounding=functools.partial(round_by_search, gain=0.0))
    # Three errors of one size, of which the constant one is gone: two thirds, and a little more for its own rounding.
    assert error(rounding="gptq", data=data) < 0.8 * alone
    assert error(rounding="search", data=data) < 0.8 * alone
    assert error(rounding="search") < 0.8 * alone  # of random tokens


def test_a_table_that_is_also_used_alone_is_rounded_as_it_is() -> None:
    model, other = Tables(apart=True), Tables()
    other.load_state_dict(model.state_dict())
    nc.quantize_(model, "int4:block=64", rounding="gptq", data=[tokens()])
    alone = functools.partial(round_by_search, gain=0.0)  # rows of tables are looked up, and no sum has a gain
    nc.quantize_(other, "int4:block=64", rounding=alone)
    assert all(torch.equal(one, same) for one, same in zip(model.parameters(), other.parameters(), strict=True))


def test_padding_does_not_count() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 8)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    x = torch.randn(6, 9, 8) @ torch.randn(8, 32)
    mask = torch.arange(9) < torch.tensor([9, 3, 5, 9, 2, 7])[:, None]
    padded = torch.where(mask[..., None], x, 100.0)
    one, other = Model(), Model()
    other.load_state_dict(one.state_dict())
    nc.quantize_(one, "int3:block=16", rounding="gptq", data=[{"x": padded, "attention_mask": mask.long()}])
    nc.quantize_(other, "int3:block=16", rounding="gptq", data=[x[mask]])
    assert torch.equal(one.layer.weight, other.layer.weight)
