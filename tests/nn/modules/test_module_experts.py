"""3-D weights of experts: real mixture-of-experts models of transformers, and the object that stands for a weight."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from product_bound import assert_close_to_product
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import QuantizeError
from narrowcast.nn.modules.experts import ExpertRows
from narrowcast.nn.state import KEY


class Experts(nn.Module):
    """The smallest mixture: expert e for row e of x, behind a second, tiny one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 24))
        self.down = nn.Parameter(torch.randn(3, 24, 8))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        made = [F.linear(F.linear(row, self.up[i]), self.down[i]) * self.scale[i] for i, row in enumerate(x)]
        return torch.stack(made)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# -- the module -------------------------------------------------------------------------------------------------------


def test_experts_are_encoded_under_the_names_they_had_and_restored() -> None:
    model = Experts()
    keys, x = list(model.state_dict()), torch.randn(3, 24)
    report = nc.quantize_(model, "int8:block=row")
    assert [(entry.name, entry.kind, entry.shape) for entry in report.entries] == [
        ("up", "Experts", (3, 8, 24)),
        ("down", "Experts", (3, 24, 8)),
    ]
    assert list(model.state_dict()) == [*keys, KEY]
    assert isinstance(model, Experts)
    assert model.state_dict()["up"].shape == (3, 8, nc.codec("int8:block=row").row_bytes(24))
    y = model(x)
    reference = nc.dequantize_(copy.deepcopy(model))
    assert type(reference) is Experts
    for expert in range(3):
        hidden = F.linear(x[expert], model.up[expert])
        assert_close_to_product(hidden, x[expert], reference.up[expert].detach())
        assert_close_to_product(F.linear(hidden, model.down[expert]), hidden, reference.down[expert].detach())
    assert y.shape == (3, 24)


def test_copies_pickles_and_state_dicts_compute_the_same() -> None:
    model, other, x = Experts(), Experts(), torch.randn(3, 24)
    for one in (model, other):
        nc.quantize_(one, "int4")
    y = model(x)
    assert same_bits(copy.deepcopy(model)(x), y)
    assert same_bits(pickle.loads(pickle.dumps(model))(x), y)
    assert not same_bits(other(x), y)
    other.load_state_dict(model.state_dict())
    assert same_bits(other(x), y)


def test_a_rule_may_name_the_module_or_one_of_its_weights() -> None:
    model = nn.ModuleDict({"moe": Experts()})
    report = nc.quantize_(model, "int8", rules={r"moe\.up$": None, "^moe$": "int4"})
    assert [(entry.name, entry.codec) for entry in report.entries] == [("moe.down", "int4")]
    assert report.skips == [("moe.up", "a rule leaves it alone")]
    moe = model["moe"]
    assert isinstance(moe.up, nn.Parameter)
    assert isinstance(moe.down, ExpertRows)
    assert moe(torch.randn(3, 24)).shape == (3, 24)
    second = nc.quantize_(model, "int8")  # what the first call left
    assert [entry.name for entry in second.entries] == ["moe.up"]
    assert second.skips == [("moe.down", "already encoded, in int4")]


def test_a_3d_parameter_that_is_no_stack_of_matrices_is_left_alone() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Parameter(torch.zeros(1, 5, 8))

    report = nc.quantize_(Positions())
    assert report.skips == [("embedding", "shape [1, 5, 8] is no stack of matrices")]


