"""encodings and adopt: a quantized model's description makes a meta model ready for its bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.codecs.payload import EncodedRows, Encoding
from narrowcast.errors import StateDictError
from narrowcast.nn import adopt, encodings
from narrowcast.nn.encodings import stored_state


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.weight[0]), self.weight[1].T)


class Model(nn.Module):
    """One of everything that is encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.experts = Stack()
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens))
        return self.head(self.experts(self.conv(x.transpose(1, 2)).transpose(1, 2)))


TOKENS = torch.arange(10).view(2, 5)
RULES = {"linear1": "int4", "linear2": None, "experts": "nf4"}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made = Model().eval()
    nc.quantize_(made, "int8", rules=RULES)
    return made


def meta() -> nn.Module:
    with torch.device("meta"):
        return Model().eval()


def test_every_key_with_rows_is_described(model: nn.Module) -> None:
    described = encodings(model)
    state = stored_state(model)
    assert set(described) == {key for key, value in state.items() if value.dtype == torch.uint8}
    assert len(described) == 7
    assert described["embed.weight"] == described["head.weight"]
    assert described["experts.weight"] == Encoding(nc.codec("nf4"), torch.Size((2, 8, 16)), torch.float32)
    for key, encoding in described.items():
        assert EncodedRows(state[key], *encoding).decode().shape == encoding.shape
    assert encodings(nn.Linear(2, 2)) == {}


def test_a_meta_model_takes_the_bytes_and_computes_the_same(model: nn.Module) -> None:
    other = meta()
    adopt(other, encodings(model))
    assert all(parameter.is_meta for parameter in other.parameters())
    assert encodings(other) == encodings(model)
    assert other.embed.weight is other.head.weight
    other.load_state_dict(model.state_dict(), assign=True)
    other.head.weight = other.embed.weight
    with torch.no_grad():
        assert same_bits(other(TOKENS), model(TOKENS))
    reference = nc.dequantize_(copy.deepcopy(other))
    assert [type(module) for module in reference.modules()] == [type(module) for module in Model().modules()]


def test_a_real_model_takes_the_bytes_too(model: nn.Module) -> None:
    other = Model().eval()
    adopt(other, encodings(model))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert same_bits(other(TOKENS), model(TOKENS))


def test_the_dtype_is_that_of_the_description(model: nn.Module) -> None:
    other = meta()
    adopt(other, encodings(model.bfloat16()))
    assert {encoding.dtype for encoding in encodings(other).values()} == {torch.bfloat16}


def test_a_tied_weight_may_be_named_by_one_of_its_keys(model: nn.Module) -> None:
    described = encodings(model)
    del described["embed.weight"]
    other = meta()
    adopt(other, described)
    assert encodings(other) == encodings(model)


def test_adopting_twice_changes_nothing(model: nn.Module) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adopt(model, encodings(model))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_gpt2s_transposed_linears_are_adopted() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    nc.quantize_(model, "int8")
    with torch.device("meta"):
        other = transformers.GPT2LMHeadModel(config).eval()
    adopt(other, encodings(model))
    assert encodings(other) == encodings(model)
    other.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        assert same_bits(other(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        ("model.conv.weight", {}, r"no weight of that name. The nearest that can is 'conv.weight'.*prefix"),
        ("encoder.norm1.weight", {}, r"no weight of that name"),
        ("conv.weight", {"shape": torch.Size((16, 16, 5))}, r"of shape \[16, 16, 5\], but the model has \[16, 16, 3\]"),
        ("head.weight", {"codec": nc.codec("nf4")}, r"embed.weight and head.weight are one tied weight"),
        ("positions", {}, r"cannot hold encoded rows there: shape \[1, 5, 16\] is no stack of matrices"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_and_the_model_left(
    model: nn.Module, key: str, change: dict[str, object], says: str
) -> None:
    other = meta()
    other.positions = nn.Parameter(torch.zeros(1, 5, 16, device="meta"))
    described = encodings(model)
    described[key] = described.get(key, described["conv.weight"])._replace(**change)
    kinds = [type(module) for module in other.modules()]
    with pytest.raises(StateDictError, match=rf"^'{key}': .*{says}"):
        adopt(other, described)
    assert [type(module) for module in other.modules()] == kinds
    assert encodings(other) == {}


def test_rows_of_another_codec_are_not_replaced(model: nn.Module) -> None:
    described = encodings(model)
    described["conv.weight"] = described["conv.weight"]._replace(codec=nc.codec("int4"))
    with pytest.raises(StateDictError, match=r"holds rows of int8 for float32.*not of int4.*dequantize_"):
        adopt(model, described)
