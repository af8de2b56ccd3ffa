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
    (Case("int4:block=row,scale=fp16", 1, BF16), 8, 4),
    (Case("int8", 1, BF16), 8, 2),
    (Case("int8:block=row", 1, FP16, torch.float32), 8, 3),
    (Case("int8:block=32,scale=fp16", 1, BF16), 4, 2),
    (Case("int8:block=128,scale=bf16", 1, FP16), 4, 2),
    (Case("nf4", 1, BF16), 4, 3),
    (Case("nf4:block=128,scale=fp16", 1, FP16, BF16), 4, 2),
    (Case("nf4:block=row,scale=e8m0", 1, BF16), 4, 2),
    (Case("apot4:block=64,scale=fp32", 1, BF16, torch.float32), 4, 2),
    (Case("pot4:block=256", 1, FP16), 2, 2),
    (Case("fp8_e4m3", 1, BF16), 8, 2),
    (Case("fp8_e4m3:scale=none", 1, FP16, FP16), 8, 2),
    (Case("fp8_e4m3:block=row,scale=bf16", 1, BF16, BF16), 4, 3),
    (Case("fp8_e4m3:block=128,scale=e8m0", 1, FP16), 8, 2),
]


def divided(case: Case, division: tuple[int, int], recipe: Recipe, n: int, k: int, gap: int) -> Ring:
    codes = direct_codes(recipe.format)
    assert codes is not None
    kind, bias = KINDS[case.dtype], -1 if case.bias is None else KINDS[case.bias]
    stride = layout(recipe.format, k).row_bytes + gap
    ring = divide(codes, recipe.format, n, k, stride, kind, bias, 2, *division, 1)
    assert ring is not None
    return ring


def launch(ring: Ring, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    out = torch.full((len(x), len(data)), torch.nan, dtype=x.dtype)
    launch_ring(ring, out, x, data, recipe, bias)
    return out


@pytest.mark.parametrize(("case", "parts", "stages"), CASES, ids=str)
def test_each_division_is_exact_where_sums_are_and_nan_stays_in_its_row(
    case: Case, parts: int, stages: int
) -> None:
    recipe = nc.codec(case.spec).recipe(CPU)

    def plan(n: int, k: int) -> Ring:
        return divided(case, (parts, stages), recipe, n, k, 32)

    def in_one_block(ring: Ring) -> Ring:
        return ring._replace(grid=1, shared=ring.shared + 80 * 4 * parts)

    wide = 2 * parts * (128 if recipe.format.bits == 4 else 64)
    longer = 3 if recipe.format.element == Element.INT else 2  # longer rows of levels have no exact sums
    sizes = ((1, wide), (17, longer * wide), (40, wide), (70, wide))
    hold(case, recipe, 0, plan, launch, in_one_block, sizes)
