"""Names, options and operations that cannot be: the type of the error, and what its message must say."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from cases import CODECS, mixed
from narrowcast import Codec
from narrowcast.codecs import Cast, Float8, Levels, NormalFloat, Sign, Uniform
from narrowcast.codecs.registry import codec_in_file
from narrowcast.errors import DtypeError, NarrowcastError, PayloadError, ShapeError, SpecError

BLOCKS = "a block is a multiple of 8 from 8 to 65536 elements"


def says(caught: pytest.ExceptionInfo[BaseException], *words: str) -> bool:
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    return True


# -- names ----------------------------------------------------------------------------------------------------------


def test_these_codecs_exist() -> None:
    assert nc.list_codecs() == [
        *["raw", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "sign"],
        *["int2", "int3", "int4", "int5", "int6", "int8"],
        *[f"apot{bits}" for bits in range(2, 9)],
        *[f"pot{bits}" for bits in range(2, 6)],
        "nf4",
    ]


def test_every_listed_name_is_a_codec_of_that_name() -> None:
    assert [nc.codec(name).name for name in nc.list_codecs()] == nc.list_codecs()
    plain = [name for name in nc.list_codecs() if not name.startswith("fp8")]
    assert [nc.codec(name).spec for name in plain] == plain


def test_the_table_of_tests_holds_every_codec() -> None:
    assert {codec.name for codec in CODECS.values()} == {*nc.list_codecs(), "levels"}


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        ("int4:block=64", Uniform(4)),
        (" int4 : block = 32 ", Uniform(4, block=32)),
        ("int8:block=row,scale=bf16", Uniform(8, block="row", scale="bf16")),
        ("int8:zero_point=true,stochastic=false", Uniform(8, zero_point=True)),
        ("sign:scale=fp32", Sign(scale="fp32")),
        ("fp8_e5m2:block=32,scale=e8m0", Float8("fp8_e5m2", block=32, scale="e8m0")),
        ("bf16", Cast("bf16")),
        ("nf4", NormalFloat()),
        ("levels:table=-1|0|1,block=8", Levels([-1, 0, 1], block=8)),
        ({"name": "int4", "block": 32}, Uniform(4, block=32)),
    ],
)
def test_a_spec_and_a_constructor_make_the_same_codec(spec: str | dict[str, object], made: Codec) -> None:
    assert nc.codec(spec) == made
    assert type(nc.codec(spec)) is type(made)


def test_defaults_are_not_written_and_options_come_in_one_order() -> None:
    assert nc.codec("int4:scale=bf16,block=64").spec == "int4"
    assert nc.codec("int8:stochastic=true,zero_point=true,scale=bf16,block=32").spec == (
        "int8:block=32,scale=bf16,zero_point=true,stochastic=true"
    )
    assert nc.codec("apot4:block=row,k=1").spec == "apot4:k=1,block=row"


@pytest.mark.parametrize(
    ("spec", "block", "scale"),
    [("int2", 64, "bf16"), ("int4", 64, "bf16"), ("int5", 128, "fp32"), ("int8", 128, "fp32"), ("nf4", 64, "bf16")],
)
def test_defaults_are_64_and_bf16_at_4_bits_and_below_else_128_and_fp32(spec: str, block: int, scale: str) -> None:
    assert nc.codec(spec) == nc.codec(f"{spec}:block={block},scale={scale}")
    assert nc.codec(spec).block == block


@pytest.mark.parametrize(
    ("name", "meant"), [("int44", "int4"), ("fp8_e4m4", "fp8_e4m3"), ("nf", "nf4"), ("bf61", "bf16"), ("INT4", "int4")]
)
def test_an_unknown_name_is_answered_with_the_nearest_and_with_all(name: str, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec(name)
    assert says(caught, repr(name), f"Did you mean {meant!r}?", *nc.list_codecs(), "levels")


@pytest.mark.parametrize("name", ["", "zzz", "int7", "pot6", "apot9", "int1"])
def test_a_name_that_does_not_exist_is_answered_with_all_that_do(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec(name)
    assert says(caught, repr(name), "does not exist", *nc.list_codecs())


@pytest.mark.parametrize("spec", [7, None, 4.0, ["int4"], ("int4",), b"int4"], ids=repr)
def test_what_is_no_spec_is_refused_with_an_example(spec: object) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec(spec)  # type: ignore[arg-type]
    assert says(caught, repr(spec), '"int4:block=64"')


@pytest.mark.parametrize("spec", [{}, {"block": 64}, {"name": 4}])
def test_a_mapping_without_a_name_is_refused_with_an_example(spec: dict[str, object]) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec(spec)
    assert says(caught, "name", '{"name": "int4", "block": 64}')


@pytest.mark.parametrize("spec", ["int4:block", "int4:block=", "int4:=64", "int4:64", "int4:block=64,block=32"])
def test_options_are_written_key_equals_value_once(spec: str) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec(spec)
    assert says(caught, repr(spec), "key=value", "once each")


def test_levels_needs_a_table() -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec("levels")
    assert says(caught, "table", '"levels:table=-1|0|1"')


def test_errors_are_caught_as_narrowcasts_and_as_builtins() -> None:
    assert SpecError.__bases__ == ShapeError.__bases__ == PayloadError.__bases__ == (NarrowcastError, ValueError)
    assert DtypeError.__bases__ == (NarrowcastError, TypeError)


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "option", "takes"),
    [
        ("int4:blocks=64", "blocks=64", "block, scale, zero_point, stochastic"),
        ("raw:block=64", "block=64", "takes no options"),
        ("bf16:scale=fp32", "scale='fp32'", "takes no options"),
        ("sign:zero_point=true", "zero_point=True", "takes block, scale"),
        ("nf4:stochastic=true", "stochastic=True", "takes block, scale"),
        ("fp8_e4m3:stochastic=true", "stochastic=True", "takes block, scale"),
        ("pot4:k=2", "k=2", "takes block, scale"),
        ("apot4:zero_point=true", "zero_point=True", "takes k, block, scale"),
        ("int4:name=int8", "name='int8'", "block, scale"),
    ],
)
def test_an_option_that_a_codec_does_not_take_is_answered_with_those_it_takes(
    spec: str, option: str, takes: str
) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec(spec)
    assert says(caught, option, repr(spec.partition(":")[0]), takes)


@pytest.mark.parametrize("name", ["int8", "int4", "sign", "nf4", "apot4", "fp8_e4m3"])
@pytest.mark.parametrize("block", [0, -1, -8, 4, 7, 12, 3.5, 64.0, True, False, "abc", "64 ", 10**9, 65544], ids=repr)
def test_a_block_that_cannot_be_is_refused(name: str, block: object) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec({"name": name, "block": block})
    assert says(caught, f"block={block!r}", repr(name), BLOCKS, f'"{name}:block=64"', f'"{name}:block=row"')


@pytest.mark.parametrize("text", ["0", "-1", "7", "3.5", "true", "abc", "1000000000", "1|2"])
def test_a_block_that_cannot_be_is_refused_in_a_spec_string_too(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec(f"int8:block={text}")
    assert says(caught, "block=", BLOCKS)


@pytest.mark.parametrize("block", [8, 16, 24, 40, 65536, "row"])
def test_blocks_that_can_be_are_taken(block: int | str) -> None:
    codec = nc.codec(f"int8:block={block}")
    assert codec.block == block
    assert nc.decode(nc.encode(mixed(100), codec)).shape == (100,)


@pytest.mark.parametrize("name", ["int8", "sign", "nf4", "apot4"])
@pytest.mark.parametrize("scale", ["fp8", "FP32", "", 32, True, False, 0, 1.5], ids=repr)
def test_a_scale_that_cannot_be_is_refused(name: str, scale: object) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec({"name": name, "scale": scale})
    assert says(caught, f"scale={scale!r}", repr(name), "fp32, bf16, fp16, e8m0", f'"{name}:scale=bf16"')


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_name_has_blocks_of_128_and_without_scales_it_is_a_plain_cast(name: str) -> None:
    assert nc.codec(name) == nc.codec(f"{name}:block=128") == nc.codec(f"{name}:block=128,scale=fp32")
    assert nc.codec(f"{name}:scale=bf16") == nc.codec(f"{name}:block=128,scale=bf16")
    assert nc.codec(f"{name}:scale=none").block is None
    with pytest.raises(SpecError) as caught:
        nc.codec(f"{name}:block=32,scale=none")
    assert says(caught, "block=32", name, "plain cast has no blocks", f'"{name}:block=32"', f'"{name}:scale=none"')


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_nothing_written_has_a_bare_fp8_name_which_in_a_file_is_the_old_plain_cast(name: str) -> None:
    for codec in (nc.codec(name), nc.codec(f"{name}:scale=none"), nc.codec(f"{name}:block=32")):
        assert codec.spec != name
        assert codec_in_file(codec.spec) == codec_in_file(codec.config()) == codec
    assert codec_in_file(name) == codec_in_file({"name": name}) == nc.codec(f"{name}:scale=none")
    assert codec_in_file("int8") == nc.codec("int8")


@pytest.mark.parametrize("option", ["zero_point", "stochastic"])
@pytest.mark.parametrize("value", [1, 0, "yes", 1.0], ids=repr)
def test_a_flag_is_true_or_false(option: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        nc.codec({"name": "int8", option: value})
    assert says(caught, f"{option}={value!r}", "'int8'", f'"{option}=true"')


# -- inputs ---------------------------------------------------------------------------------------------------------

NO_FLOATS = {
    "int64": torch.ones(4, dtype=torch.int64),
    "uint8": torch.ones(4, dtype=torch.uint8),
    "bool": torch.ones(4, dtype=torch.bool),
    "float8_e4m3fn": torch.ones(4).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("dtype", NO_FLOATS)
def test_tensors_that_are_not_float_are_refused_and_never_converted(dtype: str) -> None:
    x = NO_FLOATS[dtype]
    codec = nc.codec("int8")
    for argument, call in {
        "x": lambda: nc.encode(x, codec),
        "rows": lambda: codec.encode(x),
        "x:": lambda: codec.max_error(x),
        "own": lambda: codec.decode_sum(codec.encode(torch.ones(1, 4)), 4, own=x),
    }.items():
        with pytest.raises(DtypeError) as caught:
            call()
        assert says(caught, argument, "float32, bfloat16, float16 or float64", dtype, "x.float()")


def test_complex_tensors_are_told_to_encode_their_parts() -> None:
    with pytest.raises(DtypeError) as caught:
        nc.encode(torch.ones(4, dtype=torch.complex64), "int8")
    assert says(caught, "x:", "complex64", "x.real and x.imag")


@pytest.mark.parametrize("sparse", [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()], ids=["coo", "csr"])
def test_sparse_tensors_are_told_to_become_dense(sparse: torch.Tensor) -> None:
    with pytest.raises(DtypeError) as caught:
        nc.encode(sparse, "int8")
    assert says(caught, "x:", "dense", "x.to_dense()")


@pytest.mark.parametrize("thing", [[1.0], 1.0, None, "x", torch.ones(3).numpy()], ids=lambda t: type(t).__name__)
def test_what_is_no_tensor_is_refused(thing: object) -> None:
    for call in (lambda: nc.encode(thing, "int8"), lambda: nc.codec("int8").encode(thing)):  # type: ignore[arg-type]
        with pytest.raises(DtypeError) as caught:
            call()
        assert says(caught, "torch.Tensor", type(thing).__name__, "torch.as_tensor")


def test_rows_have_a_last_dimension() -> None:
    with pytest.raises(ShapeError, match="rows"):
        nc.codec("int8").encode(torch.tensor(1.0))


@pytest.mark.parametrize("seed", ["abc", 1.5, [1]], ids=repr)
def test_a_seed_is_an_integer(seed: object) -> None:
    with pytest.raises(NarrowcastError, match="seed"):
        nc.encode(torch.ones(4), "int8:stochastic=true", seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["int8", "raw", "nf4:block=row"])
@pytest.mark.parametrize("numel", [-1, -100])
def test_a_row_has_no_negative_size(spec: str, numel: int) -> None:
    codec = nc.codec(spec)
    with pytest.raises(ShapeError, match=f"numel={numel}"):
        codec.row_bytes(numel)
    with pytest.raises(ShapeError, match=f"numel={numel}"):
        codec.decode(torch.zeros(16, dtype=torch.uint8), numel)


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_rows_of_the_wrong_length_are_refused(codec: Codec) -> None:
    row = codec.encode(mixed(100), 1)
    wrong = {
        "cut": row[:-1],
        "cut by a line": row[:-16],
        "long": torch.cat([row, row.new_zeros(16)]),
        "empty": row[:0],
    }
    for name, data in wrong.items():
        for call in (codec.decode, lambda d, n: codec.decode_sum(d.unsqueeze(0), n)):
            with pytest.raises(PayloadError) as caught:
                call(data, 100)
            assert says(caught, "rows", "100 elements", str(row.numel()), repr(codec.spec), str(data.numel())), name


@pytest.mark.parametrize("data", [torch.zeros(144), torch.zeros(144, dtype=torch.int8), [0] * 144], ids=str)
def test_bytes_are_uint8(data: object) -> None:
    with pytest.raises(DtypeError) as caught:
        nc.codec("int8").decode(data, 128)  # type: ignore[arg-type]
    assert says(caught, "rows", "uint8", "encode()")


def test_bytes_without_a_dimension_are_refused() -> None:
    with pytest.raises(PayloadError, match="rows"):
        nc.codec("int8").decode(torch.zeros((), dtype=torch.uint8), 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.complex64, torch.float8_e5m2], ids=str)
def test_a_result_is_float(dtype: torch.dtype) -> None:
    codec = nc.codec("int8")
    rows = codec.encode(mixed(40).view(1, 40))
    for call in (codec.decode, codec.decode_sum):
        with pytest.raises(DtypeError) as caught:
            call(rows, 40, dtype)
        assert says(caught, "dtype", "float32, bfloat16, float16 or float64", str(dtype).removeprefix("torch."))


# -- sums -----------------------------------------------------------------------------------------------------------


def test_a_sum_takes_a_matrix_of_at_least_one_row() -> None:
    codec = nc.codec("int8")
    width = codec.row_bytes(40)
    for shape in ((width,), (0, width), (2, 2, width)):
        rows = torch.zeros(shape, dtype=torch.uint8)
        for call in (codec.decode_sum, codec.decode_sum_encode):
            with pytest.raises(ShapeError) as caught:
                call(rows, 40)
            assert says(caught, "rows", "[ranks, row_bytes]", str(shape))


@pytest.mark.parametrize("divisor", [0, -1, 2.5], ids=repr)
def test_a_sum_is_divided_by_a_whole_number_from_1(divisor: object) -> None:
    codec = nc.codec("int8")
    rows = codec.encode(mixed(80).view(2, 40))
    for call in (codec.decode_sum, codec.decode_sum_encode):
        with pytest.raises(NarrowcastError, match=f"divisor={divisor}"):
            call(rows, 40, divisor=divisor)


def test_own_must_fit() -> None:
    codec = nc.codec("int8")
    rows = codec.encode(mixed(80).view(2, 40))
    for own in (torch.zeros(39), torch.zeros(1, 40), torch.zeros(40, device="meta")):
        with pytest.raises(ShapeError) as caught:
            codec.decode_sum(rows, 40, own=own)
        assert says(caught, "own", "(40,)", "cpu", str(tuple(own.shape)), str(own.device))
    for rank in (-1, 2):
        with pytest.raises(ShapeError) as caught:
            codec.decode_sum(rows, 40, own=torch.zeros(40), own_rank=rank)
        assert says(caught, f"own_rank={rank}", "ranks 0 to 1")


# -- out ------------------------------------------------------------------------------------------------------------

FLOAT_OUTS = {
    "shape": (lambda: torch.full((39,), 7.0), ShapeError, ("out", "(40,)", "(39,)", "never resized")),
    "dimensions": (lambda: torch.full((1, 40), 7.0), ShapeError, ("out", "(40,)", "(1, 40)")),
    "dtype": (lambda: torch.full((40,), 7), DtypeError, ("out", "float32", "int64")),
    "device": (lambda: torch.empty(40, device="meta"), ShapeError, ("out", "meta", "cpu", "Allocate out on cpu")),
    "grad": (lambda: torch.full((40,), 7.0, requires_grad=True), ShapeError, ("out", "requires grad", "out.detach()")),
    "no tensor": (lambda: [7.0] * 40, DtypeError, ("out", "list")),
}


@pytest.mark.parametrize("wrong", FLOAT_OUTS)
@pytest.mark.parametrize("operation", ["payload", "decode", "decode_sum"])
def test_an_out_that_does_not_fit_is_refused_and_not_written(wrong: str, operation: str) -> None:
    make, error, words = FLOAT_OUTS[wrong]
    codec = nc.codec("int8")
    x = mixed(40)
    row = codec.encode(x)
    out = make()
    calls = {
        "payload": lambda: nc.decode(nc.encode(x, codec), out=out),
        "decode": lambda: codec.decode(row, 40, out=out),
        "decode_sum": lambda: codec.decode_sum(row.view(1, -1), 40, out=out),
    }
    with pytest.raises(error) as caught:
        calls[operation]()
    assert says(caught, *words)
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert bool((out.detach() == 7).all())


def test_an_out_for_bytes_that_does_not_fit_is_refused_and_not_written() -> None:
    codec = nc.codec("int8")
    x, rows = mixed(40), codec.encode(mixed(80).view(2, 40))
    width = rows.shape[1]
    for out, error, words in (
        (torch.full((width + 16,), 7, dtype=torch.uint8), ShapeError, ("out", f"({width},)", f"({width + 16},)")),
        (torch.full((width,), 7, dtype=torch.int8), DtypeError, ("out", "uint8", "int8")),
        (torch.empty(width, dtype=torch.uint8, device="meta"), ShapeError, ("out", "meta", "cpu")),
    ):
        for call in (lambda o=out: codec.encode(x, out=o), lambda o=out: codec.decode_sum_encode(rows, 40, out=o)):
            with pytest.raises(error) as caught:
                call()
            assert says(caught, *words)
            assert out.device.type == "meta" or bool((out == 7).all())


def test_out_is_not_written_when_another_argument_is_wrong() -> None:
    codec = nc.codec("int8")
    out = torch.full((40,), 7.0)
    rows = codec.encode(mixed(80).view(2, 40))
    for call in (
        lambda: codec.decode(rows[0, :-1], 40, out=out),
        lambda: codec.decode_sum(rows, 40, own=torch.zeros(3), out=out),
        lambda: codec.decode_sum(rows, 40, own=torch.zeros(40), own_rank=9, out=out),
        lambda: codec.decode_sum(rows, 40, divisor=0, out=out),
    ):
        with pytest.raises(NarrowcastError):
            call()
        assert bool((out == 7.0).all())


# -- which kernel ---------------------------------------------------------------------------------------------------


def test_which_kernel_names_what_runs(device: str) -> None:
    name = nc.which_kernel("int4", device)
    assert name in ("reference", "triton") or name.startswith("native/")
    with pytest.raises(SpecError):
        nc.which_kernel("int44", device)
