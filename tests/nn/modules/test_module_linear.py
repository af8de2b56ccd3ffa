"""nc.nn.Linear: the product, its gradients, dtypes, compilation, copies and state dicts."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from product_bound import assert_close_to_product
from torch import Tensor, nn

import narrowcast as nc
from cases import CODECS, same_bits
from narrowcast import Codec
from narrowcast.errors import DtypeError, QuantizeError, ShapeError, SpecError, StateDictError
from narrowcast.nn.state import KEY

pytestmark = pytest.mark.ambient
AUTOCAST = pytest.mark.not_in(
    "autocast", "autocast cuda", reason="it changes dtypes, as it does for torch's own layers"
)
NO_GRADIENTS = pytest.mark.not_in("inference mode", "no grad", reason="there are no gradients there")

SOME = ["raw", "bf16", "fp8_e4m3", "sign", "int2", "int3", "int4:block=64", "int8:block=row", "nf4", "apot4"]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def made(codec: str | Codec = "int8", into: int = 70, out: int = 33, **options: object) -> nc.nn.Linear:
    return nc.nn.Linear.from_float(nn.Linear(into, out, **options), codec)


# -- the product ----------------------------------------------------------------------------------------------------


@AUTOCAST
@pytest.mark.parametrize("batch", [1, 5])
def test_every_codec_multiplies_with_the_decoded_weight(codec: Codec, batch: int, device: str) -> None:
    linear = made(codec, 200, 33).to(device)
    x = torch.randn(batch, 200, device=device)
    assert_close_to_product(linear(x), x, linear.decoded(), linear.bias)


@AUTOCAST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", SOME)
def test_the_result_has_the_dtype_of_x_whatever_the_dtype_of_the_bias(
    spec: str, dtype: torch.dtype, device: str
) -> None:
    linear = made(spec).to(device)
    x = torch.randn(3, 70, dtype=dtype, device=device)
    assert linear.bias is not None
    assert linear.bias.dtype == torch.float32
    # Only for fp64 is the decoded weight not rounded to fp32: codecs decode to fp32 at most.
    assert_close_to_product(linear(x), x, linear.decoded(torch.float32), linear.bias)


@AUTOCAST
@pytest.mark.parametrize("shape", [(70,), (1, 70), (2, 3, 70), (0, 70), (2, 0, 70)])
def test_any_number_of_dimensions_before_the_last(shape: tuple[int, ...], device: str) -> None:
    linear = made("int4").to(device)
    x = torch.randn(shape, device=device)
    y = linear(x)
    assert y.shape == (*shape[:-1], 33)
    assert_close_to_product(y, x, linear.decoded(), linear.bias)


@AUTOCAST
@pytest.mark.parametrize(("into", "out"), [(1, 4), (4, 1), (1, 1), (7, 130), (257, 3)])
def test_small_and_odd_sizes(into: int, out: int, device: str) -> None:
    linear = made("int8", into, out).to(device)
    x = torch.randn(2, into, device=device)
    assert_close_to_product(linear(x), x, linear.decoded(), linear.bias)


@AUTOCAST
def test_without_a_bias_there_is_none() -> None:
    linear = made("int8", bias=False)
    assert linear.bias is None
    assert list(linear.state_dict()) == ["weight", KEY]
    x = torch.randn(2, 70)
    assert_close_to_product(linear(x), x, linear.decoded())


@AUTOCAST
def test_x_may_be_a_view_with_strides() -> None:
    linear = made("int8")
    x = torch.randn(70, 4).t()
    assert_close_to_product(linear(x), x, linear.decoded(), linear.bias)


def test_autocast_casts_x_as_it_does_for_torch_linear() -> None:
    linear, x = made("int8"), torch.randn(3, 70)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        assert F.linear(x, linear.decoded()).dtype == y.dtype == torch.bfloat16
        assert linear(x.double()).dtype == F.linear(x.double(), linear.decoded(torch.float64)).dtype == torch.float64
    assert_close_to_product(y, x.bfloat16(), linear.decoded(), linear.bias)


# -- gradients --------------------------------------------------------------------------------------------------------


@NO_GRADIENTS
@AUTOCAST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SOME)
def test_gradients_of_x_and_bias_are_those_of_the_decoded_weight(spec: str, dtype: torch.dtype, device: str) -> None:
    linear = made(spec).to(device)
    x = torch.randn(5, 70, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(5, 33, dtype=dtype, device=device)
    linear(x).backward(grad)
    assert x.grad is not None
    assert_close_to_product(x.grad, grad, linear.decoded().t())
    assert linear.bias is not None
    assert linear.bias.grad is not None
    # A sum over 5 rows in the dtype of the gradient: a product with ones.
    ones = torch.ones(1, 5, dtype=dtype, device=device)
    assert_close_to_product(linear.bias.grad.to(dtype)[None], ones, grad.t())
    assert linear.weight.grad is None


@NO_GRADIENTS
def test_a_frozen_bias_gets_no_gradient() -> None:
    linear = made("int8")
    assert linear.bias is not None
    linear.bias.requires_grad_(False)
    x = torch.randn(2, 70, requires_grad=True)
    linear(x).sum().backward()
    assert linear.bias.grad is None
    assert x.grad is not None


# -- compilation ------------------------------------------------------------------------------------------------------


@pytest.mark.not_in(reason="a compiler sees what surrounds it: tests/test_compile.py")
@pytest.mark.parametrize("spec", SOME)
def test_it_compiles_into_one_graph(spec: str, device: str) -> None:
    linear = made(spec).to(device)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for batch in (1, 3):
        x = torch.randn(batch, 70, device=device)
        assert same_bits(compiled(x), linear(x))


@pytest.mark.not_in(reason="a compiler sees what surrounds it: tests/test_compile.py")
def test_it_compiles_with_its_gradients_and_under_autocast() -> None:
    linear = made("int4")
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    x, other = (torch.ones(3, 70, requires_grad=True) for _ in range(2))
    compiled(x).sum().backward()
    linear(other).sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert same_bits(x.grad, other.grad)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert same_bits(compiled(x), linear(x))


@pytest.mark.not_in(reason="a compiler sees what surrounds it: tests/test_compile.py")
def test_it_exports() -> None:
    linear, x = made("int4"), torch.randn(3, 70)
    exported = torch.export.export(linear, (x,))
    assert same_bits(exported.module()(x), linear(x))


# -- a module among modules -------------------------------------------------------------------------------------------


def test_the_constructor_takes_torchs_arguments_and_a_codec() -> None:
    linear = nc.nn.Linear(64, 32, bias=False, codec="int4:block=64", dtype=torch.bfloat16)
    assert (linear.in_features, linear.out_features, linear.bias) == (64, 32, None)
    assert (linear.codec, linear.dtype) == (nc.codec("int4:block=64"), torch.bfloat16)
    assert linear.weight.shape == (32, nc.codec("int4").row_bytes(64))
    assert (linear.weight.dtype, linear.weight.requires_grad) == (torch.uint8, False)
    assert linear(torch.randn(2, 64)).shape == (2, 32)
    assert nc.nn.Linear(64, 32, device="meta").weight.device.type == "meta"


def test_it_says_what_it_is() -> None:
    assert repr(made("int4:block=32")) == "Linear(in_features=70, out_features=33, bias=True, codec='int4:block=32')"


def test_from_float_leaves_the_float_module_alone_and_dequantize_gives_one() -> None:
    float_one = nn.Linear(70, 33)
    before = {key: value.clone() for key, value in float_one.state_dict().items()}
    linear = nc.nn.Linear.from_float(float_one, "int8")
    assert type(float_one) is nn.Linear
    assert all(same_bits(value, before[key]) for key, value in float_one.state_dict().items())
    again = linear.dequantize()
    assert type(again) is nn.Linear
    assert type(linear) is nc.nn.Linear
    assert same_bits(again.weight.detach(), linear.decoded())
    assert again.weight.requires_grad
    assert again.bias is linear.bias


def test_from_float_refuses_another_module() -> None:
    with pytest.raises(QuantizeError, match=r"module: Linear.from_float takes a torch.nn.Linear, got Conv2d"):
        nc.nn.Linear.from_float(nn.Conv2d(1, 1, 1), "int8")

    class Mine(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    with pytest.raises(QuantizeError, match=r"got Mine \(Mine changes torch.nn.Linear \(forward\)\)"):
        nc.nn.Linear.from_float(Mine(4, 4), "int8")


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(SpecError):
        nc.nn.Linear(4, 4, codec="int99")


@pytest.mark.parametrize(
    ("move", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.double(), torch.float64),
        (lambda m: m.to("meta"), torch.float32),
        (lambda m: nn.Sequential(m).bfloat16()[0], torch.bfloat16),
    ],
)
def test_its_dtype_follows_the_model_and_the_rows_do_not(move, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    linear = move(made("int8"))
    assert linear.dtype == linear.decoded().dtype == linear.bias.dtype == dtype
    assert linear.weight.dtype == torch.uint8


def test_copies_and_pickles_compute_the_same() -> None:
    linear, x = made("nf4"), torch.randn(2, 70)
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert same_bits(other(x), linear(x))
        assert other.codec == linear.codec
        assert other.weight is not linear.weight


@pytest.mark.not_in(reason="a process of its own")
def test_ddp_wraps_it_and_trains_what_is_left_to_train() -> None:
    # In a process of its own, which does not clean up: torch was seen to wait for its own thread when it lets go of a
    # group that DDP was the last to hold.
    code = """
