"""The operators under torch.compile, opcheck, fake and meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowcast as nc
from cases import CODECS, mixed, same_bits
from narrowcast import Codec
from narrowcast.errors import SpecError
from narrowcast.kernels import operators

SOME = [
    "raw",
    "bf16",
    "fp8_e4m3",
    "fp8_e4m3:block=32",
    "sign",
    "int3",
    "int4",
    "int8:block=row",
    "int8:zero_point=true",
]
SOME += ["apot4", "nf4", "levels:table=-1.0|0.0|1.0"]
STOCHASTIC = "int4:stochastic=true"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Tensor], *, dynamic: bool = False) -> Callable[..., Tensor]:
    # aot_eager traces fakes, functionalizes and runs the graph; only inductor's code generation, which sees these
    # operators as extern calls, is left to the test that says so.
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


@pytest.mark.parametrize("spec", SOME)
def test_encode_compiles_into_one_graph(spec: str, device: str) -> None:
    codec = nc.codec(spec)
    x = mixed(6 * 35).view(6, 35).to(device)
    found = compiled(lambda x: nc.encode(x, codec).data)(x)
    assert torch.equal(found, nc.encode(x, codec).data)


@pytest.mark.parametrize("spec", SOME)
def test_decode_compiles_into_one_graph(spec: str, device: str) -> None:
    codec = nc.codec(spec)
    x = mixed(6 * 35).view(6, 35).to(device)
    payload = nc.encode(x, codec)

    def decode(data: Tensor) -> Tensor:
        return nc.decode(nc.Payload(data, codec, torch.Size((6, 35)), torch.float32)) * 2

    assert same_bits(compiled(decode)(payload.data), nc.decode(payload) * 2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spec", SOME)
def test_a_round_trip_compiles_into_one_graph_and_serves_other_shapes(spec: str, dynamic: bool, device: str) -> None:
    codec = nc.codec(spec)

    def roundtrip(x: Tensor) -> Tensor:
        return nc.decode(nc.encode(x + 1, codec)) - 1

    run = compiled(roundtrip, dynamic=dynamic)
    for shape in ((6, 35), (3, 70), (9, 41)):
        x = mixed(shape[0] * shape[1]).view(shape).to(device)
        assert same_bits(run(x), roundtrip(x))


def test_a_spec_string_may_be_used_inside_a_compiled_function() -> None:
    x = mixed(100)
    assert torch.equal(compiled(lambda x: nc.encode(x, "int4").data)(x), nc.encode(x, "int4").data)


def test_a_stochastic_codec_compiles_with_a_seed_and_asks_for_one_without() -> None:
    x = mixed(100)
    found = compiled(lambda x: nc.encode(x, STOCHASTIC, seed=5).data)(x)
    assert torch.equal(found, nc.encode(x, STOCHASTIC, seed=5).data)
    with pytest.raises((SpecError, torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported), match="seed"):
        compiled(lambda x: nc.encode(x, STOCHASTIC).data)(x)


def test_the_rows_api_and_sums_compile_into_one_graph(device: str) -> None:
    codec = nc.codec("int8")

    def reduce(x: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        rows = codec.encode(x)
        total = codec.decode_sum(rows, 150, own=own, own_rank=1, divisor=3)
        return total, codec.decode_sum_encode(rows, 150, own=own, own_rank=1, divisor=3)

    x, own = mixed(450).view(3, 150).to(device), mixed(150, seed=3).to(device)
    found, expected = compiled(reduce)(x, own), reduce(x, own)  # type: ignore[arg-type]
    assert same_bits(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_out_is_written_by_a_compiled_function(device: str) -> None:
    codec = nc.codec("int4")

    def roundtrip(x: Tensor, out: Tensor) -> Tensor:
        codec.decode(codec.encode(x), x.shape[-1], out=out)
        return out + 1

    x = mixed(150).to(device)
    out = torch.zeros(150, device=device)
    expected = codec.decode(codec.encode(x), 150)
    assert same_bits(compiled(roundtrip)(x, out), expected + 1)
    assert same_bits(out, expected)


def test_inductor_runs_the_operators_unchanged(device: str) -> None:
    codec = nc.codec("int4")

    def roundtrip(x: Tensor) -> Tensor:
        return nc.decode(nc.encode(x, codec))

    x = mixed(300).to(device)
    assert same_bits(torch.compile(roundtrip, fullgraph=True)(x), roundtrip(x))


# -- opcheck --------------------------------------------------------------------------------------------------------


def arguments_of(operator: str, codec: Codec, device: str) -> tuple[object, ...]:
    """Arguments for one operator: three rows of 75 floats."""
    recipe = codec.recipe(torch.device(device))
    x = mixed(225).view(3, 75).to(device)
    rows = codec.encode(x, 1)
    own = mixed(75, seed=2).to(device)
    sums = (own, 1, 3)
    return {
        "encode": (x, *recipe, 1),
        "encode_": (torch.zeros_like(rows), x, *recipe, 1),
        "encode_searched": (x, None, 2.0, *recipe),
        "encode_searched_": (torch.zeros_like(rows), x, None, 2.0, *recipe),
        "decode": (rows, 75, torch.bfloat16, *recipe),
        "decode_": (torch.zeros(3, 75, device=device), rows, *recipe),
        "decode_sum": (rows, 75, torch.float32, *recipe, *sums),
        "decode_sum_": (torch.zeros(75, device=device), rows, *recipe, *sums),
        "decode_sum_encode": (rows, 75, *recipe, *sums, 1),
        "decode_sum_encode_": (torch.zeros_like(rows[0]), rows, 75, *recipe, *sums, 1),
        "linear": (x.requires_grad_(), rows, *recipe, torch.ones(3, device=device, requires_grad=True)),
        "linear_backward": (torch.ones(2, 3, device=device), rows, 75, *recipe),
    }[operator]


OF_CODECS = ["encode", "encode_", "encode_searched", "encode_searched_", "decode", "decode_"]
OF_CODECS += ["decode_sum", "decode_sum_", "decode_sum_encode", "decode_sum_encode_"]
OPERATORS = [*OF_CODECS, "linear", "linear_backward"]
ELSEWHERE = {"adamw_", "fake_quantize", "fake_quantize_backward", "integer_linear", "integer_conv"}
"""Operators that tests/kernels/operators check."""


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("spec", ["int4", "nf4", "bf16", "int8:block=row,zero_point=true", STOCHASTIC])
def test_opcheck_passes(operator: str, spec: str, device: str) -> None:
    arguments = arguments_of(operator, nc.codec(spec), device)
    result = torch.library.opcheck(getattr(torch.ops.narrowcast, operator).default, arguments)
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_covers_every_operator() -> None:
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "narrowcast::" in name
    }
    assert names - ELSEWHERE == set(OPERATORS)
    assert all(callable(getattr(operators, name)) for name in OF_CODECS)


# -- fake and meta --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_meta_tensors_give_the_shapes_of_real_ones(name: str) -> None:
    codec = CODECS[name]
    x = torch.empty(3, 75, device="meta", dtype=torch.bfloat16)
    rows = codec.encode(x, 1)
    assert (rows.shape, rows.dtype, rows.device.type) == ((3, codec.row_bytes(75)), torch.uint8, "meta")
    back = codec.decode(rows, 75, torch.float16)
    assert (back.shape, back.dtype, back.device.type) == ((3, 75), torch.float16, "meta")
    total = codec.decode_sum(rows, 75, torch.float64)
    assert (total.shape, total.dtype) == ((75,), torch.float64)
    assert codec.decode_sum_encode(rows, 75, 1).shape == (codec.row_bytes(75),)
    payload = nc.encode(x, codec, seed=1)
    assert nc.decode(payload).shape == (3, 75)
    assert nc.decode(payload, out=x) is x


@pytest.mark.parametrize("name", CODECS)
def test_fake_tensors_give_the_shapes_of_real_ones(name: str) -> None:
    codec = CODECS[name]
    real = nc.encode(mixed(225).view(3, 75), codec, seed=1)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the table of levels is a real tensor
        fake = nc.encode(torch.empty(3, 75), codec, seed=1)
        back = nc.decode(fake)
    assert (fake.data.shape, fake.data.dtype) == (real.data.shape, torch.uint8)
    assert (back.shape, back.dtype, back.stride()) == ((3, 75), torch.float32, (75, 1))
    # A codec first used under a fake mode must not keep fake tables for later.
    assert torch.equal(nc.encode(mixed(225).view(3, 75), codec, seed=1).data, real.data)
