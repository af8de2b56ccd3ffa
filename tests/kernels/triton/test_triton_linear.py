"""Linear on encoded rows on a GPU: within the bound of fp32 sums, for every format, batch and dtype.

On a CUDA machine both kernels/cuda and Triton run; elsewhere Triton alone, in its interpreter, in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

import narrowcast as nc
from cases import CODECS
from narrowcast.kernels import reference, triton
from narrowcast.kernels.early import weights_written_long_ago
from narrowcast.kernels.operators import Kernel
from processes import in_interpreter
from sum_bound import bound

CUDA = torch.cuda.is_available()
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

pytest.importorskip("triton", reason="Triton is not installed")
if not (CUDA or INTERPRETER):
    # One test here, which runs all of this file in the interpreter.
    CODECS = {}

EVERY = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.spec[:48])
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
here = pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
"""numpy, behind the interpreter, remarks on infinities that the kernels mean to have."""


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    found, why = triton.load()
    assert found is not None, why
    return found


def assert_close(
    kernel: Kernel, codec: nc.Codec, rows: int, numel: int, batch: int, dtype: torch.dtype, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * numel + batch)
    recipe = codec.recipe(torch.device("cpu"))
    data = reference.encode(torch.randn(rows, numel, generator=generator), recipe, 0)
    x = torch.randn(batch, numel, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype) if biased else None
    exact, allowed = bound(x, reference.decode(data, numel, torch.float64, recipe), bias)
    out = torch.full((batch, rows), torch.nan, dtype=dtype, device=DEVICE)
    mine = None if bias is None else bias.to(DEVICE)
    assert kernel.linear(out, x.to(DEVICE), data.to(DEVICE), codec.recipe(torch.device(DEVICE)), mine)
    assert ((out.cpu().double() - exact).abs() <= allowed).all()


@pytest.mark.skipif(CUDA or INTERPRETER, reason="the tests below run here themselves")
def test_triton_multiplies_within_the_bound_in_its_interpreter() -> None:
    in_interpreter(__file__)


@EVERY
def test_every_codec_multiplies_within_the_bound(kernel: Kernel, codec: nc.Codec) -> None:
    for dtype, (rows, numel, batch, biased) in zip(
        FLOATS * 2,
        (
            (3, 100, 1, True),
            (17, 264, 5, False),
            (18, 65, 33, True),
            (5, 1, 2, True),
            (33, 128, 1, False),
            (2, 7, 64, True),
        ),
        strict=True,
    ):
        assert_close(kernel, codec, rows, numel, batch, dtype, biased)


@here
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", ["int8:block=row", "int8", "int4", "int4:block=128", "nf4", "apot4", "fp8_e4m3"])
@pytest.mark.parametrize("batch", [1, 3, 8, 16, 17, *((32, 33, 64) if CUDA else ())])
def test_rows_of_many_blocks_multiply_within_the_bound(
    kernel: Kernel, spec: str, batch: int, dtype: torch.dtype
) -> None:
    assert_close(kernel, nc.codec(spec), 21, 1056, batch, dtype, True)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["int8:block=row", "int8", "int4", "int4:block=128", "nf4", "apot4", "fp8_e4m3"])
@pytest.mark.parametrize("batch", [41, 128, 200, 1000])
def test_many_rows_of_x_multiply_within_the_bound(kernel: Kernel, spec: str, batch: int, dtype: torch.dtype) -> None:
    for rows, numel in ((264, 1024), (1000, 2048), (4096, 4096)):
        assert_close(kernel, nc.codec(spec), rows, numel, batch, dtype, rows == 1000)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
@pytest.mark.parametrize("spec", ["int8", "int4:block=128", "nf4", "fp8_e4m3"])
@pytest.mark.parametrize("batch", [1, 100, 300])
def test_weights_that_are_read_early_give_the_same_bits(spec: str, batch: int) -> None:
    codec = nc.codec(spec)
    data = codec.encode(torch.randn(4096, 4096, device="cuda"))
    x = torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16)
    with weights_written_long_ago():
        first = codec.linear(x, data)
        for _ in range(20):  # of an x that the kernel before has just written
            again = codec.linear(x * 1, data)
            assert torch.equal(again, first)
    if batch > 1:  # one row goes by other kernels there
        assert torch.equal(codec.linear(x, data), first)


@here
def test_rows_of_a_larger_matrix_and_a_strided_x_are_read_where_they_lie(kernel: Kernel) -> None:
    codec = nc.codec("int4:block=32")
    recipe = codec.recipe(torch.device(DEVICE))
    every = reference.encode(torch.randn(40, 96), codec.recipe(torch.device("cpu")), 0).to(DEVICE)
    wide = torch.randn(4, 200, device=DEVICE)
    out, plain = torch.empty(4, 16, device=DEVICE), torch.empty(4, 16, device=DEVICE)
    assert kernel.linear(out, wide[:, 8:104], every[10:26], recipe, None)
    assert kernel.linear(plain, wide[:, 8:104].clone(), every[10:26].clone(), recipe, None)
    assert torch.equal(out, plain)


@here
def test_a_block_that_is_not_finite_spoils_its_own_output_alone(kernel: Kernel) -> None:
    codec = nc.codec("int8:block=32")
    weight = torch.randn(20, 256)
    weight[7, 40] = torch.inf
    data = reference.encode(weight, codec.recipe(torch.device("cpu")), 0).to(DEVICE)
    for batch in (1, 4):
        out = torch.empty(batch, 20, device=DEVICE)
        assert kernel.linear(out, torch.ones(batch, 256, device=DEVICE), data, codec.recipe(torch.device(DEVICE)), None)
        assert out[:, 7].isnan().all()
        assert out[:, torch.arange(20) != 7].isfinite().all()


@here
@pytest.mark.untried
def test_rows_of_x_may_lie_further_apart_than_32_bits_count(kernel: Kernel) -> None:
    """As the last positions of five sequences do, which an output matrix is multiplied by."""
    codec, apart = nc.codec("int3"), 2**31 // 4 + 64
    x = torch.empty(4 * apart + 64, dtype=torch.float16, device=DEVICE).as_strided((5, 64), (apart, 1))
    x.copy_(torch.arange(5)[:, None].expand(5, 64))
    data, recipe = codec.encode(torch.ones(16, 64, device=DEVICE)), codec.recipe(torch.device(DEVICE))
    out = torch.empty(5, 16, dtype=torch.float16, device=DEVICE)
    assert kernel.linear(out, x, data, recipe, None)
    assert torch.equal(out, (x.double() @ codec.decode(data, 64).double().t()).to(torch.float16))


@here
@pytest.mark.untried
@pytest.mark.parametrize("spec", ["int8", "int4:block=row", "nf4", "fp8_e4m3:scale=none", "sign"])
def test_rows_without_elements_are_left_to_the_caller(kernel: Kernel, spec: str) -> None:
    recipe = nc.codec(spec).recipe(torch.device(DEVICE))
    data = torch.empty(4, 0, dtype=torch.uint8, device=DEVICE)
    for batch in (1, 50):
        out, x = (torch.empty(batch, columns, dtype=torch.float16, device=DEVICE) for columns in (4, 0))
        assert not kernel.linear(out, x, data, recipe, None)


@here
def test_large_batches_and_fp64_are_left_to_the_caller(kernel: Kernel) -> None:
    codec = nc.codec("int8")
    recipe = codec.recipe(torch.device(DEVICE))
    data = torch.zeros(4, codec.row_bytes(32), dtype=torch.uint8, device=DEVICE)
    for x in (torch.ones(65, 32, device=DEVICE), torch.ones(1, 32, dtype=torch.float64, device=DEVICE)):
        assert not kernel.linear(torch.empty(len(x), 4, dtype=x.dtype, device=DEVICE), x, data, recipe, None)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("batch", [1, 128, 200])
@pytest.mark.parametrize("spec", ["int8", "int4", "nf4", "int3"])
def test_the_same_call_gives_the_same_bits_also_from_a_graph(spec: str, batch: int) -> None:
    codec = nc.codec(spec)
    data = codec.encode(torch.randn(1000, 2048, device="cuda"))
    x = torch.randn(batch, 2048, device="cuda", dtype=torch.bfloat16)
    first = codec.linear(x, data)
    assert all(torch.equal(codec.linear(x, data), first) for _ in range(20))
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(first)
    with torch.cuda.graph(graph):
        out.copy_(codec.linear(x, data))
    graph.replay()
    assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
@pytest.mark.untried
@pytest.mark.parametrize(("spec", "dtype"), [("nf4", torch.float16), ("apot4:scale=fp32", torch.bfloat16)])
def test_tables_that_a_graph_makes_are_its_own(spec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fp32: neither scales are numbers of x's dtype. Calls before the first replay must not read them."""
    from narrowcast.kernels.cuda import formats

    codec, x = nc.codec(spec), torch.randn(64, 512, device="cuda", dtype=dtype)
    data = codec.encode(torch.randn(256, 512, device="cuda"))
    first = codec.linear(x, data)  # compiles
    monkeypatch.setattr(formats, "_tables", {})
    one = codec.linear(x[:1], data)  # by another kernel, and with other tables
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(first)
    with torch.cuda.graph(graph):
        out.copy_(codec.linear(x, data))
    assert torch.equal(codec.linear(x, data), first)
    assert torch.equal(codec.linear(x[:1], data), one)
    out.zero_()
    graph.replay()
    assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("batch", [3, 200])
def test_it_compiles_whole(batch: int) -> None:
    codec = nc.codec("int4")
    data = codec.encode(torch.randn(256, 512, device="cuda"))
    x = torch.randn(batch, 512, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: codec.linear(x * 2, data) + 1, fullgraph=True)
    assert torch.equal(compiled(x), codec.linear(x * 2, data) + 1)
