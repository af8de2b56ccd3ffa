"""quantize_ and dequantize_: what they change, what they leave, what they say, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import QuantizeError, SpecError, StateDictError
from narrowcast.nn.state import KEY

pytestmark = pytest.mark.ambient
AUTOCAST = pytest.mark.not_in(
    "autocast", "autocast cuda", reason="it changes dtypes, as it does for torch's own layers"
)
INFERENCE = pytest.mark.not_in("inference mode", reason="what is made there can be neither trained nor changed outside")


class Tied(nn.Module):
    """A language model's two ends: an embedding whose weight is the head's, and a layer between."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, **options)
        self.mlp = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.mlp(self.embed(tokens))))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_left_as_it_was(model: nn.Module, before: dict[str, Tensor], kinds: list[type]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(same_bits(after[key], value) for key, value in before.items())
    assert [type(module) for module in model.modules()] == kinds
    assert not model._load_state_dict_pre_hooks


# -- what changes, and what does not ----------------------------------------------------------------------------------


@INFERENCE
def test_weights_become_rows_and_everything_else_stays() -> None:
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    model[3].bias.requires_grad_(False)
    model[1].train()
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("hook"))
    linear, weight, before = model[1], model[1].weight.detach().clone(), state(model)
    others = {key: value for key, value in model.named_parameters() if not key.endswith("weight") or key[0] == "2"}
    report = nc.quantize_(model, "int8")
    assert [entry.name for entry in report.entries] == ["0.weight", "1.weight", "3.weight"]
    assert report.skips == []
    assert model[1] is linear
    assert torch.equal(linear.weight, nc.codec("int8").encode(weight))
    assert [key for key in model.state_dict() if not key.endswith(KEY)] == list(before)
    now = dict(model.named_parameters())
    assert all(now[key] is value for key, value in others.items())
    assert [module.training for module in model] == [False, True, False, False]
    assert not model[3].bias.requires_grad
    model[3](model[2](linear(model[0](torch.tensor([1, 2])))))
    assert seen == ["hook"]


@INFERENCE
def test_dequantize_gives_back_the_classes_with_the_rounded_weights() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Conv2d(1, 2, 3), nn.Embedding(5, 4))
    model[0].weight.requires_grad_(False)
    kinds, before = [type(module) for module in model.modules()], state(model)
    nc.quantize_(model, "int8")
    assert nc.dequantize_(model) is model
    assert [type(module) for module in model.modules()] == kinds
    assert [model[i].weight.requires_grad for i in range(3)] == [False, True, True]
    int8 = nc.codec("int8")
    for key, value in model.state_dict().items():
        if key.endswith("weight"):
            rows = before[key].flatten(1)
            assert same_bits(value.flatten(1), int8.decode(int8.encode(rows), rows.shape[1]))
        else:
            assert same_bits(value, before[key])
    assert not model._load_state_dict_pre_hooks
    model.load_state_dict(before)  # a float model again


def test_dequantize_of_a_float_model_changes_nothing() -> None:
    model = nn.Linear(4, 4)
    before = state(model)
    nc.dequantize_(model)
    assert_left_as_it_was(model, before, [nn.Linear])


def test_a_root_linear_becomes_one_itself() -> None:
    model = nn.Linear(16, 8)
    alias = model
    report = nc.quantize_(model)
    assert type(alias) is nc.nn.Linear
    assert list(alias.state_dict()) == ["weight", "bias", KEY]
    assert [entry.name for entry in report.entries] == ["weight"]
    assert alias(torch.randn(2, 16)).shape == (2, 8)
    assert nc.quantize_(nn.Linear(4, 4), rules={"^$": None}).skips == [("weight", "a rule leaves it alone")]


def test_quantizing_twice_leaves_what_is_encoded() -> None:
    model = nn.Sequential(nn.Linear(16, 8))
    nc.quantize_(model, "int8")
    before = state(model)
    report = nc.quantize_(model, "int4")
    assert report.entries == []
    assert report.skips == [("0.weight", "already encoded, in int8")]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@INFERENCE
