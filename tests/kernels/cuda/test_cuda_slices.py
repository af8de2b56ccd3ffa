"""cuda/slices.cu and cuda/total.cu on a CPU, as test_cuda_emulated.py runs the others: each division of the work."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import narrowcast as nc

pytest.importorskip("triton", reason="Triton is not installed")

from test_cuda_emulated import CPU, Case, emulator, hold, host

from narrowcast.kernels.cuda.formats import KINDS, block_of, codes_of
from narrowcast.kernels.cuda.launch import launch_slices
from narrowcast.kernels.cuda.slices import Slices, choose_slices, divide, fits
from narrowcast.kernels.layout import Recipe

__all__ = ["emulator", "host"]  # fixtures

BF16, FP16 = torch.bfloat16, torch.float16


class Division(NamedTuple):
    """What `divide` is told of a case: warps that multiply together, sixteens of rows, warps, stages, slices of x."""

    team: int
    tall: int
    warps: int
    stages: int
    parts: int


CASES = [
    (Case("int8:block=row", 17, BF16), Division(1, 2, 2, 3, 1)),
    (Case("int8", 33, FP16, torch.float32), Division(1, 1, 4, 4, 2)),
    (Case("int8:block=32", 64, BF16, BF16), Division(1, 2, 2, 2, 3)),
    (Case("int8:block=64,scale=fp32", 9, FP16), Division(1, 2, 3, 3, 2)),
    (Case("int4", 24, BF16, FP16), Division(1, 2, 2, 3, 2)),
    (Case("int4:block=32,scale=fp32", 5, FP16), Division(1, 1, 2, 4, 1)),
    (Case("int4:block=256,scale=e8m0", 20, BF16), Division(1, 2, 2, 3, 3)),
    (Case("nf4:block=128,scale=fp16", 32, FP16), Division(1, 2, 2, 3, 4)),
    (Case("fp8_e4m3:block=128", 17, BF16), Division(1, 1, 2, 3, 2)),
    (Case("int8:block=row", 64, BF16, torch.float32), Division(4, 1, 8, 3, 2)),
    (Case("int8", 33, BF16), Division(4, 2, 4, 3, 3)),
    (Case("int8:block=32,scale=e8m0", 40, FP16, FP16), Division(4, 1, 4, 4, 2)),
    (Case("int8:block=192", 16, BF16), Division(4, 2, 8, 2, 1)),
    (Case("int4", 64, FP16), Division(4, 1, 8, 3, 2)),
    (Case("int4:block=32,scale=fp32", 32, BF16, BF16), Division(4, 2, 4, 3, 3)),
    (Case("int4:block=128", 50, BF16), Division(4, 1, 4, 3, 2)),
    (Case("nf4", 17, BF16, torch.float32), Division(4, 1, 4, 3, 4)),
    (Case("fp8_e5m2", 48, FP16), Division(4, 2, 4, 3, 2)),
]


def divided(case: Case, division: Division, recipe: Recipe, n: int, k: int) -> Slices:
    """For two blocks to each slice, where there are rows for them."""
    codes, block = codes_of(recipe.format), block_of(recipe.format, k)
    assert codes is not None
    assert fits(codes, block)
    kind, bias = KINDS[case.dtype], -1 if case.bias is None else KINDS[case.bias]
    scale, tiles = int(recipe.format.scale), -(-case.batch // 8)
    common = {"CODES": codes, "X": kind, "BIAS": bias, "SCALE": scale, "BLOCK": block, "UNROLL": 1}
    if division.team == 4:
        tiles = next(count for count in (2, 4, 8) if tiles <= count)
    team, *rest, parts = division
    found = divide(common, team, tiles, *rest, parts, n, k, 2 * parts, 200 << 10)
    assert found is not None
    return found


def launch(slices: Slices, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    out = torch.empty(len(x), len(data), dtype=x.dtype)
    launch_slices(slices, out, x, data, recipe, bias)
    return out


@pytest.mark.parametrize(("case", "division"), CASES, ids=str)
def test_each_division_is_exact_where_sums_are_and_nan_stays_in_its_row(case: Case, division: Division) -> None:
    recipe = nc.codec(case.spec).recipe(CPU)

    def plan(n: int, k: int) -> Slices:
        return divided(case, division, recipe, n, k)

    hold(case, recipe, 140, plan, launch, lambda slices: slices._replace(grid=slices.parts))


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("batch", [2, 9, 17, 33, 64])
@pytest.mark.parametrize("spec", ["int8:block=row", "int8", "int4:block=128", "int4", "nf4"])
def test_every_layer_of_a_model_has_a_plan_that_fits(spec: str, batch: int, hopper: bool) -> None:
    format = nc.codec(spec).recipe(CPU).format
    codes = codes_of(format)
    assert codes is not None
    room, table = 227 << 10 if hopper else 163 << 10, 32 << 10 if codes >= 2 else 0
    for n, k in ((1, 256), (4096, 4096), (22016, 4096), (32000, 4096), (4096, 11008), (8192, 28672), (1024, 8192)):
        sizes = (batch, n, k, 2, -1, 132, room, hopper)
        slices = choose_slices(codes, block_of(format, k), int(format.scale), *sizes)
        assert slices is not None
        assert slices.shared + table <= room
        assert slices.grid <= max(132, slices.parts)
        assert slices.grid % slices.parts == 0
        assert (dict(slices.defines)["TEAM"] == 4) <= hopper
        assert 8 * dict(slices.defines)["TILES"] >= batch


@pytest.mark.parametrize(("spec", "dtype"), [("int4:block=96", 2), ("int8:block=16,scale=bf16", 2), ("int8", 0)])
def test_what_slices_cannot_do_is_left_to_others(spec: str, dtype: int) -> None:
    format = nc.codec(spec).recipe(CPU).format
    codes = codes_of(format)
    assert codes is not None
    assert choose_slices(codes, format.block, 2, 33, 64, 4096, dtype, -1, 132, 227 << 10, True) is None
