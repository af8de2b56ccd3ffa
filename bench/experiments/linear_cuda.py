"""Batch-1 linear layers on encoded weights, on a GPU: how near to the read bandwidth CUDA compiled at run time comes.

    python3 bench/experiments/linear_cuda.py        needs a GPU and torch.cuda._compile_kernel (torch 2.9 and newer)

An experiment, kept for the kernels of nc.nn.Linear, not used by the library. Weights rotate past the L2 cache, and
calls are replayed as a CUDA graph. The share is of 4.37 TB/s, the H200's read bandwidth as measured elsewhere (not in
this run). 2026-11-15, H200, torch 2.11: int8 57%, 87%, 91% and 66% (split) at the four shapes, int4 38%, 61%, 64%, 57%.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

SOURCE = (Path(__file__).parent / "linear.cu").read_text()
SHAPES = ((4096, 4096), (22016, 4096), (32000, 4096), (4096, 11008))
READ = 4.37e6  # bytes a microsecond
SMS = 132


def build(**defines: int) -> Callable[..., None]:
    lines = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    include = "/usr/local/cuda/include"
    return torch.cuda._compile_kernel(lines + SOURCE, "k", cuda_include_dirs=[include])


def microseconds(run: Callable[[int], None], count: int) -> float:
    """The median time of one call, the weights taking turns."""
    for i in range(count):
        run(i)
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), max(1, 48 // count)
    with torch.cuda.graph(graph):
        for i in list(range(count)) * repeats:
            run(i)
    graph.replay()
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / (count * repeats) * 1e3)
    return statistics.median(times)


def rows_of(out: int, width: int, bits: int) -> tuple[Tensor, Tensor]:
    """Encoded weights, several times over, and the first of them decoded."""
    groups = 1 if bits == 8 else width // 128
    stride = -(-(width * bits // 8 + 4 * groups) // 16) * 16
    count = max(2, int(200e6 / (out * stride)) + 1)
    data = torch.randint(0, 256, (count, out, stride), dtype=torch.uint8, device="cuda")
    scales = torch.rand(out, groups, device="cuda") * 0.02
    codes = width * bits // 8
    data[:, :, codes : codes + 4 * groups] = scales.view(torch.uint8).view(out, -1)
    if bits == 8:
        q = data[0, :, :codes].view(torch.int8).double()
    else:
        pairs = torch.stack([data[0, :, :codes] & 15, data[0, :, :codes] >> 4], -1).view(out, width).int()
        q = torch.where(pairs > 7, pairs - 16, pairs).double()
    return data, q * scales.double().repeat_interleave(width // groups, 1)


def measure(name: str, out: int, width: int, bits: int, launch: Callable[..., Callable[[Tensor], None]]) -> None:
    data, weight = rows_of(out, width, bits)
    x = torch.randn(width, device="cuda").bfloat16()
    y = torch.empty(out, device="cuda", dtype=torch.bfloat16)
    run = launch(x, y, out, width, data.shape[2])
    run(data[0])
    torch.cuda.synchronize()
    exact = weight @ x.double()
    error = ((y.double() - exact).abs().max() / exact.abs().max()).item()
    taken = microseconds(lambda i: run(data[i]), len(data))
    share = out * data.shape[2] / READ / taken
    print(f"{name:24s} {out:6d} x {width:5d}: {taken:6.2f} us, {share:4.0%} of the read bandwidth, error {error:.1e}")


def int8(x: Tensor, y: Tensor, out: int, width: int, stride: int) -> Callable[[Tensor], None]:
    kernel, shared = build(INT8=1, ROWS=2, WARPS=8, UNROLL=8), -(-width // 512) * 2048
    grid = (min(SMS * 8, -(-out // 16)), 1, 1)
    arguments = [x, y, out, width, stride]
    return lambda w: kernel(grid=grid, block=(256, 1, 1), args=[w, *arguments], shared_mem=shared)


def int8_long(x: Tensor, y: Tensor, out: int, width: int, stride: int) -> Callable[[Tensor], None]:
    kernel, shared = build(INT8K=1, ROWS=2, T=8, KS=2, UNROLL=4), -(-width // 512) * 2048
    grid, arguments = (-(-out // 16), 1, 1), [x, y, out, width, stride]
    return lambda w: kernel(grid=grid, block=(512, 1, 1), args=[w, *arguments], shared_mem=shared)


def int4(x: Tensor, y: Tensor, out: int, width: int, stride: int) -> Callable[[Tensor], None]:
    split = 4 if out * width > 5e7 else 8
    kernel = build(INT4C=1, T=1, KS=split, UNROLL=2, MINB=1, CH=2, PRE=0)
    grid, arguments = (min(SMS * 32 // split, out // 16), 1, 1), [x, y, out, width, stride]
    return lambda w: kernel(grid=grid, block=(32 * split, 1, 1), args=[w, *arguments], shared_mem=2 * width)


if __name__ == "__main__":
    for out, width in SHAPES:
        measure("int8:block=row", out, width, 8, int8)
        measure("int8:block=row, split", out, width, 8, int8_long)
        measure("int4 (block 128)", out, width, 4, int4)
