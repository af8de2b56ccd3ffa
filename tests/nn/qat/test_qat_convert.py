"""convert_: packed layers with the weights that training used, and integer layers whose sums are exact."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from product_bound import assert_close_to_product
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import CalibrationError, DtypeError, QuantizeError, ShapeError
from narrowcast.kernels.windows import from_words
from narrowcast.nn.qat.integer import IntegerConv1d, IntegerConv2d, IntegerLinear


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def trained(model: nn.Module, x: Tensor, weights: str, activations: str | None = None, **options: object) -> nn.Module:
    """A model after two steps, in eval mode."""
    nc.prepare_qat_(model, weights, activations, first_last=None, **options)
    optimizer = torch.optim.SGD(nc.parameter_groups(model, alpha_lr=1e-3), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.eval()


LAYERS = {
    "linear": (lambda: nn.Linear(40, 12), (7, 40)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, padding="same"), (2, 6, 11)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, 2, padding=1, dilation=2, groups=2, bias=False), (2, 4, 9, 10)),
    "circular": (lambda: nn.Conv2d(3, 5, (3, 2), padding=1, padding_mode="circular"), (2, 3, 5, 6)),
}


INTEGERS = [("apot6", "apot5"), ("apot4", "apot4"), ("int8", "int8"), ("int2", "apot2"), ("pot3", "pot3")]


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["apot4", "apot2", "int4", "int8", "int3", "nf4", "pot4", "fp8_e4m3", "sign"])
@pytest.mark.parametrize("options", [{}, {"normalize": None}, {"per_channel": False}])
def test_the_packed_weight_is_the_trained_one_bit_for_bit(spec: str, options: dict) -> None:
    x = torch.randn(7, 40)
    linear = trained(nn.Linear(40, 12), x, spec, **options)
    weight = linear.quantized_weight().detach()
    scale = linear.weight_quantizer.prepared(linear.weight)[1].detach().expand(12)
    report = nc.convert_(linear)
    assert type(linear) is nc.nn.Linear
    assert torch.equal(linear.decoded(), weight)
    assert torch.equal(linear.codec._scales(linear.weight, 40)[0][:, 0].float(), scale)
    assert_close_to_product(linear(x), x, weight, linear.bias)
    assert report.entries[0].bytes_after == linear.weight.numel()
    assert linear.codec.block == "row"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_packs_the_weight_that_it_used(dtype: torch.dtype) -> None:
    linear = nn.Linear(16, 4).to(dtype)
    nc.prepare_qat_(linear, "apot4")
    weight = linear.quantized_weight().detach()
    nc.convert_(linear)
    assert linear.decoded().dtype == dtype
    assert torch.equal(linear.decoded(), weight)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_become_packed_ones_of_their_kind(kind: str) -> None:
    make, shape = LAYERS[kind]
    x = torch.randn(shape)
    layer = trained(make(), x, "apot4")
    y = layer(x)
    nc.convert_(layer)
    assert type(layer) is getattr(nc.nn, layer.float_class.__name__)
    torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-6)
    assert not any("quantizer" in key for key in layer.state_dict())


def test_embeddings_and_tied_weights_are_packed_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(12, 8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.table.weight

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.table(index))

    index = torch.arange(12)
    model = trained(Tied(), index, "apot4")
    y = model(index)
    report = nc.convert_(model)
    assert model.head.weight is model.table.weight
    assert report.entries[0].tied == ("head.weight",)
    torch.testing.assert_close(model(index), y, rtol=1e-5, atol=1e-6)


def test_a_converted_model_is_saved_loaded_compiled_and_dequantized_as_every_packed_one(tmp_path) -> None:
    x = torch.randn(3, 40)
    model = trained(nn.Sequential(nn.Linear(40, 12), nn.ReLU(), nn.Linear(12, 4)), x, "apot4")
    nc.convert_(model)
    y = model(x)
    nc.save(model, tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(40, 12), nn.ReLU(), nn.Linear(12, 4))
    nc.load(tmp_path / "model.safetensors", other)
    assert torch.equal(other(x), y)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)
    torch._dynamo.reset()
    assert type(nc.dequantize_(model)[0]) is nn.Linear


# -- integers ---------------------------------------------------------------------------------------------------------


def exact_sums(layer: nn.Module, levels: Tensor, weight: Tensor) -> Tensor:
    """The layer's own sums of products of levels, in int64 by way of fp64, which is exact below 2**53."""
    options = {"bias": None, "stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups}
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    levels = nn.functional.pad(levels.double(), layer._reversed_padding_repeated_twice, mode=mode)
    convolve = nn.functional.conv1d if levels.dim() == 3 else nn.functional.conv2d
    return convolve(levels, weight.double(), **options).long()


@pytest.mark.parametrize(
    ("weights", "activations"),
    [("apot6", "apot5"), ("apot4", "apot4"), ("int8", "int8"), ("int2", "apot2"), ("pot3", "pot3")],
)
@pytest.mark.parametrize("unsigned", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_integer_layers_sum_exactly_and_equal_the_trained_ones(
    kind: str, weights: str, activations: str, unsigned: bool
) -> None:
    make, shape = LAYERS[kind]
    x = torch.rand(shape) if unsigned else torch.randn(shape)
    layer = trained(make(), x, weights, activations)
    y = layer(x).detach()
    quantized = layer.input_quantizer(x).detach().double()
    weight, input_scale = layer.quantized_weight().detach(), layer.input_quantizer.clip / layer.input_quantizer.top
    scales = layer.weight_quantizer.prepared(layer.weight)[1].detach()
    nc.convert_(layer)
    assert isinstance(layer, (IntegerLinear, IntegerConv1d, IntegerConv2d))
    assert layer.weight_integers.dtype == torch.int8

    integers = (weight / scales.view(-1, *[1] * (weight.dim() - 1))).round().long()
    levels = (quantized / input_scale.double()).round().long()
    held = layer.weight_integers if kind == "linear" else from_words(layer.weight_integers, integers.shape[1])
    assert torch.equal(held.reshape(integers.shape).long(), integers)
    z = layer(x).detach()
    if kind == "linear":
        assert torch.equal(layer.multiply(levels.float()).long(), levels @ integers.T)
        sums = levels @ integers.T
        bias = layer.bias
        scale = (input_scale * scales).double()
    else:
        sums = exact_sums(layer, levels, integers)
        tail = [1] * (sums.dim() - 2)
        bias = None if layer.bias is None else layer.bias.view(1, -1, *tail)
        scale = (input_scale * scales).double().view(1, -1, *tail)
    # Exact but for four roundings of 2**-24: of the sum, the scale, the product, and the bias added.
    exact = sums * scale + (0 if bias is None else bias.double())
    size = (sums * scale).abs() + (0 if bias is None else bias.double().abs())
    assert bool(((z.double() - exact).abs() <= 4 * 2.0**-24 * size + 2.0**-140).all())
    # The trained layer multiplies levels times scales in fp32: three roundings a product, and k sums (Higham 3.1).
    k = math.prod(weight.shape[1:])
    magnitude = exact_magnitude(layer, levels, integers, kind) * scale + (0 if bias is None else bias.double().abs())
    assert bool(((z.double() - y.double()).abs() <= (k + 8) * 2.0**-24 * 1.01 * magnitude + 2.0**-140).all())


def exact_magnitude(layer: nn.Module, levels: Tensor, integers: Tensor, kind: str) -> Tensor:
    """The sums of the magnitudes of products."""
    if kind == "linear":
        return levels.abs() @ integers.abs().T
    return exact_sums(layer, levels.abs(), integers.abs())


def test_integer_convolutions_refuse_what_they_cannot_convolve_and_run_under_vmap() -> None:
    x = torch.rand(3, 4, 9, 9)
    layer = trained(nn.Conv2d(4, 5, 3, 2, dilation=2), x, "apot4", "apot4")
    nc.convert_(layer)
    for wrong in (x[:, :3], x[0, 0], x[:, :, :4], x[:, :, :, :2]):
        with pytest.raises(ShapeError, match=r"^input: "):
            layer(wrong)
    assert torch.equal(torch.func.vmap(layer)(x), layer(x))
    assert torch.equal(layer(x.to(memory_format=torch.channels_last)), layer(x))
    assert layer(x[:0]).shape == (0, 5, 3, 3)
    unknown = x.clone()
    unknown[1, 2, 8, 8] = torch.nan
    assert layer(unknown).isnan().nonzero()[:, [0, 2, 3]].unique(dim=0).tolist() == [[1, 2, 2]]


@pytest.mark.parametrize("pair", [("nf4", "nf4"), ("apot4", "apot6"), ("fp8_e4m3", "int8")])
def test_other_grids_are_multiplied_in_floats_behind_a_quantizer(pair: tuple[str, str]) -> None:
    x = torch.rand(5, 40)
    layer = trained(nn.Linear(40, 12), x, *pair)
    quantized, weight = layer.input_quantizer(x), layer.quantized_weight()
    nc.convert_(layer)
    assert type(layer).__name__ == "QuantizedInputLinear"
    assert_close_to_product(layer(x), quantized, weight, layer.bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_integer_layers_answer_in_the_dtype_of_x(dtype: torch.dtype) -> None:
    x = torch.rand(5, 40)
    layer = trained(nn.Linear(40, 12), x, "apot4", "apot4")
    nc.convert_(layer)
    z = layer(x.to(dtype))
    assert z.dtype == dtype
    assert torch.equal(z, layer(x.to(dtype).float()).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    scales = layer.weight_scales.clone()
    assert torch.equal(layer.half().weight_scales, scales)


def test_a_nan_in_the_input_of_an_integer_layer_is_not_lost() -> None:
    x = torch.rand(5, 40)
    layer = trained(nn.Linear(40, 12), x, "apot4", "apot4")
    nc.convert_(layer)
    x[2, 7] = math.nan
    y = layer(x)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_an_integer_layer_refuses_inputs_that_are_no_floats_as_the_trained_one_does(dtype: torch.dtype) -> None:
    for layer, x in ((nn.Linear(8, 4), torch.rand(5, 8)), (nn.Conv2d(2, 4, 3), torch.rand(5, 2, 4, 4))):
        layer = trained(layer, x, "apot4", "apot4")
        nc.convert_(layer)
        assert type(layer).__name__.startswith("Integer")
        with pytest.raises(DtypeError, match=r"input: expected float32.*pass input\.float\(\)"):
            layer(torch.ones_like(x).to(dtype))


def test_an_integer_model_goes_through_a_state_dict_and_the_compiler() -> None:
    def prepared() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))

    x = torch.randn(4, 1, 8, 8)
    model = trained(prepared(), x, "apot4", "apot4")
    nc.convert_(model)
    y = model(x)
    other = trained(prepared(), x * 1.5, "apot4", "apot4")
    nc.convert_(other)
    assert not torch.equal(other(x), y)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), y)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)
    torch._dynamo.reset()
    assert torch.equal(copy.deepcopy(model)(x), y)


