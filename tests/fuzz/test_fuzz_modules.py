"""Random layers and models: on encoded rows against the floats that they decode to, trained against packed, and through
state dicts, copies and pickles.

The tolerance is that of tests/nn/product_bound.py for any layer that is linear in x: if s is the layer with the
magnitudes of x, weight and bias in their place, then sums of K products, in any order and in fp32, are off by at most
gamma(K + 5) s, and where numbers have 16 bits, three roundings of theirs more.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from campaign import campaign
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import narrowcast as nc

CODECS = ["int8", "int8:block=row", "int4", "int4:block=16", "nf4", "apot4", "int3", "int2:block=8", "sign", "bf16"]
TRAINED = ["int8", "int4", "apot4", "int3", "nf4", "pot4"]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["plain", "strided", "transposed", "negated", "expanded", "gradient"]
CONVOLUTIONS: list[Any] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]


@st.composite
def linears(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    width, out = draw(st.integers(1, 70)), draw(st.integers(1, 40))
    layer = nn.Linear(width, out, bias=draw(st.booleans()))
    if layer.bias is not None and draw(st.integers(0, 4)) == 0:
        layer.bias = nn.Parameter(torch.randn(1))
    batch = draw(st.lists(st.integers(0, 5), max_size=3))
    return layer, (*batch, width)


@st.composite
def convolutions(draw: Any) -> tuple[nn.Module, tuple[int, ...]]:
    kind = draw(st.sampled_from(CONVOLUTIONS))
    spatial = CONVOLUTIONS.index(kind) + 1
    groups = draw(st.integers(1, 3))
    into, out = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(spatial))
    stride = tuple(draw(st.integers(1, 2)) for _ in range(spatial))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(spatial))
    padding: Any = draw(st.one_of(st.just("valid"), st.tuples(*[st.integers(0, 2)] * spatial)))
    if stride == (1,) * spatial and draw(st.booleans()):
        padding = "same"
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    if kind is nn.Conv3d and mode == "reflect":
        mode = "zeros"
    layer = kind(into, out, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode)
    size = tuple(draw(st.integers(5, 7)) for _ in range(spatial))
    batch = draw(st.sampled_from([(), (1,), (2,)]))
    return layer, (*batch, into, *size)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers, in memory in another way."""
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "negated":
        return torch._neg_view(-x)
    if layout == "expanded":
        return x.unsqueeze(0).expand(2, *x.shape)[1]
    return x.clone().requires_grad_() if layout == "gradient" else x


