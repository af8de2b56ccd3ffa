"""Every other name of PyTorch's experimental files: with lists, views and wrong arguments."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver, QConfigMapping

from narrowcast.compat import apot
from narrowcast.compat.apot import (
    AdaptiveRoundingLoss,
    AdaptiveRoundingOptimizer,
    AdaroundFakeQuantizer,
    APoTFakeQuantize,
    APoTObserver,
    LinearAPoT,
    TensorAPoT,
    apot_to_float,
    float_to_apot,
    linear,
    quant_dequant_util,
    quantize_APoT,
)
from narrowcast.compat.apot.adaround_loss import ADAROUND_GAMMA, ADAROUND_ZETA
from narrowcast.compat.apot.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx
from narrowcast.errors import GridError, ModelKindError, PayloadError, ShapeError, SpecError

LEVELS = [-1.0, -0.5, 0.0, 0.25, 1.0]
CODES = [3, 0, 4, 1, 2]
X = [-7.0, -0.6, -0.25, 0.1, 0.6, 0.7, 9.0]
NEAREST = [-1.0, -0.5, -0.5, 0.0, 0.25, 1.0, 1.0]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# -- apot_utils --------------------------------------------------------------------------------------------------------


def forms() -> list[tuple[object, object]]:
    """The same levels and codes as tensors, lists, lists of tensors, views, and in another order."""
    levels, codes = torch.tensor(LEVELS), torch.tensor(CODES)
    apart = torch.stack([levels, levels + 9], 1)[:, 0], torch.stack([codes, codes + 9], 1)[:, 0]
    order = [4, 1, 0, 3, 2]
    return [
        (levels, codes),
        (LEVELS, CODES),
        (tuple(LEVELS), CODES),
        (list(levels), list(codes)),
        (levels.double(), codes.int()),
        apart,
        (levels[order], codes[order]),
        ([LEVELS[place] for place in order], [CODES[place] for place in order]),
        (levels.numpy(), codes.numpy()),
        (levels.view(1, 5), codes.view(5, 1)),
    ]


@pytest.mark.parametrize("form", range(10))
def test_levels_may_be_lists_views_and_in_any_order(form: int) -> None:
    levels, codes = forms()[form]
    x, expected = torch.tensor(X), [CODES[LEVELS.index(level)] for level in NEAREST]
    found = float_to_apot(x, levels, codes, 1.0)
    assert found.tolist() == expected
    assert apot_to_float(found, levels, codes).tolist() == NEAREST
    assert quant_dequant_util(x, levels, codes).tolist() == NEAREST
    assert quant_dequant_util(x.view(7, 1), levels).shape == (7, 1)
    # One number at a time, as PyTorch's are called.
    assert [int(float_to_apot(number, levels, codes, torch.tensor([1.0]))) for number in X] == expected
    assert [float(apot_to_float(code, levels, codes)) for code in expected] == NEAREST
    assert [float(quant_dequant_util(number, levels, codes)) for number in X] == NEAREST


def test_integers_are_fake_quantized_as_the_floats_they_are_and_alpha_may_be_a_number() -> None:
    observer = APoTObserver(4, 2)
    observer(torch.tensor([0.0, 1.7]))
    alpha, *rest = observer.calculate_qparams(False)
    x = torch.tensor([0, 1, 2, -3])
    expected = apot.quant_dequant_APoT(x.float(), alpha, *rest)
    assert expected.tolist() == pytest.approx([0.0, 1.7 * 2 / 3, 1.7, 0.0])
    assert torch.equal(apot.quant_dequant_APoT(x, alpha, *rest), expected)
    assert torch.equal(apot.quant_dequant_APoT(x.float(), float(alpha), *rest), expected)


def test_a_view_with_the_address_and_length_of_another_is_not_taken_for_it() -> None:
    many = torch.linspace(-1, 1, 9)
    x = torch.linspace(-1, 1, 41)
    for levels in (many[:5], many[::2], many[:5].clone()):
        nearest = levels[(x.view(-1, 1) - levels).abs().argmin(1)]
        assert float((quant_dequant_util(x, levels) - x).abs().max()) <= float((nearest - x).abs().max()) + 1e-6
    many.data.mul_(2)  # which no version counts
    assert float(quant_dequant_util(torch.tensor(2.0), many[::2])) == 2.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: float_to_apot(0.1, LEVELS, CODES[:3], 1.0), ShapeError, "levels and indices: they have 5 and 3"),
        (lambda: float_to_apot(0.1, [], [], 1.0), ShapeError, "at least one"),
        (lambda: float_to_apot(0.1, [1.0, math.nan], [0, 1], 1.0), SpecError, "levels: hold a NaN"),
        (lambda: float_to_apot(0.1, LEVELS, CODES, -1.0), SpecError, "alpha=-1.0: "),
        (lambda: float_to_apot(0.1, LEVELS, CODES, torch.ones(2)), ShapeError, "alpha: one clip"),
        (lambda: float_to_apot(0.1, 3.0, CODES, 1.0), SpecError, "levels: expected a tensor or a list"),
        (lambda: quant_dequant_util(0.1, ["a"]), SpecError, "levels: expected a tensor or a list"),
        (lambda: apot_to_float(5, LEVELS, CODES), PayloadError, "x_apot: holds a code"),
        (lambda: apot_to_float(-1, LEVELS, CODES), PayloadError, "x_apot: holds a code"),
        (lambda: apot_to_float(torch.tensor([1.5]), LEVELS, CODES), PayloadError, "x_apot: holds a code"),
        (lambda: apot_to_float(1, [0.0, 1.0], [0, 2]), PayloadError, "x_apot: holds a code"),
        (lambda: apot_to_float(1.5, LEVELS, CODES), PayloadError, "x_apot: holds a code"),
        (lambda: apot_to_float([1, 2.5], LEVELS, CODES), PayloadError, "x_apot: holds a code"),
        (lambda: apot_to_float("1", LEVELS, CODES), RuntimeError, "x_apot: expected numbers"),
        (lambda: float_to_apot(None, LEVELS, CODES, 1.0), RuntimeError, "x: expected numbers"),
        (lambda: float_to_apot(0.1, LEVELS, CODES, "1"), RuntimeError, "alpha: expected numbers"),
        (lambda: quant_dequant_util(torch.tensor([1j]), LEVELS), RuntimeError, "x: expected real numbers"),
        (lambda: APoTObserver(4, 2).calculate_qparams(False, torch.zeros(3), torch.ones(3)), ShapeError, "min_val and"),
        (lambda: LinearAPoT(torch.empty(0, 4), 4, 2), AssertionError, "weight2quantize: it is"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]


# -- the tensor and the observer ---------------------------------------------------------------------------------------


def quantized() -> TensorAPoT:
    observer = APoTObserver(b=4, k=2)
    observer(torch.tensor([0.0, 1.0]))
    return quantize_APoT(torch.rand(3, 4), *observer.calculate_qparams(signed=False))


def test_codes_are_assigned_and_those_out_of_range_are_refused() -> None:
    tensor = quantized()
    before = tensor.data
    for wrong in (torch.tensor([16]), torch.tensor([-1]), torch.tensor([300]), torch.tensor([2.5]), [1.5]):
        with pytest.raises(PayloadError, match="data: codes of this quantizer are whole numbers from 0 to 15"):
            tensor.data = wrong
        with pytest.raises(PayloadError, match="data: "):
            TensorAPoT(tensor.quantizer, wrong)
        assert torch.equal(tensor.data, before)
    tensor.data = torch.arange(16).view(2, 8).t()  # another shape, a view
    assert tensor.int_repr().tolist() == [[code, code + 8] for code in range(8)]
    assert tensor.shape == (8, 2)
    assert torch.equal(tensor.dequantize().flatten().sort().values, tensor.quantizer.quantization_levels)


def test_the_observers_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = APoTObserver(b=4, k=2)
    given = observer._calculate_qparams(False, torch.tensor([0.0]), torch.tensor([1.0]))
    assert all(map(torch.equal, given, observer.calculate_qparams(False)))
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    shown = []
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf()))
    observer.quant_levels_visualization(signed=False)
    observer.quant_levels_visualization(signed=True)
    line = shown[0].axes[0].lines[0]
    assert set(line.get_ydata()) == set(given[2].tolist())
    assert min(shown[1].axes[0].lines[0].get_ydata()) == -1.0
    pyplot.close("all")


def test_uniform_weights_of_four_bits_have_codes_of_both_signs() -> None:
    weight = torch.linspace(-1, 1, 201)
    levels = apot.uniform_qconfig_4bit.weight()(weight).unique()
    assert len(levels) in (15, 16)  # -8 is beyond the smallest weight, but for rounding
    assert float(levels.min()) < 0 < float(levels.max())
    for made, codes in ((apot.default_symmetric_fake_quant(), 256), (apot.default_weight_symmetric_fake_quant(), 256)):
        assert made.activation_post_process.qscheme == torch.per_tensor_symmetric
        assert made.quant_max - made.quant_min + 1 == codes


# -- LinearAPoT --------------------------------------------------------------------------------------------------------


def test_the_product_by_shifting_bits_is_the_product_with_codes() -> None:
    layer = linear.LinearAPoT(torch.rand(5, 3), 8, 2)
    assert layer.decompose_APoT("0b1101101") == ["11", "01", "10", "1"]
    assert layer.decompose_APoT(bin(0)) == ["0"]
    assert layer.bitshift_mul(["11", "01", "1"], 5) == 0b11011 * 5
    assert layer.bitshift_mul(["10"], -3) == -6
    transposed = layer.weight_transposed
    pieces = [[layer.decompose_APoT(bin(code)) for code in row] for row in transposed.tolist()]
    x = torch.randint(0, 255, (4, 3)).float()
    assert torch.equal(layer.matmul(pieces, x), layer(x))
    assert torch.equal(layer.matmul(pieces, x + 0.7), layer(x))
    with pytest.raises(AssertionError, match=r"activation: expected \[batch, 3\]"):
        layer.matmul(pieces, torch.ones(4, 5))
    with pytest.raises(AssertionError, match="weight2quantize"):
        LinearAPoT(torch.ones(3), 4, 2)


@pytest.mark.parametrize("signed", [False, True])
def test_a_layer_from_a_reference_has_the_grid_of_the_observer(signed: bool) -> None:
    float_layer = nn.Linear(6, 5)
    observer = APoTObserver(b=4, k=2)
    observer(2 * float_layer.weight)
    qparams = observer.calculate_qparams(signed)
    layer = LinearAPoT.from_reference(float_layer, *qparams)
    assert (layer.b, layer.k, layer.signed) == (4, 2, signed)
    expected = quantize_APoT(float_layer.weight, *qparams)
    assert torch.equal(layer.decoded(), expected.dequantize())
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), F.linear(x, expected.dequantize(), float_layer.bias))
    with pytest.raises(SpecError, match="quantization_levels: 5 levels that no b and k give"):
        LinearAPoT.from_reference(float_layer, torch.tensor(1.0), torch.tensor(1.0), torch.tensor(LEVELS), CODES)


# -- AdaRound ----------------------------------------------------------------------------------------------------------


def test_the_loss_of_choices_starts_after_the_warm_up_and_is_zero_once_they_are_made() -> None:
    loss = AdaptiveRoundingLoss(max_iter=10)
    undecided, made = torch.zeros(3), torch.tensor([9.0, -9.0, 9.0])
    assert float(loss.rounding_regularization(undecided, 1)) == 0.0
    assert float(loss.rounding_regularization(undecided, 2)) == pytest.approx(0.003)
    assert float(loss.rounding_regularization(made, 9)) == 0.0
    choices, output = loss(torch.ones(2), torch.tensor([1.0, 3.0]), undecided, 5)
    assert (float(choices), float(output)) == (pytest.approx(0.003), 2.0)
    with pytest.raises(AssertionError, match="curr_iter=10"):
        loss.rounding_regularization(undecided, 10)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_fresh_quantizer_gives_the_weight_softly_and_the_nearest_levels_hard(per_channel: bool) -> None:
    observer = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    quantizer = AdaroundFakeQuantizer(observer, scheme, dtype=torch.qint8)
    weight = torch.randn(4, 6) * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    quantizer(weight)
    scale, zero_point = quantizer.calculate_qparams()
    inner = (weight / scale).abs() < 127  # the outermost weight lies between a code and none
    torch.testing.assert_close(quantizer(weight)[inner], weight[inner])
    assert scale.shape == ((4, 1) if per_channel else (1, 1))
    assert not bool(zero_point.any())
    quantizer.disable_observer()
    quantizer.use_soft_rounding = False
    nearest = (weight / scale).round().clamp(-128, 127) * scale
    assert float((quantizer(weight) - nearest)[inner].abs().max()) < 1e-5
    quantizer.use_soft_rounding = True
    quantizer(weight).sum().backward()
    assert quantizer.V.grad.shape == weight.shape
    assert (float(quantizer.zeta), float(quantizer.gamma)) == pytest.approx((ADAROUND_ZETA, ADAROUND_GAMMA))
    assert "of 24" in repr(quantizer)
    with pytest.raises(GridError, match="qscheme="):
        AdaroundFakeQuantizer(qscheme=torch.per_tensor_affine)
    with pytest.raises(AssertionError, match="quant_min=5"):
        AdaroundFakeQuantizer(quant_min=5, quant_max=4)


def fetching(fetched: list[Tensor]) -> object:
    return lambda module, inputs, output: fetched.extend((inputs[0].detach(), output.detach()))


def test_a_model_is_rounded_onto_its_grid_with_less_error_than_by_nearest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 6))
    mixed = torch.randn(3, 3)
    data = [torch.einsum("bchw,cd->bdhw", torch.randn(8, 3, 4, 4), mixed) for _ in range(6)]
    options = {"max_iter": 200, "quant_min": -8, "quant_max": 7}
    before = copy.deepcopy(model.state_dict())
    optimizer = AdaptiveRoundingOptimizer(model, lambda model, batch: model(batch), fetching, data, **options)
    rounded = optimizer.run_adaround()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    nearest = copy.deepcopy(model)
    for place in (0, 3):
        weight = rounded[place].weight.detach()
        scale, _ = rounded[place].weight_fake_quant.calculate_qparams()
        codes = weight / scale
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
        assert -8 <= float(codes.min()) <= float(codes.max()) <= 7.001
        nearest[place].weight.data = (model[place].weight / scale).round().clamp(-8, 7).detach() * scale
    x = torch.cat(data)
    with torch.no_grad():
        assert F.mse_loss(rounded(x), model(x)) < F.mse_loss(nearest(x), model(x))
    three = AdaptiveRoundingOptimizer(model, lambda m, batch, wrapper: m(batch), fetching, data, **options)
    inputs, outputs, floats = three.get_data_inp_out(model[3], three.q_model[3], data)
    assert [len(each) for each in (inputs, outputs, floats)] == [6, 6, 6]
    assert not torch.equal(outputs[0], outputs[1])  # every batch counts
    torch.testing.assert_close(three.feed_forward(floats[0], model[3].weight, model[3]), outputs[0])


# -- FX ----------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["apot_weight_qconfig_8bit", "apot_weight_qconfig_4bit", "apot_qconfig_4bit"])
def test_a_prepared_model_converts_and_computes_the_same(name: str) -> None:
    qconfig, x = getattr(apot, name), torch.rand(5, 3, 4, 4)
    mapping = {"object_type": [(kind, qconfig) for kind in (nn.Linear, nn.Conv2d, nn.BatchNorm2d)]}
    prepared = prepare_qat_fx(Small().train(), mapping, example_inputs=(x,))
    for _ in range(2):
        prepared(x)
    prepared.eval()
    prepared.apply(torch.ao.quantization.disable_observer)
    expected = prepared(x)
    converted = convert_fx(copy.deepcopy(prepared))
    torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(converted.fc, LinearAPoT)
    assert not any(isinstance(module, (APoTFakeQuantize, nn.BatchNorm2d)) for module in converted.modules())
    plain = prepare_fx(Small().eval(), mapping, example_inputs=(x,))
    plain(x)
    assert convert_fx(plain)(x).shape == (5, 5)
    with pytest.raises(ModelKindError, match="graph_module: "):
        convert_fx(nn.Linear(2, 2))  # type: ignore[arg-type]


class Odd(nn.Module):
    """A layer that is called twice, an activation that shares its observer, a transposed convolution, a fused pair."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.up = nn.Linear(6, 6), nn.ConvTranspose1d(1, 2, 3)
        self.pair = nn.Sequential(nn.Linear(8, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x).relu())
        return self.pair(self.up(x.unsqueeze(1))).flatten(1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", ["apot_weight_qconfig_4bit", "apot_qconfig_8bit"])
def test_shared_fused_and_transposed_layers_convert_under_a_qconfig_for_all(name: str, trained: bool) -> None:
    x = torch.rand(5, 6)
    mapping = QConfigMapping().set_global(getattr(apot, name))
    prepare = prepare_qat_fx if trained else prepare_fx
    prepared = prepare(Odd().train(trained), mapping, example_inputs=(x,))
    for _ in range(2):
        prepared(x)
    prepared.eval()
    prepared.apply(torch.ao.quantization.disable_observer)
    with torch.no_grad():  # weights that torch does not quantize while it prepares
        unquantized = [prepared.up] if trained else [prepared.twice, prepared.up, getattr(prepared.pair, "0")[0]]
        for layer in unquantized:
            quantizer = getattr(apot, name).weight()
            layer.weight.copy_(quantizer(layer.weight))
    expected = prepared(x)
    converted = convert_fx(copy.deepcopy(prepared))
    torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(converted.twice, LinearAPoT)
    assert not any(isinstance(module, APoTFakeQuantize) for module in converted.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_recurrent_layer_under_an_apot_qconfig_is_refused_by_name() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)

    mapping = QConfigMapping().set_object_type(nn.GRUCell, apot.apot_qconfig_4bit)
    prepared = prepare_fx(Recurrent().eval(), mapping, example_inputs=(torch.rand(2, 4),))
    prepared(torch.rand(2, 4))
    with pytest.raises(ModelKindError, match="graph_module: cell is a GRUCell"):
        convert_fx(prepared)
