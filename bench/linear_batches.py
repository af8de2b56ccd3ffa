"""Products of encoded weights and many vectors on a CPU, beside F.linear in fp32: at which batch decoding pays.

    PYTHONPATH=src:bench python bench/linear_batches.py [BATCH,BATCH,...]

One thread, x in fp32. All ways take turns, nine times, and the least processor time of each counts, so that other work
on the machine is in all of them. A figure is F.linear's time over that of the way: above 1 it is faster.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.kernels.operators import linear
from narrowcast.kernels.operators.dispatch import kernel_for

CODECS = ("int8", "int4", "nf4", "apot4")
BATCHES = (8, 12, 16, 24, 32, 64, 128, 256, 512)
OUT, IN, ROUNDS = 2048, 4096, 9


def in_tiles(x: Tensor, rows: Tensor, recipe: linear.Recipe) -> Tensor:
    out = torch.empty(len(x), len(rows))
    linear._multiply_tiles(out, x, rows, recipe, None)
    return out


def as_they_are(x: Tensor, rows: Tensor, recipe: linear.Recipe) -> Tensor:
    out = torch.empty(len(x), len(rows))
    kernel = kernel_for("cpu")
    kernel.max_batch = {torch.float32: 1 << 30}  # type: ignore[attr-defined]
    assert kernel.linear(out, x, rows, recipe, None)
    return out


def fastest(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, run in ways.items():
            began = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - began)
    return best


def line(batch: int, weight: Tensor) -> str:
    x = torch.randn(batch, IN)
    ways: dict[str, Callable[[], object]] = {"": lambda: torch.nn.functional.linear(x, weight)}
    for spec in CODECS:
        codec = nc.codec(spec)
        rows, recipe = codec.encode(weight), codec.recipe(torch.device("cpu"))
        ways[f"{spec} as it is"] = lambda rows=rows, recipe=recipe: as_they_are(x, rows, recipe)
        ways[f"{spec} in tiles"] = lambda rows=rows, recipe=recipe: in_tiles(x, rows, recipe)
    best = fastest(ways)
    base = best.pop("")
    cells = [f"{base / best[f'{spec} as it is']:.2f} / {base / best[f'{spec} in tiles']:.2f}" for spec in CODECS]
    return f"| {batch} | {base * 1e3:.1f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    batches = [int(batch) for batch in sys.argv[1].split(",")] if len(sys.argv) > 1 else BATCHES
    print(f"{kernel_for('cpu').name}, {OUT}x{IN}, one thread; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    print(f"\n| batch | F.linear, ms | {' | '.join(CODECS)} |\n|--:|--:|{'--:|' * len(CODECS)}")
    for batch in batches:
        print(line(batch, torch.randn(OUT, IN) * 0.02), flush=True)
    print(f"\nload at the end {os.getloadavg()[0]:.0f}")