def products(layer: nn.Module) -> int:
    """How many products an output sums, and how many outputs an input reaches: the larger one."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    inner = weight[0].numel()
    return max(inner, weight.numel() // weight.shape[1])


def assert_within(y: Tensor, exact: Tensor, size: Tensor, terms: int, dtype: torch.dtype, largest: float) -> None:
    assert y.shape == exact.shape
    assert y.dtype == dtype
    steps = terms + 9
    gamma = steps * 2.0**-24 / (1 - steps * 2.0**-24)
    narrow = torch.finfo(dtype if dtype.itemsize == 2 else torch.float32)
    rounded = 3 * narrow.eps / 2 if dtype.itemsize == 2 else 0.0
    denormal = narrow.smallest_normal * narrow.eps * (steps * largest + 2)
    off, bound = (y.double() - exact).abs(), (gamma + rounded) * size + denormal
    assert bool((off <= bound).all()), f"off by {off.max():.3g}, {(off / bound).max():.3g} of the bound"


def magnitudes(layer: nn.Module) -> nn.Module:
    made = copy.deepcopy(layer)
    for parameter in made.parameters():
        parameter.data = parameter.data.abs()
    return made


@campaign(120)
@given(
    st.one_of(linears(), convolutions()),
    st.sampled_from(CODECS),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**31),
)
@example((nn.Linear(48, 20), (0, 48)), "int4", torch.float32, "plain", 0)
@example((nn.Linear(1, 1, bias=False), (1,)), "int8", torch.float32, "negated", 0)
def test_encoded_layers_compute_with_what_their_rows_decode_to(
    drawn: tuple[nn.Module, tuple[int, ...]], codec: str, dtype: torch.dtype, layout: str, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, shape = drawn
    layer = copy.deepcopy(layer).to(dtype)
    assert not nc.quantize_(layer, codec).skips
    exact = nc.dequantize_(copy.deepcopy(layer)).double()
    plain = torch.randn(shape, dtype=dtype)
    x = laid_out(plain, layout)
    y = layer(x)
    terms, largest = products(exact), float(plain.abs().max()) if plain.numel() else 0.0
    point = plain.double().requires_grad_()
    wanted, size = exact(point), magnitudes(exact)(plain.double().abs())
    assert_within(y, wanted.detach(), size, terms, dtype, largest)
    if layout == "gradient":
        u = torch.randn_like(y)
        (found,) = torch.autograd.grad(y, x, u)
        (of_x,) = torch.autograd.grad(wanted, point, u.double())
        box = plain.double().abs().requires_grad_()
        (reach,) = torch.autograd.grad(magnitudes(exact)(box), box, u.double().abs())
        # A gradient of 16 bits is rounded along the way through the padding, once for each copy of an element.
        assert_within(found, of_x, 4 * reach, terms, dtype, float(u.abs().max()) if u.numel() else 0.0)
    assert_copies_compute_the_same(layer, plain)


def assert_copies_compute_the_same(model: nn.Module, *inputs: Tensor) -> None:
    """Copies, pickles and state dicts in fresh models: bit for bit."""
    with torch.no_grad():
        wanted = model(*inputs)
        fresh = copy.deepcopy(model)
        for parameter in fresh.parameters():
            parameter.data = torch.zeros_like(parameter)
        fresh.load_state_dict(model.state_dict())
        assigned = copy.deepcopy(model).to("meta")
        assigned.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh, assigned):
            assert torch.equal(other(*inputs), wanted) or bool(wanted.isnan().any())


@campaign(30)
@given(st.sampled_from(CODECS), st.integers(1, 20), st.integers(1, 33), st.data(), st.integers(0, 2**31))
def test_encoded_embeddings_look_up_what_their_rows_decode_to(
    codec: str, count: int, width: int, data: st.DataObject, seed: int
) -> None:
    torch.manual_seed(seed)
    padding = data.draw(st.one_of(st.none(), st.integers(0, count - 1)))
    table = nn.Embedding(count, width, padding).to(data.draw(st.sampled_from(DTYPES)))
    assert not nc.quantize_(table, codec).skips
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    index = torch.randint(0, count, shape, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    plain = nc.dequantize_(copy.deepcopy(table))
    assert torch.equal(table(index), plain(index))
    assert_copies_compute_the_same(table, index)


class Tied(nn.Module):
    """An embedding, and a head on the same weight."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(count, width), nn.Linear(width, count)
        self.head.weight = self.table.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index).tanh())  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Experts with a bias each, or one for all, called in one of the ways that models call them."""

    def __init__(self, experts: int, width: int, out: int, way: str, bias: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, out, width))
        self.shift = nn.Parameter(torch.randn(experts, out if bias else 1))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "linear":
            return torch.stack([F.linear(x, self.up[e], self.shift[e]) for e in range(len(self.up))])
        if self.way == "matmul":
            return torch.stack([x @ w.T + b for w, b in zip(self.up, self.shift, strict=True)])
        if self.way == "bmm":
            return torch.bmm(self.up, x.T.expand(len(self.up), *x.T.shape)).mT + self.shift.unsqueeze(1)
        mask = self.up != 0
        return torch.einsum("bi,eoi->ebo", x, self.up * mask) + self.shift.unsqueeze(1)


@campaign(40)
@given(
    st.sampled_from(CODECS),
    st.integers(2, 4),
    st.integers(2, 40),
    st.integers(2, 9),
    st.sampled_from(["linear", "matmul", "bmm", "operators"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_encoded_experts_and_ties_compute_with_what_their_rows_decode_to(
    codec: str, experts: int, width: int, out: int, way: str, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Mixture(experts, width, out, way, bias)
    assert [entry.name for entry in nc.quantize_(model, codec).entries] == ["up"]
    x, exact = torch.randn(5, width), nc.dequantize_(copy.deepcopy(model)).double()
    size = magnitudes(exact)(x.double().abs())
    assert_within(model(x).detach(), exact(x.double()).detach(), size, width, x.dtype, float(x.abs().max()))
    assert_copies_compute_the_same(model, x)
    tied, index = Tied(experts + 3, width), torch.tensor([0, 2, 1])
    assert len(nc.quantize_(tied, codec).entries) == 1
    assert tied.head.weight is tied.table.weight
    plain = nc.dequantize_(copy.deepcopy(tied))
    looked_up = plain.table(index).tanh().double()
    head = plain.head.double()
    size = magnitudes(head)(looked_up.abs())
    assert_within(tied(index).detach(), head(looked_up).detach(), size, width, torch.float32, 1.0)
    assert_copies_compute_the_same(tied, index)


@campaign(40)
@given(st.sampled_from(CODECS), st.data(), st.integers(0, 2**31))
def test_encoded_attention_computes_with_what_its_rows_decode_to(codec: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    heads, flag = data.draw(st.integers(1, 3)), lambda: data.draw(st.booleans())
    width, batch_first = heads * data.draw(st.integers(1, 6)), flag()
    kdim, vdim = (data.draw(st.integers(1, 9)) if flag() else None for _ in range(2))
    model = nn.MultiheadAttention(width, heads, 0.0, flag(), flag(), flag(), kdim, vdim, batch_first).eval()
    nc.quantize_(model, codec)
    plain = nc.dequantize_(copy.deepcopy(model))
    length, source, batch = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))

    def side(count: int, size: int) -> Tensor:
        return torch.randn(batch, count, size) if batch_first else torch.randn(count, batch, size)

    options: dict[str, Any] = {"need_weights": flag(), "average_attn_weights": flag()}
    if flag():
        options["attn_mask"] = torch.randn(length, source) if flag() else torch.triu(torch.ones(length, source), 1) > 0
    if flag():
        options["key_padding_mask"] = torch.zeros(batch, source).bool()
        options["key_padding_mask"][:, 1:] = torch.rand(batch, source - 1) > 0.5
        if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
            options["key_padding_mask"] = options["key_padding_mask"].float() * -5
    inputs = side(length, width), side(source, kdim or width), side(source, vdim or width)
    found, wanted = model(*inputs, **options), plain(*inputs, **options)
    assert (found[1] is None) == (wanted[1] is None)
    # Both run in fp32, on operands of order 1 (4 where vectors of 18 are summed): projections, scores and mixtures are
    # each off by at most gamma(25) of their size, 2**-19, and an exponential multiplies what scores are off by.
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2.0**-13, atol=2.0**-13 * float(other.abs().max().clamp(min=1)))


@campaign(20)
@given(st.sampled_from(CODECS), st.data(), st.integers(0, 2**31))
def test_layers_without_an_encoded_form_are_left_and_listed(codec: str, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    layers = {
        "transposed": (nn.ConvTranspose1d(4, 6, 3, groups=2), torch.randn(1, 4, 5)),
        "bag": (nn.EmbeddingBag(7, 5), torch.tensor([[1, 2], [3, 6]])),
        "max_norm": (nn.Embedding(7, 5, max_norm=1.0), torch.tensor([1, 2])),
        "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), torch.randn(2, 5)),
        "spectral_norm": (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)).eval(), torch.randn(2, 5)),
    }
    layer, x = layers[data.draw(st.sampled_from(sorted(layers)))]
    before = type(layer), {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    report = nc.quantize_(nn.Sequential(layer), codec)
    assert not report.entries
    assert report.skips
    assert type(layer) is before[0]
    assert layer.state_dict().keys() == before[1].keys()
    assert all(torch.equal(tensor, before[1][key]) for key, tensor in layer.state_dict().items())
    layer(x)  # which may change it: an Embedding with max_norm scales the vectors that it looks up


# -- training ----------------------------------------------------------------------------------------------------------


@campaign(60)
@given(
    st.one_of(linears(), convolutions()),
    st.sampled_from(TRAINED),
    st.one_of(st.none(), st.sampled_from(["int8", "int4", "apot4", "fp8_e4m3"])),
    st.sampled_from(["nearest", "learned"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_packed_layers_compute_what_the_trained_ones_do(
    drawn: tuple[nn.Module, tuple[int, ...]],
    weights: str,
    activations: str | None,
    rounding: str,
    per_channel: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layer, shape = drawn
    layer, shape = copy.deepcopy(layer), tuple(max(size, 1) for size in shape)
    fresh = copy.deepcopy(layer)
    for some in (layer, fresh):
        nc.prepare_qat_(some, weights, activations, per_channel=per_channel)
    x = torch.randn(shape)
    nc.calibrate_(layer, [x, 2 * torch.randn(shape)], rounding=rounding, steps=3)
    fresh.load_state_dict(layer.state_dict())
    layer.eval()
    with torch.no_grad():
        trained = layer(x)
        assert torch.equal(fresh.eval()(x), trained)
        quantized = layer.quantized_input(x).double()
        exact = copy.deepcopy(fresh)
        weight = exact.quantized_weight().detach().double()
        plain = exact._plain_class.forward
        vars(exact).pop("_parameters")
        vars(exact)["_parameters"] = {
            "weight": nn.Parameter(weight.abs()),
            "bias": None if layer.bias is None else nn.Parameter(layer.bias.double().abs()),
        }
        size = plain(exact, quantized.abs())
        nc.convert_(layer)
        packed = layer(x)
    terms = max(weight[0].numel(), 1)
    # Each of the two is within the bound of the exact product: twice the bound between them.
    assert_within(packed, trained.double(), 2 * size, terms, torch.float32, float(quantized.abs().max()))
    assert_copies_compute_the_same(layer, x)
