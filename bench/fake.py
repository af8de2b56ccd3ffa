"""Fake quantization, forward and backward, beside a copy of the same tensor in the same run; and integer products.

    PYTHONPATH=src python bench/fake.py            16M fp32 elements on one thread, at 4 bits and 8
    ... --threads 2  --elements 1000000  --rounds 9
    ... --gpu                                      checks a GPU's bits against the reference, then times it

`fwd`, `bwd` and `both` are times over that of `dst.copy_(src)`, written into tensors that are there; `new` is `both`
through autograd, which allocates its results, two tensors that the system clears first; `clone` is torch's own copy
into one such tensor. On one thread, time is the CPU time of the calling thread, so that other processes count little.
The limit is the bytes: a copy moves two tensors, forward two, backward three (2.5 copies together); on a GPU `share` is
that limit's share of the time. Beside it: PyTorch's way with additive powers of two, element by element in Python,
rewritten from its description and run on 1,000 elements.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Levels
from narrowcast.kernels import operators, reference
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.kernels.operators.integer import integer_linear

GRIDS = ("int4", "apot4", "nf4", "int8", "apot8")
LIMIT = 3.0
"""Copies that forward and backward together may take at 4 bits."""
Work = Callable[[], object]
console = Console(width=max(120, Console().width))


def grid_of(name: str, device: str) -> Grid:
    """The grid of a codec: integers, or its table."""
    codec = nc.codec(name)
    if isinstance(codec, Levels):
        thresholds = codec._tables[torch.device("cpu")][1, : len(codec.levels) - 1]
        return Grid(codec.levels.to(device), thresholds.to(device), False)
    half = 2 ** (codec.format.bits - 1)
    levels = torch.arange(-half, half, dtype=torch.float32, device=device)
    return Grid(levels, levels[:-1] + 0.5, True)


def shapes(elements: int) -> dict[str, tuple[int, int, int]]:
    """The ways in which scales lie: [outer, channels, inner]."""
    side = int(elements**0.5)
    return {"one scale": (1, 1, side * side), "rows": (1, side, side), "columns": (side, side, 1)}


# -- the CPU ----------------------------------------------------------------------------------------------------------


def seconds(run: Work, clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


def row(name: str, way: str, elements: int, rounds: int, clock: Callable[[], float]) -> list[str]:
    """A line of the table: medians over rounds in which the copy and the kernels take turns."""
    shape, grid, kernel = shapes(elements)[way], grid_of(name, "cpu"), operators.kernel_for("cpu")
    x, grad = torch.randn(shape), torch.randn(shape)
    out, dx, copy = (torch.zeros(shape) for _ in range(3))
    scale = torch.full(shape[1:2], 3.0 / float(grid.levels[-1]))
    dscale = torch.zeros_like(scale)
    leaf, learned, axis = x.clone().requires_grad_(), scale.clone().requires_grad_(), None if way == "one scale" else 1

    def autograd() -> object:
        return torch.autograd.grad(fake_quantize(leaf, learned, grid, axis), (leaf, learned), grad)

    ratios: dict[str, list[float]] = {"fwd": [], "bwd": [], "both": [], "new": [], "clone": []}
    for _ in range(rounds + 1):
        base = seconds(lambda: copy.copy_(x), clock)
        forward = seconds(lambda: kernel.fake_quantize(out, x, scale, grid), clock)
        backward = seconds(lambda: kernel.fake_quantize_backward(dx, dscale, grad, x, scale, grid), clock)
        fresh, clone = seconds(autograd, clock), seconds(x.clone, clock)
        for key, value in zip(ratios, (forward, backward, forward + backward, fresh, clone), strict=True):
            ratios[key].append(value / base)
    medians = {key: statistics.median(values[1:]) for key, values in ratios.items()}
    verdict = "" if "4" not in name else "within" if medians["both"] <= LIMIT else f"above {LIMIT}"
    return [name, way, *(f"{value:.2f}" for value in medians.values()), verdict]


def one_by_one(x: Tensor, levels: Tensor) -> list[Tensor]:
    """PyTorch's way: for each element, the distance to every level, in Python, on tensors of one number."""
    found = []
    for value in x:
        best, least = levels[0], torch.tensor(torch.inf)
        for level in levels:
            distance = abs(level - value)
            if distance < least:
                best, least = level, distance
        found.append(best)
    return found


def competitor() -> str:
    grid = grid_of("apot4", "cpu")
    few = torch.randn(1000) * 5
    slow = seconds(lambda: one_by_one(few, grid.levels), time.thread_time) / len(few)
    many, scale = torch.randn(1 << 22), torch.tensor([0.2])
    fast = min(seconds(lambda: fake_quantize(many, scale, grid, None), time.thread_time) for _ in range(5)) / len(many)
    return f"element by element in Python: {slow * 1e6:.1f} us; here {fast * 1e9:.2f} ns, {slow / fast:,.0f} times less"