@AUTOCAST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_model_computes_in_the_dtype_it_had(dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    nc.quantize_(model, "int8")
    assert model(torch.tensor([[1, 2, 3]])).dtype == dtype
    assert {entry.dtype for entry in nc.nn.encodings(model).values()} == {dtype}
    assert nc.dequantize_(model)(torch.tensor([[1, 2, 3]])).dtype == dtype


@AUTOCAST
@pytest.mark.parametrize(
    "spec", ["int8:block=row", "int8", "int4:block=64", "int3", "int2", "fp8_e4m3", "nf4", "apot4"]
)
def test_any_codec_runs_a_whole_model_as_its_decoded_weights_do(spec: str) -> None:
    model = Tied().eval()
    nc.quantize_(model, spec)
    reference = nc.dequantize_(copy.deepcopy(model))
    tokens = torch.randint(0, 20, (2, 7))
    with torch.no_grad():
        mine, other = model(tokens), reference(tokens)
    # Two products of 16 terms and a norm: fewer than 100 roundings of terms of the size of the result.
    assert float((mine - other).abs().max()) <= 100 * 2.0**-24 * float(other.abs().max())


@pytest.mark.not_in(reason="a compiler sees what surrounds it: tests/test_compile.py")
def test_a_quantized_model_compiles_into_one_graph() -> None:
    model = Tied().eval()
    nc.quantize_(model, "int4", rules={"mlp": "nf4"})
    tokens = torch.randint(0, 20, (2, 7))
    with torch.no_grad():
        assert same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(tokens), model(tokens))
    torch._dynamo.reset()


# -- tied and shared --------------------------------------------------------------------------------------------------


def test_a_tied_weight_is_encoded_once_and_stays_tied() -> None:
    model = Tied()
    report = nc.quantize_(model, "int8")
    assert model.embed.weight is model.head.weight
    tied = report.entries[0]
    assert (tied.name, tied.tied) == ("embed.weight", ("head.weight",))
    assert report.bytes_after == sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    copied = copy.deepcopy(model)
    assert copied.embed.weight is copied.head.weight
    assert "embed.weight = head.weight" in str(report)
    nc.dequantize_(model)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.requires_grad


def test_none_for_one_name_of_a_tied_weight_is_none_for_all() -> None:
    model = Tied()
    report = nc.quantize_(model, "int8", rules={"head": None})
    assert [entry.name for entry in report.entries] == ["mlp.weight"]
    assert report.skips == [
        ("embed.weight", "tied to head.weight, which a rule leaves alone"),
        ("head.weight", "a rule leaves it alone"),
    ]
    assert model.embed.weight is model.head.weight
    assert model.head.weight.dtype == torch.float32


def test_two_codecs_for_a_tied_weight_are_refused() -> None:
    model = Tied()
    before, kinds = state(model), [type(module) for module in model.modules()]
    with pytest.raises(QuantizeError, match=r"embed.weight and head.weight are one tied weight.*'int8' and 'int4'"):
        nc.quantize_(model, "int8", rules={"head": "int4"})
    assert_left_as_it_was(model, before, kinds)


def test_a_weight_tied_to_what_has_no_encoded_form_is_left_alone() -> None:
    model = Tied(max_norm=1.0)
    report = nc.quantize_(model)
    assert [entry.name for entry in report.entries] == ["mlp.weight"]
    assert [skip.name for skip in report.skips] == ["embed.weight", "head.weight"]
    assert report.skips[1].reason.startswith("tied to embed.weight, which cannot be encoded: max_norm")
    assert model.embed.weight is model.head.weight


def test_a_module_with_two_names_is_encoded_once_and_rules_find_it_by_both() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert nc.quantize_(copy.deepcopy(model), rules={"second": None}).entries == []
    report = nc.quantize_(model)
    assert [(entry.name, entry.tied) for entry in report.entries] == [("first.weight", ("second.weight",))]
    assert model["first"] is model["second"]


# -- rules ------------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_decides_and_unused_ones_are_listed() -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("attn", "mlp", "lm_head")})
    rules = {"lm_head": None, "mlp": "int4:block=128", "^m": "int2", "typo": None}
    report = nc.quantize_(model, "int8", rules=rules)
    assert {entry.name: entry.codec for entry in report.entries} == {
        "attn.weight": "int8",
        "mlp.weight": nc.codec("int4:block=128").spec,
    }
    assert report.skips == [("lm_head.weight", "a rule leaves it alone")]
    assert report.unused_rules == ["^m", "typo"]
    assert str(report).splitlines()[-1] == "rules that decided for no weight: '^m', 'typo'"


def test_without_a_codec_rules_alone_decide() -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("attn", "mlp")})
    report = nc.quantize_(model, None, rules={"mlp": "int4"})
    assert [entry.name for entry in report.entries] == ["mlp.weight"]
    assert report.skips == [("attn.weight", "no rule gives it a codec")]


