"""rounding="search" lets columns count by their inputs, which random tokens through the model tell."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.kernels.reference.search import GAIN
from narrowcast.nn.rounding import random_tokens
from narrowcast.nn.rounding.search import LEAST, column_counts

CODEC = "int3:block=32"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Model(nn.Module):
    """Tokens, a norm some of whose outputs are large, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.norm.weight.data = torch.logspace(-1, 1, 64)[torch.randperm(64)]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.norm(self.table(tokens)))  # type: ignore[no-any-return]


def rows_of_plain_search(layer: nn.Linear) -> Tensor:
    return nc.codec(CODEC).encode_searched(layer.weight.detach(), gain=GAIN)


def test_columns_with_large_inputs_count_more() -> None:
    model = Model()
    floats, tokens = model.layer.weight.detach().clone(), torch.randint(50, (64, 16))
    plain = nc.codec(CODEC).decode(rows_of_plain_search(model.layer), 64)
    report = nc.quantize_(model, CODEC, rounding="search")
    x = model.norm(nn.functional.embedding(tokens, model.table.decoded())).detach()
    errors = [float((x @ (floats - some).t()).square().sum()) for some in (model.layer.decoded(), plain)]
    assert errors[0] < 0.8 * errors[1]
    assert [entry.note for entry in report.entries] == ["", ""]
    assert all(entry.error < entry.nearest_error for entry in report.entries)


def test_the_loss_is_the_one_that_the_report_names() -> None:
    model = Model()
    floats, copied = model.layer.weight.detach().clone(), copy.deepcopy(model)
    weights, _ = nc.nn.survey.survey(model)
    guess = random_tokens.guess_inputs(model, [(weight, nc.codec(CODEC)) for weight in weights])
    (counts,) = column_counts(guess.squares["layer.weight"])
    with torch.no_grad():
        squares = copied.norm(copied.table(random_tokens._tokens(copied))).square().mean((0, 1))
    torch.testing.assert_close(counts, (squares / squares.mean()).clamp(min=LEAST))
    report = nc.quantize_(model, CODEC, rounding="search")
    exact, error = floats.double(), (floats - model.layer.decoded()).double()
    blocks = [part.reshape(-1, 32) for part in (exact, error, counts.double().expand(32, 64))]
    x, e, w = blocks
    lost = (w * e * e).sum() + GAIN * ((w * e * x).sum(1).square() / (w * x * x).sum(1)).sum()
    assert report.entries[1].error == pytest.approx(float(lost / (w * x * x).sum()), rel=1e-5)  # sums in fp32 order


def test_the_pass_changes_nothing_but_weights() -> None:
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm, self.dropout, self.calls = nn.BatchNorm1d(16), nn.Dropout(0.5), 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            self.cache = torch.rand(3)
            return self.dropout(self.batch_norm(super().forward(tokens)))  # type: ignore[no-any-return]

    model = Counting().train()
    buffers, state = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    nc.quantize_(model, CODEC, rounding="search")
    assert model.calls == 0
    assert not hasattr(model, "cache")
    assert all(module.training for module in model.modules())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.layer._forward_pre_hooks


def test_two_calls_give_the_same_bytes() -> None:
    one = Model()
    other = copy.deepcopy(one)
    nc.quantize_(one, CODEC, rounding="search")
    torch.rand(7)
    nc.quantize_(other, CODEC, rounding="search")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def _fails(model: Model) -> None:
    model.forward = lambda tokens, mask: None  # type: ignore[method-assign,misc,assignment]


def _has_a_smaller_table(model: Model) -> None:
    model.norm = nn.Embedding(4, 64)  # type: ignore[assignment]
    model.forward = lambda tokens: model.layer(model.norm(tokens))  # type: ignore[method-assign]


def _overflows(model: Model) -> None:
    model.norm.weight.data.fill_(float("inf"))


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (_fails, "does not run on random tokens (TypeError"),
        (_has_a_smaller_table, "a token is out of range for a table of 4 rows"),
        (_overflows, "random tokens do not reach it"),
    ],
)
def test_a_model_that_does_not_run_has_the_reason_in_its_report(harm, why: str) -> None:  # type: ignore[no-untyped-def]
    model = Model()
    harm(model)
    expected = rows_of_plain_search(model.layer)
    report = nc.quantize_(model, CODEC, rounding="search")
    assert torch.equal(model.layer.weight, expected)
    (entry,) = [entry for entry in report.entries if entry.name == "layer.weight"]
    assert entry.note.startswith("columns count alike: ")
    assert why in entry.note
    assert entry.rounding == "search"


def test_without_an_embedding_columns_count_alike() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    expected = rows_of_plain_search(model[0])
    report = nc.quantize_(model, CODEC, rounding="search")
    assert torch.equal(model[0].weight, expected)
    assert report.entries[0].note == "columns count alike: the model has no embedding to draw tokens from"


def test_an_interruption_of_the_pass_leaves_the_model_as_it_was() -> None:
    class Interrupted(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = Interrupted().train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt):
        nc.quantize_(model, CODEC, rounding="search")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert type(model.layer) is nn.Linear
    assert model.training
    assert not model.layer._forward_pre_hooks


def test_every_kind_of_layer_has_squares_of_its_own() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.attention = nn.Embedding(20, 32), nn.MultiheadAttention(32, 2, batch_first=True)
            self.convolution, self.gru = nn.Conv1d(32, 32, 3, groups=2), nn.GRU(32, 32, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens)
            x = self.attention(x, 2 * x, x.flip(1) + 1)[0]
            return self.gru(self.convolution(x.transpose(1, 2)).transpose(1, 2))[0]  # type: ignore[no-any-return]

    model = Kinds()
    weights, _ = nc.nn.survey.survey(model)
    guess = random_tokens.guess_inputs(model, [(weight, nc.codec(CODEC)) for weight in weights])
    shapes = {key: tuple(own.total.shape) for key, own in guess.squares.items() if own.total is not None}
    assert shapes == {
        "attention.in_proj_weight": (3, 32),
        "attention.out_proj.weight": (1, 32),
        "convolution.weight": (2, 16 * 3),
    }
    queries, keys, _ = guess.squares["attention.in_proj_weight"].total  # type: ignore[misc]
    assert torch.equal(keys, 4 * queries)
    report = nc.quantize_(model, CODEC, rounding="search")
    assert {entry.note for entry in report.entries} == {""}
    assert all(entry.error <= entry.nearest_error for entry in report.entries)


def test_with_data_columns_count_by_the_data() -> None:
    model, data = Model(), [torch.randint(5, (4, 16)) for _ in range(4)]
    other = copy.deepcopy(model)
    report = nc.quantize_(model, CODEC, rounding="search", data=data)
    nc.quantize_(other, CODEC, rounding="search")
    assert not torch.equal(model.layer.weight, other.layer.weight)
    assert all(entry.error < entry.nearest_error for entry in report.entries)
