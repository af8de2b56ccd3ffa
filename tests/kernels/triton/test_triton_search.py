"""Searched scales in Triton: the reference's bytes, for every codec and for blocks of any size.

On a CUDA machine the kernels run there. Elsewhere Triton's interpreter runs them, in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

import narrowcast as nc
from cases import CODECS, mixed
from narrowcast.kernels import triton as gpu
from narrowcast.kernels.operators import Kernel
from narrowcast.kernels.reference import search
from processes import in_interpreter

CUDA = torch.cuda.is_available()
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")

pytest.importorskip("triton", reason="Triton is not installed")
here = pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
"""numpy, behind the interpreter, remarks on infinities that the kernels mean to have."""

SOME = ("int8", "int4", "int3", "int2", "sign", "nf4", "apot4", "fp8_e4m3", "fp8_e5m2", "raw", "int8:block=512")
SOME += ("int8:zero_point=true", "int5:block=32,zero_point=true", "int8:block=24,scale=e8m0,zero_point=true")
SOME += ("int4:block=row", "int4:stochastic=true", "int6:block=24,scale=fp16", "sign:block=row,scale=e8m0")
EVERY = CODECS if CUDA else SOME


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    found, why = gpu.load()
    assert found is not None, why
    return found


def check(kernel: Kernel, codec: nc.Codec, x: torch.Tensor, importance: torch.Tensor | None, gain: float = 0.0) -> None:
    """The kernel gives the bytes that the reference gives on the CPU."""
    expected = search.encode_searched(x, importance, gain, codec.recipe(torch.device("cpu")))
    out = torch.full_like(expected, 7, device=DEVICE)
    weights = None if importance is None else importance.to(DEVICE)
    kernel.encode_searched(out, x.to(DEVICE), weights, gain, codec.recipe(DEVICE))
    differing = (out.cpu() != expected).any(1).nonzero().flatten().tolist()
    assert not differing, f"{codec.spec}: rows {differing} differ"


@here
@pytest.mark.parametrize("numel", [1, 64, 200] if CUDA else [200])
@pytest.mark.parametrize("spec", EVERY)
def test_codecs_of_every_kind_have_the_bytes_of_the_reference(kernel: Kernel, spec: str, numel: int) -> None:
    x = mixed(4 * numel, seed=numel).view(4, numel)
    x[1, 0], x[2] = float("nan"), 0.0
    check(kernel, CODECS[spec], x, torch.rand(numel, generator=torch.Generator().manual_seed(3)) + 0.1, gain=3.0)
    if CUDA or spec in ("int4", "nf4"):
        check(kernel, CODECS[spec], x, None)


@here
@pytest.mark.parametrize(
    "spec", ["int4:block=800", "int3:block=row", "sign:block=4096", "nf4:block=row", "int8:block=row,zero_point=true"]
)
def test_blocks_of_many_pieces(kernel: Kernel, spec: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (1000, 9000) if CUDA or spec == "int3:block=row" else (1000,):  # 9000: more than a program encodes
        x = torch.randn(3, numel, generator=generator)
        x[1] *= 1e30  # squares overflow: the scale stays that of nearest rounding
        check(kernel, nc.codec(spec), x, torch.rand(numel, generator=generator), gain=3)


@here
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_of_any_dtype_and_stride(kernel: Kernel, dtype: torch.dtype) -> None:
    x = torch.randn(70, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    for rows in (x.t(), x[:, 1:4]):
        check(kernel, nc.codec("int4:block=32"), rows, None)


@here
def test_nothing_to_encode(kernel: Kernel) -> None:
    codec = nc.codec("int4")
    for shape in ((0, 64), (2, 0)):
        out = torch.empty(shape[0], codec.row_bytes(shape[1]), dtype=torch.uint8, device=DEVICE)
        kernel.encode_searched(out, torch.empty(shape, device=DEVICE), None, 0.0, codec.recipe(DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("spec", ["int8", "int4:block=64", "int3", "int4:zero_point=true", "nf4", "apot4:block=row"])
def test_quantize_gives_the_bytes_of_the_cpu(spec: str) -> None:
    model = torch.nn.Linear(1024, 512)
    other = torch.nn.Linear(1024, 512)
    other.load_state_dict(model.state_dict())
    nc.quantize_(model, spec, rounding="search")
    nc.quantize_(other.cuda(), spec, rounding="search")
    assert nc.which_kernel(spec, "cuda", operation="encode_searched") == "triton"
    assert torch.equal(model.state_dict()["weight"], other.state_dict()["weight"].cpu())


@pytest.mark.skipif(CUDA or INTERPRETER, reason="they run in this process")
def test_in_the_interpreter() -> None:
    assert "." * len(SOME) in in_interpreter(__file__)
