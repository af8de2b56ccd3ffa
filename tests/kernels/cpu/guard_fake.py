"""Run as a script: fake quantization and integer products on memory whose neighbours may not be touched.

Prints how many calls survived.
"""

from __future__ import annotations

import itertools
import sys

import torch
from guard_pages import guarded

import narrowcast as nc
from narrowcast.codecs import Levels
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.windows import Window

SHAPES = ((1, 1, 1), (1, 1, 65), (3, 5, 7), (1, 3, 300), (130, 3, 1), (2, 70, 1))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def grids(at_end: bool) -> list[Grid]:
    integers = guarded(torch.arange(-8.0, 8.0), at_end)
    made = [Grid(integers, guarded(torch.arange(-7.5, 7.5), at_end), True)]
    for name in ("apot4", "nf4", "apot8"):
        codec = nc.codec(name)
        assert isinstance(codec, Levels)
        levels = codec.levels
        thresholds = codec._tables[torch.device("cpu")][1, : len(levels) - 1]
        made.append(Grid(guarded(levels, at_end), guarded(thresholds, at_end), False))
    return made


def fake(kernel: binding.Native, at_end: bool) -> int:
    calls = 0
    for grid, shape, dtype in itertools.product(grids(at_end), SHAPES, DTYPES):
        x, grad, out = (guarded(torch.randn(shape).to(dtype), at_end) for _ in range(3))
        scale, dscale = (guarded(torch.ones(shape[1]), at_end) for _ in range(2))
        kernel.fake_quantize(out, x, scale, grid)
        kernel.fake_quantize_backward(out, dscale, grad, x, scale, grid)
        calls += 1
    return calls


def integers(kernel: binding.Native, at_end: bool) -> int:
    calls = 0
    for batch, rows, k in itertools.product((1, 5, 17), (1, 50), (1, 63, 130)):
        x, weight = (guarded(torch.ones(count, k, dtype=torch.int8), at_end) for count in (batch, rows))
        out = guarded(torch.zeros(batch, rows, dtype=torch.int32), at_end)
        kernel.integer_linear(out, x, weight)
        assert out.eq(k).all()
        calls += 1
    return calls


def convolutions(kernel: binding.Native, at_end: bool) -> int:
    calls = 0
    grid = grids(at_end)[0]
    for size, step, kernel_size in itertools.product((5, 17, 64), (1, 2, 3), (1, 3)):
        window = Window(step, step, 1, 1, 1, 1, 1, 1, 1)
        height, width = window.outputs(size, size, (kernel_size, kernel_size))
        x = guarded(torch.rand(2, 5, size, size), at_end)
        weight = guarded(torch.ones(9, 2, kernel_size, kernel_size, 4, dtype=torch.int8), at_end)
        scale, factor, bias = (guarded(torch.ones(count), at_end) for count in (1, 9, 9))
        out = guarded(torch.zeros(2, 9, height, width), at_end)
        kernel.integer_conv(out, x, scale, grid, weight, factor, bias, window)
        calls += 1
    return calls


def main() -> None:
    kernel, why = binding.load(sys.argv[1])
    assert kernel is not None, why
    print(
        sum(fake(kernel, at_end) + integers(kernel, at_end) + convolutions(kernel, at_end) for at_end in (True, False)),
        "calls",
    )


if __name__ == "__main__":
    main()