def products(rounds: int, clock: Callable[[], float]) -> Table:
    table = Table("batch", "rows x k", "ms", "fp32 matmul takes", "torch._int_mm takes")
    for batch in (1, 32, 512):
        x, weight = (torch.randint(-128, 128, (n, 4096), dtype=torch.int8) for n in (batch, 4096))
        floats = x.float(), weight.float().t()
        works: list[Work] = [
            lambda x=x, weight=weight: integer_linear(x, weight),  # type: ignore[misc]
            lambda floats=floats: torch.mm(*floats),  # type: ignore[misc]
            lambda x=x, weight=weight: torch._int_mm(x, weight.t()),  # type: ignore[misc]
        ]
        times = [[seconds(work, clock) for work in works] for _ in range(rounds + 1)][1:]
        mine, *others = (statistics.median(column) for column in zip(*times, strict=True))
        table.add_row(str(batch), "4096 x 4096", f"{mine * 1e3:.2f}", *(f"{other / mine:.1f}x" for other in others))
    return table


# -- a GPU ----------------------------------------------------------------------------------------------------------


def milliseconds(run: Work, rounds: int) -> float:
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for began, ended in marks:
        began.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in marks)


def agrees(name: str, way: str, dtype: torch.dtype) -> bool:
    """Whether the GPU's y and dx are the reference's bits, on the CPU where torch rounds as it should."""
    shape, there, here = shapes(300 * 300)[way], grid_of(name, "cuda"), grid_of(name, "cpu")
    x, grad, scale = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[1]) + 0.01
    out, dx, dscale = torch.empty_like(x).cuda(), torch.empty_like(x).cuda(), torch.empty_like(scale).cuda()
    kernel = operators.kernel_for("cuda")
    kernel.fake_quantize(out, x.cuda(), scale.cuda(), there)
    kernel.fake_quantize_backward(dx, dscale, grad.cuda(), x.cuda(), scale.cuda(), there)
    wanted_x, wanted_scale = reference.fake_quantize_backward(grad, x, scale, here)
    same = torch.equal(out.cpu(), reference.fake_quantize(x, scale, here)) and torch.equal(dx.cpu(), wanted_x)
    return same and torch.allclose(dscale.cpu(), wanted_scale, rtol=1e-6, atol=1e-4)


def on_gpu(elements: int, rounds: int) -> int:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    wrong = [(n, w, d) for n in GRIDS for w in shapes(1) for d in kinds if not agrees(n, w, d)]
    console.print(f"bits: {'the reference' if not wrong else f'WRONG for {wrong}'}")
    table, kernel = Table("grid", "scales", "dtype", "fwd ms", "share", "bwd ms", "share"), operators.kernel_for("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        source = torch.randn(elements, device="cuda", dtype=dtype)
        target = torch.empty_like(source)
        copied = milliseconds(lambda source=source, target=target: target.copy_(source), rounds)  # type: ignore[misc]
        for name in GRIDS:
            for way, shape in shapes(elements).items():
                grid = grid_of(name, "cuda")
                x, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
                out, scale = torch.empty_like(x), torch.full(shape[1:2], 3.0 / float(grid.levels[-1]), device="cuda")
                dscale = torch.empty_like(scale)
                ahead = milliseconds(lambda o=out, x=x, s=scale, g=grid: kernel.fake_quantize(o, x, s, g), rounds)  # type: ignore[misc]
                back = milliseconds(
                    lambda o=out, d=dscale, g=grad, x=x, s=scale, i=grid: kernel.fake_quantize_backward(
                        o, d, g, x, s, i
                    ),  # type: ignore[misc]
                    rounds,
                )
                shares = f"{copied / ahead:.0%}", f"{1.5 * copied / back:.0%}"
                cells = f"{ahead:.3f}", shares[0], f"{back:.3f}", shares[1]
                table.add_row(name, way, str(dtype).removeprefix("torch."), *cells)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {elements:,} elements", highlight=False)
    console.print(table)
    return 1 if wrong else 0


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--elements", type=int, help="16M by default, 256M on a GPU")
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--gpu", action="store_true")
    given = asked.parse_args()
    if given.gpu:
        return on_gpu(given.elements or 1 << 28, given.rounds)
    given.elements = given.elements or 1 << 24
    torch.set_num_threads(given.threads)
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    console.print(
        f"{operators.kernel_for('cpu').name}, torch {torch.__version__}, {given.threads} thread(s)", highlight=False
    )
    table = Table("grid", "scales", "fwd", "bwd", "both", "new", "clone", f"both <= {LIMIT}")
    for name in GRIDS:
        for way in shapes(1):
            table.add_row(*row(name, way, given.elements, given.rounds, clock))
    console.print(table)
    console.print(competitor(), highlight=False)
    console.print(products(given.rounds, clock))
    return 0


if __name__ == "__main__":
    sys.exit(main())
