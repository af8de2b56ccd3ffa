"""nc.nn.Conv1d, Conv2d and Conv3d: torch's convolution with the decoded weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import DtypeError

pytestmark = pytest.mark.ambient
AUTOCAST = pytest.mark.not_in(
    "autocast", "autocast cuda", reason="it changes dtypes, as it does for torch's own layers"
)
THREADS = pytest.mark.not_in("three threads", reason="torch's convolution sums in another order then")
NO_GRADIENTS = pytest.mark.not_in("inference mode", "no grad", reason="there are no gradients there")

KINDS = {1: (nn.Conv1d, nc.nn.Conv1d), 2: (nn.Conv2d, nc.nn.Conv2d), 3: (nn.Conv3d, nc.nn.Conv3d)}
OPTIONS: list[dict[str, object]] = [
    {},
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"dilation": 2},
    {"groups": 2},
    {"padding": "same"},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "replicate"},
]


def pair(dims: int, spec: str, **options: object) -> tuple[nn.Module, nn.Module, Tensor]:
    """The encoded module, torch's with the decoded weight, and something to convolve."""
    torch.manual_seed(0)
    floats, encoded = KINDS[dims]
    module = encoded.from_float(floats(4, 6, 3, **options), spec)
    return module, module.dequantize(), torch.randn(2, 4, *(7, 6, 5)[:dims])


@AUTOCAST
@THREADS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", KINDS)
def test_every_option_means_what_torch_says(dims: int, options: dict[str, object]) -> None:
    module, reference, x = pair(dims, "int8", **options)
    assert type(reference) is KINDS[dims][0]
    with torch.no_grad():
        # The same call with the same weight: the same bits.
        assert same_bits(module(x), reference(x))


@pytest.mark.parametrize("spec", ["int8:block=row", "int4", "nf4", "fp8_e4m3", "bf16", "int3:block=8"])
def test_a_row_is_everything_behind_the_first_dimension(spec: str) -> None:
    torch.manual_seed(0)
    floats, codec = nn.Conv2d(4, 6, 3), nc.codec(spec)
    module = nc.nn.Conv2d.from_float(floats, spec)
    assert torch.equal(module.weight, codec.encode(floats.weight.flatten(1)))
    assert same_bits(module.decoded(), codec.decode(module.weight.detach(), 36).view(6, 4, 3, 3))


@AUTOCAST
@THREADS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_result_has_the_dtype_of_x_whatever_that_of_the_bias(dtype: torch.dtype) -> None:
    module, reference, x = pair(2, "int8")
    with torch.no_grad():
        assert same_bits(module(x.to(dtype)), reference.to(dtype)(x.to(dtype)))


@AUTOCAST
@THREADS
@NO_GRADIENTS
def test_gradients_of_x_and_bias_are_torchs() -> None:
    module, reference, x = pair(2, "int8")
    reference.bias = nn.Parameter(module.bias.detach().clone())
    grads = []
    for one in (module, reference):
        some = x.clone().requires_grad_()
        one(some).square().sum().backward()
        grads += [some.grad, one.bias.grad]
    assert same_bits(grads[0], grads[2])
    assert same_bits(grads[1], grads[3])


@pytest.mark.not_in(reason="a compiler sees what surrounds it: tests/test_compile.py")
def test_it_compiles_into_one_graph() -> None:
    module, _, x = pair(2, "int4", padding=1, padding_mode="reflect")
    assert same_bits(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
    torch._dynamo.reset()


def test_autocast_applies() -> None:
    module, reference, x = pair(2, "int8")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert same_bits(module(x), reference(x))


def test_integers_are_refused() -> None:
    module, _, x = pair(2, "int8")
    with pytest.raises(DtypeError, match=r"input: expected float32.*got int64"):
        module(x.long())


def test_transposed_convolutions_are_skipped_with_the_reason() -> None:
    report = nc.quantize_(nn.Sequential(nn.ConvTranspose2d(4, 6, 3)))
    assert report.skips == [("0.weight", "torch.nn.ConvTranspose2d has no encoded form")]
