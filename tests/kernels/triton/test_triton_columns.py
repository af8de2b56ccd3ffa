"""Codes of rows, one column after another, in Triton: the reference's bits, for every kind of codec.

On a CUDA machine the kernels run there. Elsewhere Triton's interpreter runs them, in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

import narrowcast as nc
from narrowcast.codecs import row_scales
from narrowcast.kernels import reference
from narrowcast.kernels import triton as gpu
from narrowcast.kernels.contract import Reference
from narrowcast.kernels.layout import layout
from narrowcast.kernels.operators import Kernel
from narrowcast.nn.rounding.moments import Inputs
from processes import in_interpreter

CUDA = torch.cuda.is_available()
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if CUDA else "cpu")

pytest.importorskip("triton", reason="Triton is not installed")
here = pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
"""numpy, behind the interpreter, remarks on infinities that the kernels mean to have."""

SPECS = ("int4:block=64", "int3:block=32", "int8:block=row", "nf4", "apot4:block=24", "sign:block=32", "pot4")
SPECS += ("int4:block=64,zero_point=true", "fp8_e4m3", "int4:scale=e8m0", "int4:stochastic=true")
ROWS, NUMEL = 7, 96


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    found, why = gpu.load()
    assert found is not None, why
    return found


def grid_of(spec: str) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor], nc.Codec]:
    """A weight with zeros of both signs and numbers that overflow, its scales, and the blocks of shuffled columns."""
    generator = torch.Generator().manual_seed(len(spec))
    weight = torch.randn(ROWS, NUMEL, generator=generator)
    codec = nc.codec(spec)
    fields = codec.split(codec.encode_searched(weight), NUMEL)
    assert fields.scales is not None
    weight[1, 3], weight[1, 4], weight[2, 7], weight[3, 8], weight[4, 2] = 0.0, -0.0, 3e38, float("inf"), float("nan")
    order = torch.randperm(NUMEL, generator=generator)
    blocks = order // layout(codec.format, NUMEL).block_size
    return weight, (fields.scales.contiguous(), fields.zero_points, blocks), codec


def on_device(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same numbers, signs of zeros included; any NaN is as good as another."""
    one, other = torch.nan_to_num(found.cpu(), 1.5), torch.nan_to_num(expected, 1.5)
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@here
@pytest.mark.parametrize("spec", SPECS)
def test_columns_are_rounded_as_in_the_reference(kernel: Kernel, spec: str) -> None:
    weight, grid, codec = grid_of(spec)
    factor = torch.triu(torch.rand(NUMEL, NUMEL, generator=torch.Generator().manual_seed(1)) * 0.2 - 0.1)
    factor.diagonal().add_(1.0)
    codes, errors = reference.round_columns(weight.clone(), factor, *grid, codec.recipe(torch.device("cpu")))
    found = kernel.round_columns(*on_device(weight, factor, *grid), codec.recipe(DEVICE))  # type: ignore[arg-type]
    assert torch.equal(found[0].cpu(), codes)
    assert same_bits(found[1], errors)


@here
@pytest.mark.parametrize("spec", SPECS)
def test_codes_are_chosen_as_in_the_reference(kernel: Kernel, spec: str) -> None:
    weight, grid, codec = grid_of(spec)
    some = torch.randn(NUMEL, 2 * NUMEL, generator=torch.Generator().manual_seed(1))
    moments = some @ some.t() / len(some)
    values = torch.nan_to_num(weight, 0.0, 3e38)
    slope = (values * 0.1).roll(1, 0)
    changed = values.clone(), slope.clone()
    expected = reference.choose_columns(*changed, moments, *grid, codec.recipe(torch.device("cpu")))
    own = values.to(DEVICE, copy=True), slope.to(DEVICE, copy=True)
    found = kernel.choose_columns(*own, *on_device(moments, *grid), codec.recipe(DEVICE))  # type: ignore[arg-type]
    assert torch.equal(found[0].cpu(), expected[0])
    for one, other in zip((found[1], *own), (expected[1], *changed), strict=True):
        assert same_bits(one, other)


@here
@pytest.mark.parametrize("part", [slice(0, 1), slice(5, 64)])
def test_parts_of_a_matrix_are_rounded_where_they_lie(kernel: Kernel, part: slice) -> None:
    weight, (scales, zeros, blocks), codec = grid_of("int4:block=64")
    factor = torch.eye(NUMEL)
    recipes = codec.recipe(torch.device("cpu")), codec.recipe(DEVICE)
    expected = reference.round_columns(
        weight[:, part].clone(), factor[part, part], scales, zeros, blocks[part], recipes[0]
    )
    rows, square, *grid = on_device(weight, factor, scales, zeros, blocks)
    found = kernel.round_columns(rows[:, part], square[part, part], *grid[:2], grid[2][part], recipes[1])  # type: ignore[index,arg-type]
    assert torch.equal(found[0].cpu(), expected[0])
    assert same_bits(found[1], expected[1])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("spec", ["int4:block=64", "nf4", "int3:zero_point=true"])
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_on_a_gpu_gives_the_bytes_of_the_reference_there(
    monkeypatch: pytest.MonkeyPatch, spec: str, act_order: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 320, generator=generator).cuda()
    x = (torch.randn(512, 40, generator=generator) @ torch.randn(40, 320, generator=generator)).cuda()
    inputs, rounding = Inputs(x.t() @ x / len(x)), nc.nn.GPTQ(act_order=act_order)
    found = rounding.round_rows(weight.clone(), nc.codec(spec), inputs)
    monkeypatch.setattr(row_scales, "kernel_for", lambda device_type: Reference())
    assert torch.equal(found, rounding.round_rows(weight.clone(), nc.codec(spec), inputs))


@pytest.mark.skipif(CUDA or INTERPRETER, reason="the tests above run here")
def test_the_kernels_hold_in_the_interpreter() -> None:
    in_interpreter(__file__)