@pytest.mark.parametrize("pair", [("apot4", "apot4"), ("nf4", "nf4")])
def test_dequantize_leaves_a_plain_layer_with_the_rounded_weight(pair: tuple[str, str]) -> None:
    x = torch.rand(5, 40)
    layer = trained(nn.Linear(40, 12), x, *pair)
    nc.convert_(layer)
    weight = layer.decoded()
    nc.dequantize_(layer)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, weight)
    assert layer.state_dict().keys() == {"weight", "bias"}
    assert not list(layer.buffers()) + list(layer.children())


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_model_that_was_never_prepared_is_refused() -> None:
    with pytest.raises(QuantizeError, match=r"none of its layers.*prepare_qat_"):
        nc.convert_(nn.Linear(3, 3))


def test_a_model_that_saw_no_data_is_refused_and_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nc.prepare_qat_(model, "apot4", "apot4")
    with pytest.raises(CalibrationError, match=r"0\.input_quantizer has no clip yet.*left as it was"):
        nc.convert_(model)
    assert type(model[0]) is nc.nn.QatLinear


def test_a_model_that_diverged_is_refused() -> None:
    model = nn.Linear(4, 4)
    nc.prepare_qat_(model, "apot4")
    with torch.no_grad():
        model.weight[0, 0] = math.inf
    with pytest.raises(QuantizeError, match="training diverged"):
        nc.convert_(model)
    assert type(model) is nc.nn.QatLinear
