"""Derivatives of modules in every mode: backward, forward, twice, and under the transforms of torch.func.

What a module's derivative is, the float module with the decoded weight says; what a quantizer's is, its backward pass
says, which other tests pin: for any v and u, <u, J v> in forward mode is <J^T u, v> in backward mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import narrowcast as nc
from narrowcast.errors import CalibrationError, GradientError


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.up[1]) + x @ self.up.transpose(1, 2)[2]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        # Torch's fused attention on a CPU has no forward mode of its own.
        return self.inner(x, x, x, need_weights=True)[0]  # type: ignore[no-any-return]


def pairs() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    return {
        "linear": (lambda: nn.Linear(16, 8), (4, 16)),
        "no bias": (lambda: nn.Linear(16, 8, bias=False), (4, 16)),
        "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 5)),
        "attention": (Attends, (2, 3, 16)),
        "experts": (Experts, (4, 16)),
        "two layers": (lambda: nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5)), (3, 16)),
    }


def encoded_and_float(name: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A quantized model, the float one with the weights that it decodes, an input and a tangent, in fp64."""
    make, shape = pairs()[name]
    torch.manual_seed(7)
    model = make().double()
    nc.quantize_(model, "int4:block=8")
    plain = nc.dequantize_(copy.deepcopy(model))
    return model, plain, torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def assert_same(found: object, wanted: object) -> None:
    # fp64 products in fp64, or in fp32 where a kernel sums there: 2**-20 of values of order 1 to 100.
    torch.testing.assert_close(found, wanted, rtol=2.0**-18, atol=2.0**-16)


@pytest.mark.parametrize("name", pairs())
def test_forward_mode_carries_tangents_through_encoded_modules(name: str) -> None:
    model, plain, x, v = encoded_and_float(name)
    assert_same(jvp(model, (x,), (v,)), jvp(plain, (x,), (v,)))
    for freeze in (False, True):
        for parameter in model.parameters():
            parameter.requires_grad_(not freeze and parameter.is_floating_point())
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, v))).tangent
        assert tangent is not None
        assert_same(tangent.detach(), jvp(plain, (x,), (v,))[1].detach())


@pytest.mark.parametrize("name", pairs())
def test_torch_func_differentiates_encoded_modules(name: str) -> None:
    model, plain, x, _ = encoded_and_float(name)

    def both(f: Callable[[nn.Module], object]) -> None:
        assert_same(f(model), f(plain))

    both(lambda m: grad(lambda x: m(x).square().sum())(x))
    both(lambda m: jacrev(m)(x))
    both(lambda m: jacfwd(m)(x))
    both(lambda m: vmap(lambda x: m(x.unsqueeze(0)))(x))
    both(lambda m: vmap(grad(lambda x: m(x.unsqueeze(0)).square().sum()))(x))
    both(lambda m: vmap(lambda x: m(x.unsqueeze(0)), in_dims=1, out_dims=1)(x.transpose(0, 1)))


@pytest.mark.parametrize("name", ["linear", "two layers", "experts"])
def test_second_derivatives_of_encoded_modules(name: str) -> None:
    model, plain, x, v = encoded_and_float(name)

    def loss(m: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: m(x).square().sum()

    assert_same(hessian(loss(model))(x[0]), hessian(loss(plain))(x[0]))
    assert_same(jacrev(jacrev(loss(model)))(x[0]), jacrev(jacrev(loss(plain)))(x[0]))
    assert_same(jvp(grad(loss(model)), (x,), (v,)), jvp(grad(loss(plain)), (x,), (v,)))
    found = []
    for m in (model, plain):
        point = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(m(point).square().sum(), point, create_graph=True)
        found += torch.autograd.grad((first * v).sum(), point)
    assert_same(*found)


def test_a_bias_has_derivatives_in_both_modes() -> None:
    model, plain, x, _ = encoded_and_float("linear")
    tangent = torch.randn(8, dtype=torch.float64)

    def of(m: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda bias: functional_call(m, {"bias": bias}, (x,))

    bias = plain.bias.detach()
    assert_same(jvp(of(model), (bias,), (tangent,)), jvp(of(plain), (bias,), (tangent,)))
    assert_same(jacrev(of(model))(bias), jacrev(of(plain))(bias))
    several = torch.randn(5, 8, dtype=torch.float64)
    assert_same(vmap(of(model))(several), vmap(of(plain))(several))


def test_stacked_models_run_under_vmap() -> None:
    models = [nn.Linear(16, 8) for _ in range(3)]
    for model in models:
        nc.quantize_(model, "int4")
    x = torch.randn(2, 16)
    parameters, buffers = torch.func.stack_module_state(models)
    found = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    assert torch.equal(found, torch.stack([model(x) for model in models]))


def test_an_embedding_is_looked_up_under_vmap_and_beside_tangents() -> None:
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 4))
    nc.quantize_(model, "int8")
    index = torch.tensor([[1, 2], [3, 9], [0, 0]])
    assert_same(vmap(model)(index), model(index))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(model[0](index)).tangent is None


# -- quantizers --------------------------------------------------------------------------------------------------------

