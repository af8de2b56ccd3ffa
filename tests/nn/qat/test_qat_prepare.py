"""prepare_qat_ and parameter_groups: which layers train on which grids, and training through torch's machinery."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import CalibrationError, QuantizeError, SpecError, StateDictError


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(1, 2)),
        *(nn.Conv1d(24, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10)),
    )


def step(model: nn.Module, x: Tensor, rate: float = 0.05) -> float:
    optimizer = torch.optim.SGD(nc.parameter_groups(model, alpha_lr=rate / 10), lr=rate)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(7))


def test_first_and_last_layer_get_8_bits_and_the_others_what_was_asked_for() -> None:
    model = network()
    report = nc.prepare_qat_(model, "apot4", "apot3")
    assert [entry.codec for entry in report.entries] == [
        "int8:block=row",
        "apot4:block=row,scale=fp32",
        "apot4:block=row,scale=fp32",
        "int8:block=row",
    ]
    assert [model[place].input_quantizer.codec.spec for place in (0, 2, 5, 8)] == ["int8", "apot3", "apot3", "int8"]
    assert [type(model[place]).__name__ for place in (0, 2, 5, 8)] == [
        "QatConv2d",
        "QatConv2d",
        "QatConv1d",
        "QatLinear",
    ]


def test_first_last_none_and_models_of_one_layer_get_what_was_asked_for() -> None:
    model = network()
    assert {entry.codec for entry in nc.prepare_qat_(model, "int3", first_last=None).entries} == {
        "int3:block=row,scale=fp32"
    }
    alone = nn.Linear(4, 4)
    nc.prepare_qat_(alone, "apot4")
    assert alone.weight_quantizer.codec.spec == "apot4"


def test_rules_decide_before_first_and_last_and_unused_ones_are_listed() -> None:
    model = network()
    report = nc.prepare_qat_(model, "apot4", rules={"^0$": "nf4", "^5$": None, "nowhere": "int8"})
    assert [entry.name for entry in report.entries] == ["0.weight", "2.weight", "8.weight"]
    assert report.entries[0].codec == "nf4:block=row,scale=fp32"
    assert [(skip.name, skip.reason) for skip in report.skips] == [("5.weight", "a rule leaves it alone")]
    assert report.unused_rules == ["nowhere"]
    assert type(model[5]) is nn.Conv1d


def test_a_layer_computes_with_the_quantized_weight_and_keeps_the_float_one() -> None:
    linear = nn.Linear(20, 5)
    before = linear.weight.detach().clone()
    nc.prepare_qat_(linear, "apot4", normalize=None)
    x = torch.randn(3, 20)
    quantized = linear.weight_quantizer(before)
    assert torch.equal(linear(x), F.linear(x, quantized, linear.bias))
    assert torch.equal(linear.weight, before)
    levels = quantized / (linear.weight_quantizer.clip / 10).view(-1, 1)
    assert set(levels.round().flatten().tolist()) <= {-10, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 10}


def test_an_embedding_quantizes_the_vectors_that_it_looks_up() -> None:
    for per_channel in (True, False):
        embedding = nn.Embedding(10, 6, padding_idx=0)
        nc.prepare_qat_(embedding, "int4", per_channel=per_channel)
        index = torch.tensor([[1, 3], [0, 3]])
        y = embedding(index)
        assert torch.equal(y, embedding.quantized_weight()[index])
        y.sum().backward()
        assert embedding.weight.grad is not None
        assert torch.equal(embedding.weight.grad[0], torch.zeros(6))
        assert embedding.weight_quantizer.alpha.shape == (10 if per_channel else 1,)


def test_the_papers_way_has_one_clip_per_tensor() -> None:
    model = network()
    nc.prepare_qat_(model, "apot4", per_channel=False)
    assert model[2].weight_quantizer.alpha.shape == (1,)
    assert model[2].weight_quantizer.normalize == "through"
    assert model[0].weight_quantizer.normalize is None  # 8 bits


def test_the_papers_own_normalization_multiplies_no_deviation_back() -> None:
    layer = nn.Linear(40, 6)
    nc.prepare_qat_(layer, "apot3", per_channel=False, normalize="paper")
    layer.weight_quantizer.set_clip(2.0)
    weight = layer.weight.detach()
    normal = (weight - weight.mean()) / weight.std()  # which divides by n - 1
    levels = torch.tensor([-4.0, -2, -1, 0, 1, 2, 4]) / 2
    expected = levels[(normal.unsqueeze(-1) - levels).abs().argmin(-1)]
    assert torch.equal(layer.quantized_weight(), expected)
    # The gradient: straight through inside of the clip, divided by the deviation, which counts as a constant.
    layer.quantized_weight().sum().backward()
    inside = (normal.abs() <= 2).float()
    torch.testing.assert_close(layer.weight.grad, inside / weight.std())
    nc.convert_(layer)
    assert torch.equal(layer.decoded(), expected)
    flat = nn.Linear(4, 2, bias=False)
    nn.init.ones_(flat.weight)
    nc.prepare_qat_(flat, "apot3", normalize="paper")
    assert flat(torch.ones(4)).tolist() == [0.0, 0.0]


def test_input_rules_decide_for_inputs_as_rules_do_for_weights() -> None:
    model = network()
    report = nc.prepare_qat_(model, "apot4", "apot4", input_rules={"^0$": None, "^2$": "int8", "nothing": "int4"})
    assert model[0].input_quantizer is None
    assert model[0].weight_quantizer.codec.spec == "int8"  # still one of the outer layers
    assert model[2].input_quantizer.codec.spec == "int8"
    assert report.unused_rules == ["nothing"]
    with pytest.raises(SpecError, match="rules"):
        nc.prepare_qat_(network(), "apot4", "apot4", input_rules={"(": None})


def test_a_float_state_dict_loads_with_strict_false_and_clips_start_from_it() -> None:
    source, direct, prepared = network(), network(), network()
    state = {key: 3 * value for key, value in source.state_dict().items()}
    nc.prepare_qat_(prepared, "int4", "int4", normalize=None)
    prepared[0].weight_quantizer.set_clip(torch.full_like(prepared[0].weight_quantizer.alpha, 9.0))
    with pytest.raises(StateDictError, match="Nothing was loaded"):
        prepared.load_state_dict(state)
    assert not torch.equal(prepared[2].weight, state["2.weight"])
    missing, unexpected = prepared.load_state_dict(state, strict=False)
    assert "2.weight_quantizer.alpha" in missing
    assert unexpected == []
    direct.load_state_dict(state)
    nc.prepare_qat_(direct, "int4", "int4", normalize=None)
    assert torch.equal(prepared[2].weight_quantizer.alpha, direct[2].weight_quantizer.alpha)
    assert set(prepared[0].weight_quantizer.clip.tolist()) == {9.0}  # this one was set


def test_a_tied_weight_shares_its_quantizer() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(12, 8), "between": nn.Linear(8, 8), "head": nn.Linear(8, 12)})
    model["head"].weight = model["table"].weight
    report = nc.prepare_qat_(model, "int4", first_last=None)
    assert model["head"].weight_quantizer is model["table"].weight_quantizer
    assert report.entries[0].tied == ("head.weight",)


def test_what_is_not_trained_is_listed_with_the_reason() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Bilinear(3, 3, 3), nn.Linear(4, 4))
    report = nc.prepare_qat_(model)
    reasons = {skip.name: skip.reason for skip in report.skips}
    assert "MultiheadAttention" in reasons["0.in_proj_weight"]
    assert reasons["0.out_proj.weight"] == (
        "the parent module nn.MultiheadAttention reads `.weight` directly instead of calling the layer"
    )
    assert "1.weight" in reasons
    assert [entry.name for entry in report.entries] == ["2.weight"]


def test_an_encoder_in_eval_mode_computes_with_quantized_weights_too() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    nc.prepare_qat_(model, "int2", first_last=None)
    slow = model(x)
    with torch.no_grad():  # where torch would take its fast path
        torch.testing.assert_close(model(x), slow, rtol=1e-5, atol=1e-6)


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_moves_clips() -> None:
    model = network()
    nc.prepare_qat_(model, "apot3", "apot3")
    model(X)
    learned = [m for m in model.modules() if isinstance(m, nc.nn.FakeQuantize) and m.codec.spec == "apot3"]
    before = [quantizer.clip.clone() for quantizer in learned]
    losses = []
    for _ in range(10):
        model.zero_grad()
        losses.append(step(model, X))
    assert losses[-1] < losses[0]
    assert len(learned) == 4
    assert all(not torch.equal(old, quantizer.clip) for old, quantizer in zip(before, learned, strict=True))


def test_groups_give_clips_a_rate_and_a_decay_of_their_own() -> None:
    model = network()
    nc.prepare_qat_(model, "apot4", "apot4")
    others, clips = nc.parameter_groups(model, alpha_lr=0.1, alpha_weight_decay=1e-5)
    assert (clips["lr"], clips["weight_decay"]) == (0.1, 1e-5)
    assert "lr" not in others
    assert "weight_decay" not in others
    assert len(clips["params"]) == 8
    together = [*others["params"], *clips["params"]]
    assert {id(p) for p in together} == {id(p) for p in model.parameters()}
    assert len(together) == len({id(p) for p in together})
    assert nc.parameter_groups(model)[1]["weight_decay"] == 0.0
    with pytest.raises(QuantizeError, match="prepare_qat_"):
        nc.parameter_groups(network())


def test_a_compiled_step_equals_an_eager_one() -> None:
    model = network()
    nc.prepare_qat_(model, "apot4", "apot4")
    model(X)
    other = copy.deepcopy(model)
    loss = model(X).square().mean()
    loss.backward()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    compiled_loss = compiled(X).square().mean()
    compiled_loss.backward()
    assert torch.equal(loss, compiled_loss)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-7)
    torch._dynamo.reset()


def test_autocast_trains_in_bf16_with_clips_in_fp32() -> None:
    model = network()
    nc.prepare_qat_(model, "apot4", "apot4")
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    for module in model.modules():
        if isinstance(module, nc.nn.FakeQuantize):
            assert module.alpha.grad is not None
            assert module.alpha.grad.dtype == torch.float32
            assert module.alpha.grad.isfinite().all()


def test_a_model_in_half_precision_trains() -> None:
    model = network().bfloat16()
    nc.prepare_qat_(model, "apot4", "apot4")
    assert model(X.bfloat16()).dtype == torch.bfloat16
    assert model[2].weight_quantizer.alpha.dtype == torch.float32


def test_a_meta_model_is_prepared_without_memory_and_starts_once_it_has_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nc.prepare_qat_(model, "apot4")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in model:
            layer.reset_parameters()
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nc.prepare_qat_(other, "apot4")
    x = torch.randn(3, 4)
    assert torch.equal(model(x), other(x))


# -- state dicts ----------------------------------------------------------------------------------------------------


def test_a_saved_state_dict_resumes_the_training_bit_for_bit() -> None:
    model, other = network(), network()
    nc.prepare_qat_(model, "apot4", "apot4")
    nc.prepare_qat_(other, "apot4", "apot4")
    step(model, X)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    model.zero_grad()
    assert step(model, X) == step(other, X)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(("weights", "activations"), [("apot3", "apot4"), ("apot4", "int4"), ("apot4", None)])
def test_a_state_dict_of_other_grids_is_refused_and_changes_nothing(weights: str, activations: str | None) -> None:
    model, wrong = network(), network()
    nc.prepare_qat_(model, "apot4", "apot4")
    nc.prepare_qat_(wrong, weights, activations)
    model(X), wrong(X)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateDictError, match="Nothing was loaded"):
        model.load_state_dict(wrong.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_float_state_dict_is_refused_with_what_to_do() -> None:
    model = network()
    nc.prepare_qat_(model)
    before = model[2].weight.detach().clone()
    with pytest.raises(StateDictError, match="load it into the float model and call prepare_qat_ then"):
        model.load_state_dict(network().state_dict())
    assert torch.equal(model[2].weight, before)


# -- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int4:block=32"}, "drop block=32"),
        ({"activations": "bf16"}, "no scale to learn"),
        ({"rules": {"8": "int4:zero_point=true"}}, "zero points"),
        ({"first_last": "raw"}, "no scale to learn"),
        ({"start": "best"}, "start='best'"),
        ({"normalize": "yes"}, "normalize='yes'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(options: dict, words: str) -> None:
    model = network()
    with pytest.raises(SpecError, match=words):
        nc.prepare_qat_(model, **options)
    assert [type(module) for module in model] == [type(module) for module in network()]


def test_weights_that_are_not_finite_and_prepared_models_are_refused() -> None:
    model = network()
    with torch.no_grad():
        model[5].weight[0, 0, 0] = float("nan")
    with pytest.raises(QuantizeError, match=r"5\.weight.*left as it was"):
        nc.prepare_qat_(model)
    assert type(model[0]) is nn.Conv2d
    model = network()
    nc.prepare_qat_(model)
    with pytest.raises(QuantizeError, match="prepared already"):
        nc.prepare_qat_(model)


def test_evaluating_before_any_data_was_seen_says_what_to_do() -> None:
    model = network()
    nc.prepare_qat_(model, "apot4", "apot4")
    with pytest.raises(CalibrationError, match="calibrate_"):
        model.eval()(X)


def test_quantize_leaves_prepared_layers_alone_and_says_so() -> None:
    model = network()
    nc.prepare_qat_(model)
    report = nc.quantize_(model)
    assert not report.entries
    assert "QatLinear" in {skip.name: skip.reason for skip in report.skips}["8.weight"]
