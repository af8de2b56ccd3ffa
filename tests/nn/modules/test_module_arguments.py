"""Modules take what torch's own take: argument names and order, biases that broadcast, empty batches, odd inputs."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from product_bound import assert_close_to_product
from torch import nn

import narrowcast as nc
from narrowcast.errors import DtypeError, ShapeError
from narrowcast.nn.qat import integer, layers

PAIRS = [
    *((getattr(nc.nn, name), getattr(nn, name)) for name in ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")),
    (nc.nn.MultiheadAttention, nn.MultiheadAttention),
    *((kind, plain) for plain, kind in layers.TRAINED.items()),
    (integer.IntegerLinear, nn.Linear),
    (integer.IntegerConv2d, nn.Conv2d),
    (integer.QuantizedInputLinear, nn.Linear),
    (integer.QuantizedInputConv1d, nn.Conv1d),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda kind: kind.__name__)
def test_forward_has_torchs_own_arguments(ours: type[nn.Module], theirs: type[nn.Module]) -> None:
    def arguments(kind: type[nn.Module]) -> list[tuple[str, object]]:
        return [(p.name, p.default) for p in inspect.signature(kind.forward).parameters.values()]

    assert arguments(ours) == arguments(theirs)


def test_layers_are_called_by_keyword() -> None:
    for layer, x in (
        (nn.Linear(8, 4), torch.randn(2, 8)),
        (nn.Conv1d(2, 4, 3), torch.randn(1, 2, 8)),
        (nn.Embedding(5, 8), torch.tensor([1, 2])),
    ):
        float_one = copy.deepcopy(layer)
        nc.quantize_(layer, "int8")
        assert torch.equal(layer(input=x), layer(x))
        nc.prepare_qat_(float_one, "int4", None)
        assert torch.equal(float_one(input=x), float_one(x))
    attention, x = nn.MultiheadAttention(16, 2), torch.randn(3, 1, 16)
    nc.quantize_(attention, "int8")
    assert torch.equal(attention(value=x, key=x, query=x)[0], attention(x, x, x)[0])


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_an_embedding_in_training_takes_an_empty_batch(shape: tuple[int, ...], activations: str | None) -> None:
    layer = nn.Embedding(5, 8)
    nc.prepare_qat_(layer, "int4", activations)
    y = layer(torch.zeros(shape, dtype=torch.int64))
    assert y.shape == (*shape, 8)
    y.sum().backward()
    assert not layer.weight.grad.any()


# -- biases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (40,), (2, 3)])
@pytest.mark.parametrize("bias", [(1,), ()])
def test_a_bias_of_one_element_counts_for_all_outputs(
    bias: tuple[int, ...], batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer = nn.Linear(48, 20).to(dtype)
    layer.bias = nn.Parameter(torch.full(bias, 7.0, dtype=dtype))
    assert not nc.quantize_(layer, "int8").skips
    x = torch.randn(*batch, 48, dtype=dtype)
    y = layer(x)
    assert_close_to_product(y, x, layer.decoded(), layer.bias.expand(20))
    if bias:
        y.sum().backward()
        assert layer.bias.grad.shape == bias
        assert float(layer.bias.grad) == y.numel()


def test_a_bias_that_fits_no_output_is_refused() -> None:
    layer = nn.Linear(48, 20)
    layer.bias = nn.Parameter(torch.zeros(19))
    nc.quantize_(layer, "int8")
    with pytest.raises(ShapeError, match=r"bias: expected \[20\].*got \[19\]"):
        layer(torch.randn(2, 48))


# -- NaN ---------------------------------------------------------------------------------------------------------------


def test_a_nan_in_one_group_of_an_integer_convolution_stays_in_its_group() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 6, 3, padding=1, groups=2), torch.randn(1, 4, 5, 5)
    nc.prepare_qat_(layer, "int8", "int8")
    nc.calibrate_(layer, [x])
    nc.convert_(layer.eval())
    assert isinstance(layer, nc.nn.IntegerConv2d)
    clean = layer(x)
    x[0, 0, 0, 0] = torch.nan
    found = layer(x)
    touched = torch.zeros(1, 6, 5, 5, dtype=torch.bool)
    touched[:, :3, :2, :2] = True  # the first group, where a window holds the corner
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])


# -- inputs of every kind --------------------------------------------------------------------------------------------


def test_inputs_of_odd_layouts_give_the_same_numbers() -> None:
    layer = nn.Linear(12, 5)
    nc.quantize_(layer, "int4")
    x = torch.randn(4, 12)
    wanted = layer(x)
    for odd in (x.t().contiguous().t(), torch.randn(4, 24)[:, ::2].copy_(x), x.expand(2, 4, 12)[1]):
        assert torch.equal(layer(odd), wanted)
    assert torch.equal(layer(torch._neg_view(-x)), wanted)
    assert torch.equal(layer(x[0]), wanted[0])
    assert layer(x[:0]).shape == (0, 5)
    with pytest.raises(DtypeError, match="got int64"):
        layer(x.long())


@pytest.mark.parametrize("codec", ["int8", "int4", "nf4", "bf16"])
def test_negated_views_are_read_as_what_they_show(codec: str) -> None:
    layer, x, u = nn.Linear(64, 32), torch.randn(3, 64), torch.randn(3, 64)
    nc.quantize_(layer, codec)
    with torch.no_grad():
        assert torch.equal(layer(torch._neg_view(-x)), layer(x))
    if codec == "bf16":
        return
    quantizer = nc.nn.FakeQuantize(codec)
    y = quantizer(point := x.clone().requires_grad_())
    assert torch.equal(quantizer(torch._neg_view(-x)), y)
    wanted, found = (torch.autograd.grad(y, point, g, retain_graph=True)[0] for g in (u, torch._neg_view(-u)))
    assert torch.equal(found, wanted)