@pytest.mark.parametrize(
    ("codec", "rules", "says"),
    [
        ("int99", None, "int99"),
        ("int8", {"0": "int99"}, "int99"),
        ("int8", {"[": None}, "not a regular expression"),
        ("int8", ["0"], "expected a mapping"),
    ],
)
def test_a_wrong_codec_or_rule_is_refused_and_nothing_changed(codec: str, rules: object, says: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = state(model)
    with pytest.raises(SpecError, match=says):
        nc.quantize_(model, codec, rules=rules)  # type: ignore[arg-type]
    assert_left_as_it_was(model, before, [nn.Sequential, nn.Linear, nn.Linear])


# -- weights that are not numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_is_not_finite_is_refused_unless_asked_for(value: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(300, 4), nn.Linear(4, 4)).to(dtype)
    with torch.no_grad():
        model[0].weight[2, 7] = value
    before = state(model)
    with pytest.raises(QuantizeError, match=r"0\.weight: weights hold an infinity or a NaN.*allow_nonfinite=True"):
        nc.quantize_(model, "int8")
    assert_left_as_it_was(model, before, [nn.Sequential, nn.Linear, nn.Linear])
    assert nc.quantize_(copy.deepcopy(model), "int8", rules={"0": None}).entries[0].name == "1.weight"
    nc.quantize_(model, "int8", allow_nonfinite=True)
    wrong = model[0].decoded().isnan()
    assert wrong[2, :128].all()
    assert int(wrong.sum()) == 128


def test_several_weights_that_are_not_finite_are_all_counted() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(math.nan)
    with pytest.raises(QuantizeError, match=r"0\.weight, 1\.weight, 2\.weight and 2 more"):
        nc.quantize_(model)


# -- meta models and memory -------------------------------------------------------------------------------------------


def test_a_meta_model_converts_without_allocating() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Embedding(1 << 20, 1 << 20))  # 8 TB, were it real
    report = nc.quantize_(model, "int4")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [entry.sqnr for entry in report.entries] == [None, None]
    assert report.bytes_before == 2 * 4 << 40
    assert report.bytes_after == 2 * (1 << 20) * nc.codec("int4").row_bytes(1 << 20)
    assert model[0].bias.is_meta


def test_each_float_weight_is_let_go_before_the_next_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    alive = weakref.WeakSet(parameter for parameter in model.parameters() if parameter.dim() == 2)
    counts: list[int] = []
    from narrowcast.nn.rounding import choice

    encode = choice.NAMED["nearest"]

    def counted(*arguments: object, **options: object) -> object:
        counts.append(len(alive))
        return encode(*arguments, **options)  # type: ignore[arg-type]

    gc.disable()
    try:
        monkeypatch.setitem(choice.NAMED, "nearest", counted)
        nc.quantize_(model)
    finally:
        gc.enable()
    assert counts == [5, 4, 3, 2, 1]
    assert len(alive) == 0


@pytest.mark.not_in(reason="a process of its own")
def test_the_most_memory_in_use_is_the_float_model_and_less_than_one_layer() -> None:
    # Eight layers of 16 MB. Were floats kept until the end, the peak would be 34 MB of rows above the model.
    code = """
import resource, torch, narrowcast as nc
from torch import nn
torch.set_num_threads(1)
nc.quantize_(nn.Sequential(nn.Linear(64, 64)), "int8")
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
nc.quantize_(model, "int8")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) * 1024 < 2048 * 2048 * 4


# -- state dicts of whole models --------------------------------------------------------------------------------------


def test_a_state_dict_of_another_layout_changes_no_module_of_the_model() -> None:
    model, floats = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8))
    nn.init.normal_(floats[0].weight)
    nc.quantize_(model)
    before = state(model)
    with pytest.raises(StateDictError, match=r"state_dict\['1.weight'\].*before it was quantized"):
        model.load_state_dict(floats.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(StateDictError, match=r"state_dict\['model.1.weight'\]"):  # as a part of a larger one, too
        nn.ModuleDict({"model": model}).load_state_dict({f"model.{k}": v for k, v in floats.state_dict().items()})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_quantized_models_state_dict_loads_into_another() -> None:
    model, other, tokens = Tied().eval(), Tied().eval(), torch.tensor([[1, 2, 3]])
    for one in (model, other):
        nc.quantize_(one, "int4")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert same_bits(other(tokens), model(tokens))
    assert len(copy.deepcopy(model)._load_state_dict_pre_hooks) == 1