def test_gradients_reach_x_and_what_is_left_to_train() -> None:
    model = Experts()
    nc.quantize_(model, "int8")
    x = torch.randn(3, 24, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert model.scale.grad is not None


# -- the object that stands for a weight ------------------------------------------------------------------------------


def rows(spec: str = "int8", dtype: torch.dtype = torch.float32) -> tuple[ExpertRows, Tensor]:
    """An encoded weight of 4 experts, and the same in floats."""
    codec = nc.codec(spec)
    made = ExpertRows(codec.encode(torch.randn(4, 6, 40)), codec, 40, dtype)
    return made, made.decode()


def test_it_reads_like_the_tensor_it_stands_for() -> None:
    made, floats = rows()
    assert (made.shape, made.dtype, made.device, made.ndim) == (floats.shape, floats.dtype, floats.device, 3)
    assert (made.size(), made.size(1), made.dim(), made.numel(), len(made)) == (floats.shape, 6, 3, 960, 4)
    assert made.mT.shape == made.transpose(1, 2).shape == (4, 40, 6)
    assert made[1].T.shape == (40, 6)
    assert same_bits(made.transpose(0, 1), floats.transpose(0, 1))
    assert same_bits(made.sum(-1), floats.sum(-1))  # a method that it does not have
    ones = torch.ones(2, 40)
    assert same_bits(torch.einsum("eoi,bi->beo", made, ones), torch.einsum("eoi,bi->beo", floats, ones))
    assert repr(made) == "ExpertRows('int8', shape=(4, 6, 40), dtype=torch.float32)"
    with pytest.raises(AttributeError):
        made.no_such_attribute  # noqa: B018


@pytest.mark.parametrize(
    "index",
    [0, -1, slice(1, 3), torch.tensor(2), torch.tensor([3, 0, 3]), torch.tensor([1], dtype=torch.int32)],
    ids=str,
)
def test_an_index_of_experts_stays_encoded(index: object) -> None:
    made, floats = rows()
    assert isinstance(made[index], ExpertRows)
    assert same_bits(made[index].decode(), floats[index])
    assert same_bits(made.mT[index].decode().contiguous(), floats.mT[index].contiguous())


@pytest.mark.parametrize(
    "index", [(0, 1), (slice(None), 2), None, ..., torch.tensor([True, False, True, True])], ids=str
)
def test_any_other_index_gives_floats(index: object) -> None:
    made, floats = rows()
    assert same_bits(made[index], floats[index])


def test_iterating_gives_expert_after_expert() -> None:
    made, floats = rows()
    assert all(same_bits(one.decode(), other) for one, other in zip(made, floats, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_run_on_encoded_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made, floats = rows("int4", dtype)
    monkeypatch.setattr(ExpertRows, "decode", None)  # whoever decodes fails
    x, bias = torch.randn(5, 40, dtype=dtype), torch.randn(6, dtype=dtype)
    assert_close_to_product(F.linear(x, made[1]), x, floats[1])
    assert_close_to_product(F.linear(x, made[1], bias), x, floats[1], bias)
    assert_close_to_product(x @ made[1].T, x, floats[1])
    assert_close_to_product(torch.mm(x, made.mT[1]), x, floats[1])
    chosen = torch.tensor([3, 0, 3, 1, 1])
    batched = torch.bmm(made[chosen], x.unsqueeze(-1)).squeeze(-1)
    for one, row, expert in zip(batched, x, chosen, strict=True):
        assert_close_to_product(one, row, floats[expert])
    grouped = F.grouped_mm(x, made.mT, offs=torch.tensor([2, 2, 4, 4], dtype=torch.int32))
    assert_close_to_product(grouped[:2], x[:2], floats[0])
    assert_close_to_product(grouped[2:4], x[2:4], floats[2])
    assert not grouped[4:].any()  # belongs to no expert


def test_products_the_other_way_round_decode_and_are_right() -> None:
    made, floats = rows()
    x = torch.randn(5, 6)
    assert same_bits(x @ made[1], x @ floats[1])
    assert same_bits(made.mT[1] @ x.t(), floats.mT[1] @ x.t())
    assert same_bits(torch.bmm(torch.ones(4, 2, 6), made), torch.bmm(torch.ones(4, 2, 6), floats))
    assert same_bits(x[0, 0] * made[1], x[0, 0] * floats[1])


# -- models of transformers -------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "GptOss": {"num_local_experts": 4},
}


@pytest.fixture(scope="module")
def transformers():  # type: ignore[no-untyped-def]
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    return found


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_compute_with_the_encoded_experts(name: str, implementation: str, transformers) -> None:  # type: ignore[no-untyped-def]
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)  # some are left as they were allocated
    model.set_experts_implementation(implementation)
    report = nc.quantize_(model, "int4", rules={"lm_head": None})
    experts = [entry.name for entry in report.entries if "experts" in entry.name]
    assert experts == [f"model.layers.0.mlp.experts.{weight}" for weight in ("gate_up_proj", "down_proj")]
    reference = nc.dequantize_(copy.deepcopy(model))
    tokens = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        mine, other = model(tokens).logits, reference(tokens).logits
        assert same_bits(pickle.loads(pickle.dumps(model))(tokens).logits, mine)
    # One layer of fp32 sums over at most 48 terms each, five in a row, and norms: far below 2**10 roundings.
    assert float((mine - other).abs().max()) <= 2.0**10 * 2.0**-24 * float(other.abs().max())


def test_gpt2_keeps_its_transposed_linears_and_its_tied_embedding(transformers) -> None:  # type: ignore[no-untyped-def]
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    layer = model.transformer.h[0].mlp.c_fc
    before = layer.weight.detach().clone()
    report = nc.quantize_(model, "int8")
    assert report.skips == []
    tied = next(entry for entry in report.entries if entry.tied)
    assert (tied.name, tied.tied) == ("transformer.wte.weight", ("lm_head.weight",))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert type(layer) is nc.nn.Linear
    assert (layer.in_features, layer.out_features) == (32, 128)
    x = torch.randn(2, 5, 32)
    assert_close_to_product(layer(x), x, layer.decoded(), layer.bias)
    nc.dequantize_(model)
    assert type(layer).__name__ == "Conv1D"
    assert layer.weight.shape == before.shape
    int8 = nc.codec("int8")
    assert same_bits(layer.weight.detach(), int8.decode(int8.encode(before.t().contiguous()), 32).t().contiguous())


# -- operators: those of torch.Tensor, all of them -------------------------------------------------------------------

UNARY = [operator.neg, operator.pos, abs]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
COMPARED = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def alike(a: Tensor, b: Tensor) -> bool:
    """Same type, shape and elements; a NaN is one."""
    return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("way", [*BINARY, *COMPARED], ids=lambda way: way.__name__)
def test_binary_operators_give_what_the_float_tensor_gives(way: Any) -> None:
    made, weight = rows()
    for other in (0, 0.5, 2, torch.randn(6, 40), weight):
        assert alike(way(made, other), way(weight, other)), other
        if not (way is operator.pow and isinstance(other, Tensor)):  # a negative base has no real power
            assert alike(way(other, made), way(other, weight)), other
    assert alike(way(made, made), way(weight, weight))
    assert alike(way(made[1], 0.5), way(weight[1], 0.5))


def test_unary_operators_and_conversions_give_what_the_float_tensor_gives() -> None:
    made, weight = rows()
    for way in UNARY:
        assert same_bits(way(made), way(weight))
    with pytest.raises((TypeError, RuntimeError)):
        operator.invert(made)  # as of any float tensor
    assert np.array_equal(np.asarray(made), weight.numpy())
    assert np.array_equal(np.asarray(made, dtype=np.float64), weight.double().numpy())
    assert bool((made != 0).any())
    assert isinstance(made == 0, Tensor)
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(made)
    assert float(weight[0, 0, 0]) in made
    assert {made: 1}[made] == 1


def test_a_transpose_takes_its_dimensions_by_name() -> None:
    made, weight = rows()
    assert same_bits(made.transpose(dim0=1, dim1=2).decode(), weight.transpose(1, 2))
    assert same_bits(made.transpose(dim0=0, dim1=1), weight.transpose(0, 1))


def test_data_and_detach_read_as_floats() -> None:
    made, weight = rows()
    assert same_bits(made.data * 1, weight)
    assert same_bits(made.detach().float(), weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: operator.imul(w, 2),
        lambda w: operator.iadd(w, 1.0),
        lambda w: operator.setitem(w, 0, 0.0),
        lambda w: w.mul_(2),
        lambda w: w.data.zero_(),
        lambda w: w.fill_(0),
        lambda w: torch.relu_(w),
        lambda w: F.relu(w, inplace=True),
        lambda w: torch.add(torch.ones(4, 6, 40), 1, out=w),
        lambda w: nn.init.zeros_(w),
        lambda w: w.requires_grad_(True),
    ],
)
def test_changes_in_place_are_refused(change: Any) -> None:
    made, weight = rows()
    with pytest.raises(QuantizeError, match=r"not changed in place, and .* would be lost"):
        change(made)
    assert same_bits(made.decode(), weight)


def test_a_tensor_may_be_changed_by_what_rows_decode_to() -> None:
    made, weight = rows()
    x = torch.zeros(4, 6, 40)
    x += made
    x.add_(made)
    assert same_bits(x, weight + weight)


def test_experts_broadcast_a_bias_of_one_element() -> None:
    made, weight = rows()
    x, bias = torch.randn(3, 40), torch.tensor([100.0])
    assert_close_to_product(F.linear(x, made[1], bias), x, weight[1], bias)
    assert_close_to_product(F.linear(x, made[1], bias[0]), x, weight[1], bias)