import os, torch, narrowcast as nc
from torch import nn
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(70, 33), nn.LayerNorm(33))
nc.quantize_(model, "int8")
ddp = nn.parallel.DistributedDataParallel(model)
ddp(torch.randn(2, 70)).square().sum().backward()
os._exit(0 if type(model[0]) is nc.nn.Linear and model[0].bias.grad is not None else 3)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


# -- state dicts ------------------------------------------------------------------------------------------------------


def test_a_state_dict_has_torchs_keys_and_the_codec_and_loads_into_another() -> None:
    one, other, x = made("int4"), made("int4"), torch.randn(2, 70)
    assert list(one.state_dict()) == [*nn.Linear(70, 33).state_dict(), KEY]
    assert not same_bits(one(x), other(x))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same_bits(one(x), other(x))


def test_a_meta_module_takes_a_state_dict_by_assignment() -> None:
    one, x = made("int4"), torch.randn(2, 70)
    other = nc.nn.Linear(70, 33, codec="int4", device="meta")
    other.load_state_dict(one.state_dict(), assign=True)
    assert same_bits(one(x), other(x))
    assert not other.weight.requires_grad
    assert same_bits(one.half()(x), other.half()(x))


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (nn.Linear(70, 33), r"has float32 \[33, 70\].*before it was quantized.*call quantize_ then"),
        (nc.nn.Linear(70, 33, codec="nf4"), r"has uint8 \[33, 48\].*another codec.*narrowcast.save"),
        (nc.nn.Linear(90, 33, codec="int8"), r"this weight is held as uint8 rows \[33, 80\] of codec 'int8'"),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_another_layout_is_refused_and_nothing_loaded(
    theirs: nn.Module, says: str, assign: bool
) -> None:
    linear = made("int8")
    before = {key: value.clone() for key, value in linear.state_dict().items()}
    with pytest.raises(StateDictError, match=rf"state_dict\['weight'\].*{says}"):
        linear.load_state_dict(theirs.state_dict(), assign=assign)
    assert all(torch.equal(value, before[key]) for key, value in linear.state_dict().items())


