"""cuda/ring.cu on a CPU, as test_cuda_emulated.py runs the others: each kind of codes, block, scale and division."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc

pytest.importorskip("triton", reason="Triton is not installed")

from emulated.device import Guarded
from test_cuda_emulated import CPU, Case, emulator, exact, hold, host, whole

from narrowcast.kernels import reference
from narrowcast.kernels.cuda import choose
from narrowcast.kernels.cuda.formats import KINDS
from narrowcast.kernels.cuda.launch import launch_ring
from narrowcast.kernels.cuda.ring import Division, Ring, choose_ring, divide
from narrowcast.kernels.early import weights_written_long_ago
from narrowcast.kernels.layout import Element, Recipe, layout
from sum_bound import bound

__all__ = ["emulator", "host"]  # fixtures

BF16, FP16 = torch.bfloat16, torch.float16

# A case; warps that multiply, stages.
CASES = [
    (Case("int4:block=128", 1, BF16), 16, 3),
    (Case("int4:block=128,scale=e8m0", 1, FP16, FP16), 8, 2),
    (Case("int4", 1, BF16, torch.float32), 4, 2),
    (Case("int4:block=64,scale=fp32", 1, FP16), 2, 3),
    (Case("int4:block=256", 1, BF16, BF16), 4, 2),
    (Case("int8", 1, BF16), 8, 2),
    (Case("int8:block=64,scale=fp32", 1, FP16, torch.float32), 8, 3),
    (Case("int8:block=32,scale=fp16", 1, BF16), 4, 2),
    (Case("int8:block=128,scale=bf16", 1, FP16), 4, 2),
    (Case("nf4", 1, BF16), 4, 3),
    (Case("nf4:block=128,scale=fp16", 1, FP16, BF16), 4, 2),
    (Case("nf4:block=64,scale=e8m0", 1, BF16), 4, 2),
    (Case("apot4:block=64,scale=fp32", 1, BF16, torch.float32), 4, 2),
    (Case("pot4:block=256", 1, FP16), 2, 2),
    (Case("fp8_e4m3", 1, BF16), 8, 2),
    (Case("fp8_e4m3:scale=none", 1, FP16, FP16), 8, 2),
    (Case("fp8_e4m3:block=32,scale=bf16", 1, BF16, BF16), 4, 3),
    (Case("fp8_e4m3:block=128,scale=e8m0", 1, FP16), 8, 2),
]


def divided(case: Case, division: tuple[int, int], recipe: Recipe, n: int, k: int, gap: int) -> Ring:
    kind, bias = KINDS[case.dtype], -1 if case.bias is None else KINDS[case.bias]
    stride = layout(recipe.format, k).row_bytes + gap
    parts, stages = division
    ring = divide(recipe.format, n, k, stride, kind, bias, 2, Division(parts, 1, 1), stages)
    assert ring is not None
    return ring


def launch(ring: Ring, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    out = torch.full((len(x), len(data)), torch.nan, dtype=x.dtype)
    launch_ring(ring, out, x, data, recipe, bias)
    return out


@pytest.mark.parametrize(("spec", "early"), [("int4", False), ("int8", True), ("nf4", True), ("fp8_e4m3", True)])
def test_in_a_decoder_int4_is_left_to_others(spec: str, early: bool) -> None:
    recipe = nc.codec(spec).recipe(CPU)
    x, data, bias = whole(Case(spec, 1, BF16), recipe, 40, 4096)
    x, data = Guarded(x).tensor, Guarded(data).tensor
    assert choose.ring_of(x, data, recipe, bias) is not None
    with weights_written_long_ago():
        assert (choose.ring_of(x, data, recipe, bias) is not None) == early


@pytest.mark.parametrize(("case", "parts", "stages"), CASES, ids=str)
def test_each_division_is_exact_where_sums_are_and_nan_stays_in_its_row(case: Case, parts: int, stages: int) -> None:
    recipe = nc.codec(case.spec).recipe(CPU)

    def plan(n: int, k: int) -> Ring:
        return divided(case, (parts, stages), recipe, n, k, 32)

    def in_one_block(ring: Ring) -> Ring:
        return ring._replace(grid=1, shared=ring.shared + 80 * 4 * parts)

    wide = 2 * parts * (128 if recipe.format.bits == 4 else 64)
    longer = 3 if recipe.format.element == Element.INT else 2  # longer rows of levels have no exact sums
    sizes = ((1, wide), (17, longer * wide), (40, wide), (70, wide))
    hold(case, recipe, 0, plan, launch, in_one_block, sizes)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("spec", ["int4", "int8", "nf4", "apot4", "fp8_e4m3", "fp8_e4m3:scale=none"])
def test_each_code_is_what_the_reference_says(spec: str, dtype: torch.dtype) -> None:
    """Row i has byte i everywhere, so that one code, or two, stand at every place."""
    recipe = nc.codec(spec).recipe(CPU)
    k = 2048 if recipe.format.bits == 4 else 1024
    data = reference.encode(torch.randn(256, k, generator=torch.Generator().manual_seed(0)), recipe, 0)
    data[:, : k * recipe.format.bits // 8] = torch.arange(256, dtype=torch.uint8)[:, None]
    x = torch.randn(1, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = launch(divided(Case(spec, 1, dtype), (8, 0), recipe, 256, k, 0), x, data, recipe, None)
    right, allowed = bound(x, reference.decode(data, k, torch.float64, recipe), None)
    assert torch.equal(y.isnan(), right.isnan())
    assert bool(((y.double() - right).abs() <= allowed)[~right.isnan()].all())


def test_a_call_of_one_row_is_launched_as_planned() -> None:
    recipe = nc.codec("int8").recipe(CPU)
    x, data, bias = whole(Case("int8", 1, BF16, torch.float32), recipe, 21, 4096)
    x, data = Guarded(x).tensor, Guarded(data).tensor  # aligned as CUDA's memory is
    out = torch.full((1, 21), torch.nan, dtype=BF16)
    assert choose.ring_of(x, data, recipe, bias) is not None
    assert choose.linear(out, x, data, recipe, bias)
    assert torch.equal(out, exact(x, data, recipe, bias))


@pytest.mark.parametrize("spec", ["int4:block=128", "int4", "nf4", "apot4", "fp8_e4m3", "fp8_e4m3:scale=none", "int8"])
@pytest.mark.parametrize(("n", "k"), [(1, 4096), (4096, 4096), (22016, 4096), (128256, 4096), (8192, 8192)])
def test_layers_with_rows_of_4096_to_8192_have_a_plan_that_fits(spec: str, n: int, k: int) -> None:
    format = nc.codec(spec).recipe(CPU).format
    ring = choose_ring(format, n, k, layout(format, k).row_bytes, 2, -1, 132)
    assert ring is not None
    defines = dict(ring.defines)
    assert ring.shared <= 227 << 10
    assert defines["RESIDENT"] * (ring.shared + 1024) <= 228 << 10
    assert defines["EACH"] * defines["KS"] * 2 * (128 if format.bits == 4 else 64) == k


@pytest.mark.parametrize(
    ("spec", "k", "gap", "kind"),
    [
        ("int4", 4096, 0, 0),  # x in fp32
        ("int4", 4096 + 128, 0, 2),  # half a pair of chunks
        ("int4", 5120, 0, 2),  # pairs that warps cannot share alike
        ("int8", 16384, 0, 2),  # not timed
        ("int8", 2048, 0, 2),
        ("int8:block=row", 4096, 0, 2),
        ("int4:block=96", 4096, 0, 2),  # chunks with parts of blocks
        ("int4:block=32", 4096, 0, 2),  # four blocks in a chunk
        ("int8", 4096, 4096, 2),  # rows far apart
        ("int8", 4096, -16, 2),  # rows that overlap
        ("fp8_e5m2", 4096, 0, 2),
        ("int6", 4096, 0, 2),
    ],
)
def test_what_it_is_not_made_for_has_no_plan(spec: str, k: int, gap: int, kind: int) -> None:
    format = nc.codec(spec).recipe(CPU).format
    assert choose_ring(format, 4096, k, layout(format, k).row_bytes + gap, kind, -1, 132) is None