QUANTIZERS = {
    "uniform": {"codec": "int4"},
    "table": {"codec": "apot4"},
    "channels": {"codec": "int3", "channel_axis": 0},
    "through": {"codec": "apot4", "channel_axis": 0, "normalize": "through"},
    "detached": {"codec": "int4", "normalize": "detached"},
    "scaled gradient": {"codec": "int4", "channel_axis": 1, "gradient_scale": True},
}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_tangents_of_a_quantizer_are_those_of_its_backward_pass(kind: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(6, 6)
    quantizer = nc.nn.FakeQuantize(**QUANTIZERS[kind])
    quantizer(x)
    alpha = quantizer.alpha.detach() * 0.8  # so that some are clipped

    def f(x: Tensor, alpha: Tensor) -> Tensor:
        return functional_call(quantizer, {"alpha": alpha}, (x,))

    u, vx, va = torch.randn(6, 6), torch.randn(6, 6), torch.randn_like(alpha)
    point = x.clone().requires_grad_(), alpha.clone().requires_grad_()
    of_x, of_alpha = torch.autograd.grad(f(*point), point, u)
    wanted = float((of_x * vx).sum() + (of_alpha * va).sum())
    with forward_ad.dual_level():
        dual = f(forward_ad.make_dual(x, vx), forward_ad.make_dual(alpha, va))
        eager = forward_ad.unpack_dual(dual).tangent
    for tangent in (eager, jvp(f, (x, alpha), (vx, va))[1]):
        # Sums of 36 products of fp32 numbers of order 1 to 10.
        assert abs(float((u * tangent).sum()) - wanted) < 1e-3 * (1 + abs(wanted))
    pulled = vjp(f, x, alpha)[1](u)
    torch.testing.assert_close(pulled, (of_x, of_alpha), rtol=1e-4, atol=1e-5)
    assert torch.equal(f(x, alpha), vjp(f, x, alpha)[0])


def test_torch_func_differentiates_models_in_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(5, 3, 8)
    nc.prepare_qat_(model, "apot4", "int4")
    nc.calibrate_(model, [x])
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    loss(parameters, x).backward()
    found = grad(loss)({name: p.detach() for name, p in parameters.items()}, x)
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    each = vmap(grad(loss), in_dims=(None, 0))({name: p.detach() for name, p in parameters.items()}, x.unsqueeze(1))
    for name, parameter in parameters.items():
        torch.testing.assert_close(each[name].sum(0), parameter.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert jacrev(model)(x).shape == jacfwd(model)(x).shape == (5, 2, 5, 3, 8)
    torch.testing.assert_close(jacrev(model)(x), jacfwd(model)(x), rtol=1e-4, atol=1e-5)


def test_a_quantizer_does_not_start_inside_a_transform() -> None:
    quantizer = nc.nn.FakeQuantize("int4")
    with pytest.raises(CalibrationError, match=r"a transform of torch\.func .* is at work"):
        grad(lambda x: quantizer(x).sum())(torch.randn(4))
    assert not quantizer.is_started


def test_second_derivatives_of_a_quantizer_are_refused() -> None:
    quantizer = nc.nn.FakeQuantize("int4")
    x = torch.randn(8)
    quantizer(x)
    with pytest.raises(GradientError, match="differentiated twice"):
        grad(grad(lambda x: quantizer(x * x).square().sum()))(torch.tensor(0.3))
    with pytest.raises(GradientError, match="differentiated twice"):
        jvp(grad(lambda x: quantizer(x).square().sum()), (x,), (x,))


# -- integer layers: for inference, but no derivative is lost --------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_integer_layers_have_the_derivatives_of_the_trained_ones(kind: str, bias: bool) -> None:
    torch.manual_seed(1)
    layer: nn.Module = nn.Linear(12, 6, bias=bias) if kind == "linear" else nn.Conv2d(4, 6, 3, groups=2, bias=bias)
    x = torch.randn(5, 12) if kind == "linear" else torch.randn(2, 4, 5, 5)
    nc.prepare_qat_(layer, "int8", "int8")
    nc.calibrate_(layer, [x])
    trained = copy.deepcopy(layer).eval()
    nc.convert_(layer.eval())
    assert type(layer).__name__.startswith("Integer")
    x, v = 1.3 * x, torch.randn_like(x)  # so that some are clipped
    outputs = []
    for some in (layer, trained):
        point = x.clone().requires_grad_()
        y = some(point)
        (of_x,) = torch.autograd.grad(y, point, torch.ones_like(y), retain_graph=True)
        outputs += [(of_x, jvp(some, (x,), (v,))[1], grad(lambda x, f=some: f(x).square().sum())(x))]
        if bias:
            outputs[-1] += torch.autograd.grad(y, some.bias, torch.ones_like(y))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        quiet = layer(x)
    assert torch.equal(layer(x.clone().requires_grad_()), quiet)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    point = x.clone().requires_grad_()
    y = compiled(point)
    assert torch.equal(y, quiet)
    torch.testing.assert_close(
        torch.autograd.grad(y, point, torch.ones_like(y))[0], outputs[1][0], rtol=1e-4, atol=1e-4
    )


def test_a_compiled_backward_pass_gives_the_gradients_of_an_eager_one() -> None:
    model, _, x, _ = encoded_and_float("two layers")
    x.requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: model(x).square().sum().backward(), backend="eager")()
    assert_same(x.grad, expected)
