"""Grids, numbers and the check that every kernel's fake quantization runs: the reference's bits."""

from __future__ import annotations

import torch
from torch import Tensor

import narrowcast as nc
from cases import same_bits
from narrowcast.codecs import Levels
from narrowcast.kernels import reference
from narrowcast.kernels.contract import Kernel
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.reference.casts import to_float32
from narrowcast.kernels.reference.grids import nearest_level

CPU = torch.device("cpu")
TABLES = {
    "apot4": nc.codec("apot4"),
    "apot3": nc.codec("apot3"),
    "apot6": nc.codec("apot6"),
    "apot8": nc.codec("apot8"),
    "pot4": nc.codec("pot4"),
    "pot5": nc.codec("pot5"),
    "nf4": nc.codec("nf4"),
    "no zero": Levels([-1.0, 1.0]),
    "unsigned": Levels([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]),
    "far": Levels([40.0, 41.0, 43.0, 60.0]),
    "uneven": Levels([-3.0, -0.4, -0.0, 0.3, 1.7]),
    "200 levels": Levels([i * i / 100 - 30 for i in range(200)]),
}


def integers(low: int, high: int) -> Grid:
    levels = torch.arange(low, high + 1.0)
    return Grid(levels, levels[:-1] + 0.5, True)


def grid_of(codec: nc.Codec) -> Grid:
    assert isinstance(codec, Levels)
    return Grid(codec.levels, codec._tables[CPU][1, : len(codec.levels) - 1].clone(), False)


GRIDS = {
    **{name: grid_of(codec) for name, codec in TABLES.items()},
    "int4": integers(-8, 7),
    "int8": integers(-128, 127),
    "uint3": integers(0, 7),
    "2 integers": integers(0, 1),
}
SHAPES = ((1, 1, 1), (1, 1, 70), (3, 5, 7), (2, 3, 300), (70, 3, 1), (5, 150, 1), (2, 1, 64), (1, 130, 2))


def make_operands(grid: Grid, shape: tuple[int, ...], dtype: torch.dtype, nan: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x, grad and scales: normal numbers, ties, far ones, infinities, denormals, zeros of both signs."""
    random = torch.Generator().manual_seed(sum(shape))
    peak = float(grid.levels.abs().max())
    x = torch.randn(shape, generator=random).flatten()
    scale = torch.rand(shape[1], generator=random) + 0.5
    scale[0] = 0.5  # a power of two, so that ties are met exactly
    x[::3] *= peak / 2
    x[1::7] = grid.thresholds[torch.arange(len(x[1::7])) % len(grid.thresholds)] * scale[0]
    x[2::11] *= 1e-42
    x[5::13], x[8::17], x[9::19], x[4::23] = torch.inf, -torch.inf, 0.0, -0.0
    if nan and len(x) > 20:
        x[20] = torch.tensor(-0x3FF00F, dtype=torch.int32).view(torch.float32)  # a NaN with a sign and a payload
    grad = torch.randn(shape, generator=random)
    return x.view(shape).to(dtype), grad.to(dtype), scale


def assert_sums_agree(sums: Tensor, wanted: Tensor, x: Tensor, grad: Tensor, scale: Tensor, grid: Grid) -> None:
    """Sums of the same fp32 terms in fp64, in another order: n of them err by less than n 2**-53 of their magnitudes,
    either way; rounding both to fp32 then adds half a unit in the last place each.
    """
    v, q = nearest_level(x, scale, grid)
    outside = (v < grid.levels[0]) | (v > grid.levels[-1])
    magnitudes = (to_float32(grad) * torch.where(outside, q, q - v)).double().abs().sum((0, 2))
    bound = x.numel() * 2.0**-52 * magnitudes + 2.0**-23 * wanted.double().abs() + 2.0**-149
    assert torch.equal(sums.isnan(), wanted.isnan())
    assert ((sums.double() - wanted.double()).abs() <= bound)[~wanted.isnan()].all()


def assert_agrees(
    kernel: Kernel, grid: Grid, shape: tuple[int, ...], dtype: torch.dtype, nan: bool, device: str = "cpu"
) -> None:
    x, grad, scale = make_operands(grid, shape, dtype, nan)
    there = Grid(grid.levels.to(device), grid.thresholds.to(device), grid.uniform)
    its_x, its_grad, its_scale = x.to(device), grad.to(device), scale.to(device)
    y = torch.full_like(its_x, 7)
    kernel.fake_quantize(y, its_x, its_scale, there)
    assert same_bits(y.cpu(), reference.fake_quantize(x, scale, grid)), (shape, dtype)
    dx, dscale = torch.full_like(its_x, 7), torch.full_like(its_scale, 7)
    kernel.fake_quantize_backward(dx, dscale, its_grad, its_x, its_scale, there)
    want = reference.fake_quantize_backward(grad, x, scale, grid)
    assert same_bits(dx.cpu(), want[0]), (shape, dtype)
    assert_sums_agree(dscale.cpu(), want[1], x, grad, scale, grid)
