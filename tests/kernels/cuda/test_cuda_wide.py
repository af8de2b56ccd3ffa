"""cuda/wide.cu and cuda/join.cu on a CPU, as test_cuda_emulated.py runs the others: each shape and division."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import narrowcast as nc

pytest.importorskip("triton", reason="Triton is not installed")

from emulated.device import Guarded
from test_cuda_emulated import CPU, Case, emulator, exact, hold, host
from test_cuda_emulated import whole as whole_numbers

from narrowcast.kernels.cuda import choose
from narrowcast.kernels.cuda.formats import KINDS, block_of, codes_of, fp8_of, scaling_of
from narrowcast.kernels.cuda.launch import launch_wide
from narrowcast.kernels.cuda.wide import Shape, Wide, choose_wide, divide
from narrowcast.kernels.layout import Recipe

__all__ = ["emulator", "host"]  # fixtures

BF16, FP16 = torch.bfloat16, torch.float16
ROOM = 227 << 10

# A case; its shape; tiles that are not divided along k, and parts of those that are.
CASES = [
    (Case("int4:block=128", 64, BF16), Shape(8, 128, 2), 0, 1),
    (Case("int4", 70, BF16, torch.float32), Shape(8, 128, 2), 1, 2),
    (Case("int4", 100, FP16, FP16), Shape(16, 64, 2), 0, 2),
    (Case("int4:block=128,scale=fp16", 128, FP16), Shape(16, 128, 2), 0, 1),
    (Case("int4:block=32,scale=fp32", 65, BF16, BF16), Shape(16, 128, 2), 1, 3),
    (Case("int4:block=row", 60, BF16, BF16), Shape(8, 64, 2), 0, 2),
    (Case("int8", 64, BF16), Shape(8, 64, 2), 0, 2),
    (Case("int8:block=row", 129, FP16, torch.float32), Shape(16, 64, 2), 1, 2),
    (Case("int8:block=64,scale=bf16", 90, BF16, FP16), Shape(16, 128, 2), 0, 1),
    (Case("int8:block=128,scale=fp32", 20, FP16), Shape(8, 128, 2), 0, 4),
    (Case("int8:block=256,scale=e8m0", 256, BF16), Shape(32, 64, 2), 0, 2),
    (Case("nf4", 77, BF16, BF16), Shape(16, 64, 2), 0, 2),
    (Case("nf4:block=128,scale=fp16", 130, FP16), Shape(8, 64, 2), 2, 2),
    (Case("nf4:block=row", 33, BF16), Shape(8, 64, 2), 0, 1),
    (Case("apot4", 64, BF16, torch.float32), Shape(16, 64, 2), 0, 2),
    (Case("int4", 140, BF16), Shape(16, 128, 3), 1, 2),
    (Case("nf4:block=32,scale=e8m0", 40, FP16), Shape(8, 128, 3), 0, 3),
    (Case("fp8_e4m3", 128, BF16), Shape(16, 64, 2), 0, 1),
    (Case("fp8_e4m3:scale=none", 10, FP16, FP16), Shape(8, 64, 2), 0, 2),
    (Case("fp8_e5m2:block=64,scale=bf16", 64, BF16), Shape(8, 128, 2), 1, 2),
]


def divided(case: Case, shape: Shape, whole: int, parts: int, recipe: Recipe, n: int, k: int) -> Wide:
    codes, block = codes_of(recipe.format), block_of(recipe.format, k)
    assert codes is not None
    kind, bias = KINDS[case.dtype], -1 if case.bias is None else KINDS[case.bias]
    common = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": int(recipe.format.scale), "BLOCK": block, "UNROLL": 1}
    common |= {"SCALING": scaling_of(recipe, case.dtype, k), "FP8": fp8_of(recipe.format)}
    tiles = -(-n // shape.height) * -(-case.batch // shape.width)
    found = divide(common, shape, min(whole, tiles), parts, case.batch, n, k, 2, ROOM)
    assert found is not None
    return found


def launch(wide: Wide, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    out = torch.full((len(x), len(data)), torch.nan, dtype=x.dtype)
    launch_wide(wide, out, x, data, recipe, bias)
    return out


@pytest.mark.parametrize(("case", "shape", "whole", "parts"), CASES, ids=str)
def test_each_shape_is_exact_where_sums_are_and_nan_stays_in_its_row(
    case: Case, shape: Shape, whole: int, parts: int
) -> None:
    recipe = nc.codec(case.spec).recipe(CPU)

    def plan(n: int, k: int) -> Wide:
        return divided(case, shape, whole, parts, recipe, n, k)

    sizes = ((8, 512), (136, 1024), (264, 512), (72, 1024))
    hold(case, recipe, 0, plan, launch, lambda wide: wide._replace(grid=1), sizes)


@pytest.mark.parametrize(("spec", "batch"), [("int4", 100), ("int8:block=row", 130)])
def test_a_call_of_many_rows_is_launched_as_planned(spec: str, batch: int) -> None:
    recipe = nc.codec(spec).recipe(CPU)
    x, data, bias = whole_numbers(Case(spec, batch, BF16, torch.float32), recipe, 40, 512)
    x, data = Guarded(x).tensor, Guarded(data).tensor  # aligned as CUDA's memory is
    out = torch.full((batch, 40), torch.nan, dtype=BF16)
    assert choose.wide_of(x, data, recipe, bias) is not None
    assert choose.linear(out, x, data, recipe, bias)
    assert torch.equal(out, exact(x, data, recipe, bias))


def test_rows_of_x_that_are_one_and_the_same_are_multiplied() -> None:
    recipe = nc.codec("int4").recipe(CPU)
    x, data, bias = whole_numbers(Case("int4", 1, BF16, torch.float32), recipe, 40, 512)
    x, data = Guarded(x).tensor.expand(50, 512), Guarded(data).tensor
    out = torch.full((50, 40), torch.nan, dtype=BF16)
    assert choose.linear(out, x, data, recipe, bias)
    assert torch.equal(out, exact(x, data, recipe, bias))


@pytest.mark.parametrize("batch", [41, 64, 100, 129, 256, 4096])
@pytest.mark.parametrize("spec", ["int8:block=row", "int8", "int4:block=128", "int4", "nf4", "fp8_e4m3"])
def test_every_layer_of_a_model_has_a_plan_that_fits(spec: str, batch: int) -> None:
    recipe = nc.codec(spec).recipe(CPU)
    codes = codes_of(recipe.format)
    assert codes is not None
    held = 32 << 10 if codes >= 2 and not fp8_of(recipe.format) else 0
    for n, k in ((4096, 4096), (12288, 4096), (22016, 4096), (32000, 4096), (4096, 11008), (8192, 28672), (1024, 8192)):
        block, scaling = block_of(recipe.format, k), scaling_of(recipe, BF16, k)
        wide = choose_wide(
            codes, block, int(recipe.format.scale), scaling, fp8_of(recipe.format), batch, n, k, 2, -1, 132, ROOM
        )
        assert wide is not None
        assert wide.shared + held <= ROOM
        assert wide.columns * wide.shape.width >= batch
        assert wide.tiles == wide.columns * -(-n // wide.shape.height)
        assert wide.grid <= wide.whole + (wide.tiles - wide.whole) * wide.parts


@pytest.mark.parametrize(("n", "k", "kind"), [(4095, 4096, 2), (4096, 4096 + 32, 2), (4096, 4096, 0)])
def test_what_wide_cannot_do_is_left_to_others(n: int, k: int, kind: int) -> None:
    assert choose_wide(1, 64, 2, 1, 0, 100, n, k, kind, -1, 132, ROOM) is None
