"""Products of encoded weights and many vectors on a CPU, beside F.linear in x's dtype, batch by batch.

    PYTHONPATH=src:bench python bench/linear_batches.py
    ... --shapes 4096x4096 --batches 2,8,64 --threads 1,2 --dtypes float32,bfloat16 --codecs int8,int4 --rounds 9
    ... --ways          rows as they are / in the core's tiles / in matrix registers (AMX; without, as they are) / in
                        torch's: what kernels/cpu/batches.py is chosen by
    ... --json PATH     the milliseconds of every way

All take turns, and the least time of each counts, so that other work on the machine is in all of them: processor time
on one thread, wall clock on several. Weights rotate past the caches. A figure is F.linear's time over that of the way:
above 1 it is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import narrowcast as nc
from linear_contenders import copied
from narrowcast.kernels.layout import Recipe
from narrowcast.kernels.operators import linear
from narrowcast.kernels.operators.dispatch import kernel_for

NEVER = 1 << 30
BATCHES = "2,3,4,5,6,7,8,12,16,24,32,48,64,96,128,192,256,384,512"
Way = Callable[[int], object]


def by_kernel(x: Tensor, rows: Tensor, recipe: Recipe, way: str) -> Tensor:
    """By the core alone: in "tiles", in "matrix" registers, or with "rows" as they are, whatever the batch is."""
    out, kernel = x.new_empty(len(x), len(rows)), kernel_for("cpu")
    kernel.tiles_from = dict.fromkeys(kernel.max_batch, 1 if way == "tiles" else NEVER)  # type: ignore[attr-defined]
    kernel.matrix_from = 1 if way == "matrix" else NEVER  # type: ignore[attr-defined]
    kernel.max_batch = dict.fromkeys(kernel.max_batch, NEVER)  # type: ignore[attr-defined]
    assert kernel.linear(out, x, rows, recipe, None)
    return out


def by_torch(x: Tensor, rows: Tensor, recipe: Recipe) -> Tensor:
    out = x.new_empty(len(x), len(rows))
    linear._multiply_tiles(out, x, rows, recipe, None)
    return out


def ways_of(x: Tensor, spec: str, copies: list[Tensor], ways: bool) -> dict[str, Way]:
    codec = nc.codec(spec)
    recipe, count = codec.recipe(torch.device("cpu")), len(copies)
    if not ways:
        return {spec: lambda turn: codec.linear(x, copies[turn % count])}
    return {
        f"{spec} as it is": lambda turn: by_kernel(x, copies[turn % count], recipe, "rows"),
        f"{spec} in tiles": lambda turn: by_kernel(x, copies[turn % count], recipe, "tiles"),
        f"{spec} in matrix registers": lambda turn: by_kernel(x, copies[turn % count], recipe, "matrix"),
        f"{spec} by torch": lambda turn: by_torch(x, copies[turn % count], recipe),
    }


@torch.inference_mode()
def least(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Milliseconds. The first of two calls in a row finds the threads of another way spinning, and is not counted."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(rounds):
        for name, run in ways.items():
            run(2 * turn)
            began = clock()
            run(2 * turn + 1)
            best[name] = min(best[name], 1e3 * (clock() - began))
    return best


def table(given: argparse.Namespace, shape: str, dtype: torch.dtype, encoded: dict[str, list[Tensor]]) -> list[dict]:  # type: ignore[type-arg]
    n, k = (int(size) for size in shape.split("x"))
    floats = copied(torch.randn(n, k, dtype=dtype) * k**-0.5)
    short, threads = str(dtype).removeprefix("torch."), torch.get_num_threads()
    print(f"\n{shape}, x in {short}, {threads} thread{'s' * (threads > 1)}")
    print(f"\n| batch | F.linear, ms | {' | '.join(encoded)} |\n|--:|--:|{'--:|' * len(encoded)}")
    lines = []
    for batch in map(int, given.batches.split(",")):
        x = torch.randn(batch, k).to(dtype)
        ways: dict[str, Way] = {"F.linear": lambda turn, x=x: F.linear(x, floats[turn % len(floats)])}  # type: ignore[misc]
        for spec, copies in encoded.items():
            ways |= ways_of(x, spec, copies, given.ways)
        best = least(ways, given.rounds)
        base = best["F.linear"]
        cells = [" / ".join(f"{base / best[way]:.2f}" for way in ways if way.split()[0] == spec) for spec in encoded]
        print(f"| {batch} | {base:.2f} | {' | '.join(cells)} |", flush=True)
        lines.append({"shape": shape, "dtype": short, "threads": threads, "batch": batch, "ms": best})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="4096x4096")
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--codecs", default="int8,int4,nf4,apot4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--json")
    given, lines = parser.parse_args(), []
    print(
        f"{kernel_for('cpu').name}, torch {torch.__version__}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for shape in given.shapes.split(","):
        n, k = (int(size) for size in shape.split("x"))
        weight = torch.randn(n, k) * k**-0.5
        encoded = {spec: copied(nc.codec(spec).encode(weight)) for spec in given.codecs.split(",")}
        for threads in map(int, given.threads.split(",")):
            torch.set_num_threads(threads)
            for dtype in given.dtypes.split(","):
                lines += table(given, shape, getattr(torch, dtype), encoded)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