def test_missing_and_unexpected_keys_are_torchs_to_report() -> None:
    linear = made("int8")
    with pytest.raises(RuntimeError, match="Missing key"):
        linear.load_state_dict({"bias": torch.zeros(33)})
    assert linear.load_state_dict({"bias": torch.zeros(33)}, strict=False).missing_keys == ["weight"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (
            torch.zeros(2, 71),
            ShapeError,
            r"input: expected \[\.\.\., 70\], since the layer has in_features=70, got \[2, 71\]",
        ),
        (torch.zeros(()), ShapeError, r"got \[\]"),
        (
            torch.zeros(2, 70, dtype=torch.uint8),
            DtypeError,
            r"input: expected float32.*got uint8.*weight.dtype.*rules=",
        ),
        (torch.zeros(2, 70, dtype=torch.complex64), DtypeError, "complex64"),
        (torch.zeros(2, 70).to_sparse(), DtypeError, r"input: .* dense .* x\.to_dense\(\)"),
        (torch.nested.nested_tensor([torch.zeros(2, 70)]), DtypeError, r"input: .* not nested .*to_padded_tensor"),
        (
            torch.nested.nested_tensor([torch.zeros(2, 70)], layout=torch.jagged),
            DtypeError,
            "input: .* not nested .*to_padded_tensor",
        ),
        (
            torch.zeros(2, 70, device="meta"),
            ShapeError,
            r"input: is on meta, the weight on cpu. Call model.to\('meta'\)",
        ),
    ],
)
def test_an_x_that_does_not_fit_is_refused(x: Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        made("int8")(x)


def test_the_table_of_codecs_is_not_empty() -> None:
    assert len(CODECS) > 50
