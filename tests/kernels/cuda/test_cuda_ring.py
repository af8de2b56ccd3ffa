"""cuda/ring.cu on a CPU, as test_cuda_emulated.py runs the others: each kind of codes, block, scale and division."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_emulated import CPU, Case, emulator, hold, host

from narrowcast.kernels import reference
from narrowcast.kernels.cuda.formats import KINDS
from narrowcast.kernels.cuda.launch import launch_ring
from narrowcast.kernels.cuda.ring import Ring, direct_codes, divide
from narrowcast.kernels.layout import Recipe
from sum_bound import bound

__all__ = ["emulator", "host"]  # fixtures

BF16, FP16 = torch.bfloat16, torch.float16

# A case; warps that multiply, elements to a span, stages.
CASES = [
    (Case("int4:block=128", 1, BF16), 16, 2048, 3),
    (Case("int4:block=128,scale=e8m0", 1, FP16, FP16), 8, 4096, 2),
    (Case("int4", 1, BF16, torch.float32), 4, 512, 2),
    (Case("int4:block=32,scale=fp32", 1, FP16), 2, 512, 3),
    (Case("int4:block=256", 1, BF16, BF16), 4, 2048, 2),
    (Case("int4:block=row,scale=fp16", 1, BF16), 8, 1024, 4),
    (Case("int4:block=96", 1, BF16), 0, 0, 0),
    (Case("int8", 1, BF16), 16, 2048, 2),
    (Case("int8:block=row", 1, FP16, torch.float32), 8, 512, 3),
    (Case("int8:block=32,scale=fp16", 1, BF16), 4, 512, 2),
    (Case("int8:block=16,scale=bf16", 1, FP16), 4, 512, 2),
    (Case("nf4", 1, BF16), 16, 2048, 3),
    (Case("nf4:block=128,scale=fp16", 1, FP16, BF16), 8, 1024, 2),
    (Case("nf4:block=row,scale=e8m0", 1, BF16), 4, 512, 2),
    (Case("apot4:block=32,scale=fp32", 1, BF16, torch.float32), 8, 2048, 2),
    (Case("pot4:block=256", 1, FP16), 2, 2048, 2),
    (Case("fp8_e4m3", 1, BF16), 16, 2048, 2),
    (Case("fp8_e4m3:scale=none", 1, FP16, FP16), 8, 1024, 2),
    (Case("fp8_e4m3:block=row,scale=bf16", 1, BF16, BF16), 4, 512, 3),
    (Case("fp8_e4m3:block=128,scale=e8m0", 1, FP16), 8, 2048, 2),
]


def divided(case: Case, division: tuple[int, int, int], recipe: Recipe, n: int, k: int, processors: int = 2) -> Ring:
    codes = direct_codes(recipe.format)
    assert codes is not None
    kind, bias = KINDS[case.dtype], -1 if case.bias is None else KINDS[case.bias]
    ring = divide(codes, recipe.format, n, k, kind, bias, processors, *division, 1)
    assert ring is not None
    return ring


def launch(ring: Ring, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    out = torch.full((len(x), len(data)), torch.nan, dtype=x.dtype)
    launch_ring(ring, out, x, data, recipe, bias)
    return out


@pytest.mark.parametrize(("case", "parts", "span", "stages"), CASES, ids=str)
def test_each_division_is_exact_where_sums_are_and_nan_stays_in_its_row(
    case: Case, parts: int, span: int, stages: int
) -> None:
    recipe = nc.codec(case.spec).recipe(CPU)
    if not span:
        assert divide(1, recipe.format, 64, 4096, 2, -1, 2, 16, 2048, 0, 1) is None
        return

    def plan(n: int, k: int) -> Ring:
        return divided(case, (parts, span, stages), recipe, n, k)

    def in_one_block(ring: Ring) -> Ring:
        return ring._replace(grid=1, height=ring.height * ring.grid, shared=ring.shared + 80 * 4 * parts)

    hold(case, recipe, 40, plan, launch, in_one_block)
