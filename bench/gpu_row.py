"""One row of x by encoded weights on Hopper: cuda/ring.cu, its numbers against fp64 first, then its time.

    PYTHONPATH=src:bench python3 bench/gpu_row.py            ring.cu as ring.py divides, beside dot.cu and tile.cu
    ... --sweep                                              every division of DIVISIONS
    ... --skip-check --shapes "4096x4096;22016x4096" --specs "int4;nf4"
    ... --json PATH (default: $OUT/gpu_row.json where OUT is set)

Weights rotate past the L2 cache, and calls are replayed as a CUDA graph: "early" where weights may be read before the
kernel before has ended, as in a decoder, "after" where not. The limit is reading the encoded weights at the bandwidth
measured in the same run. Exits with 1 if a number is outside its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import narrowcast as nc
from gpu_linear import launch as launch_few
from gpu_linear import microseconds, read_bandwidth, rows_of, within
from narrowcast.kernels import reference
from narrowcast.kernels.cuda import choose, nvrtc
from narrowcast.kernels.cuda.formats import KINDS, sources
from narrowcast.kernels.cuda.launch import launch_ring
from narrowcast.kernels.cuda.ring import Division, Ring, choose_ring, divide
from narrowcast.kernels.early import weights_written_long_ago
from narrowcast.kernels.layout import Recipe

SPECS = ("int4:block=128", "int4", "nf4", "apot4", "fp8_e4m3", "fp8_e4m3:scale=none", "int8")
SHAPES = ((4096, 4096), (12288, 4096), (22016, 4096), (32000, 4096), (8192, 8192))
DIVISIONS = tuple(
    Division(*way) for way in ((8, 2, 1), (8, 2, 2), (16, 2, 1), (16, 2, 2), (16, 1, 1), (4, 3, 3), (8, 3, 3))
)
GPU = torch.device("cuda")


def ring_for(spec: str, n: int, k: int, dtype: torch.dtype, bias: int, way: Division | None = None) -> Ring | None:
    codec = nc.codec(spec)
    format, sizes = codec.recipe(GPU).format, (n, k, codec.row_bytes(k), KINDS[dtype], bias, 132)
    return choose_ring(format, *sizes) if way is None else divide(format, *sizes, way)


def compile_all(rings: set[Ring | None], modes: tuple[int, ...] = (0, 1)) -> None:
    """Each once, many at a time."""
    jobs = [(*ring.defines, ("READ_WEIGHTS_EARLY", early)) for ring in rings if ring for early in modes]
    files, device = sources("ring"), torch.cuda.current_device()
    with ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.zeros(1, device="cuda")) as pool:
        list(pool.map(lambda defines: nvrtc.function(files, "ring", defines, device, True), dict.fromkeys(jobs)))


def off_by(ring: Ring, x: Tensor, rows: Tensor, recipe: Recipe, bias: Tensor | None) -> float:
    """How much of its bound the worst number is off, infinity where NaNs or two calls differ."""
    weight = reference.decode(rows.cpu(), x.shape[1], torch.float64, recipe_on_cpu(recipe)).cuda()
    exact, allowed = within(x, weight, bias)
    first, second = (torch.full((1, len(rows)), 7.0, dtype=x.dtype, device=GPU) for _ in range(2))
    for out in (first, second):
        launch_ring(ring, out, x, rows, recipe, bias)
    same = torch.equal(first.view(torch.int16), second.view(torch.int16))
    if not same or not torch.equal(first.isnan(), exact.isnan()):
        return float("inf")
    return ((first.double() - exact).abs() / allowed).nan_to_num(0).max().item()


def recipe_on_cpu(recipe: Recipe) -> Recipe:
    return recipe._replace(table=None if recipe.table is None else recipe.table.cpu())


def check() -> int:
    """How many results are outside their bound: every code in its row, odd sizes, biases, both kinds of x."""
    specs = (*SPECS, "int4:block=256,scale=fp16", "int8:block=32", "nf4:block=128", "fp8_e4m3:block=128,scale=e8m0")
    cases = list(itertools.product(specs, (256, 17), (4096, 8192), (torch.bfloat16, torch.float16)))
    rings = {case: ring_for(*case, -1 if case[1] == 17 else 0) for case in cases}
    compile_all(set(rings.values()), (0,))
    bad = 0
    for (spec, n, k, dtype), ring in rings.items():
        if ring is None:
            continue
        recipe, every = nc.codec(spec).recipe(GPU), torch.arange(n, device=GPU)
        rows = nc.codec(spec).encode(torch.randn(n, k, device=GPU))
        rows[every, torch.randint(0, k * recipe.format.bits // 8, (n,), device=GPU)] = every.to(torch.uint8)
        bias = None if n == 17 else torch.randn(n, device=GPU)
        off = off_by(ring, torch.randn(1, k, device=GPU).to(dtype), rows, recipe, bias)
        if not off <= 1:
            bad += 1
            print(f"WRONG {spec} {n}x{k} {dtype}: {off:.3g} of the bound")
    print(f"{sum(ring is not None for ring in rings.values())} results, {bad} outside their bound")
    return bad


def check_chain() -> int:
    """How many specs give other bits where each product waits for the one before and weights are read early."""
    bad = 0
    for spec in SPECS:
        recipe, ring = nc.codec(spec).recipe(GPU), ring_for(spec, 4096, 4096, torch.bfloat16, -1)
        assert ring is not None
        rows = nc.codec(spec).encode(torch.randn(4096, 4096, device=GPU) / 64)
        first = torch.randn(1, 4096, device=GPU).bfloat16()
        steps = [first, *(torch.zeros_like(first) for _ in range(40))]

        def run(steps: list[Tensor] = steps, rows: Tensor = rows, recipe: Recipe = recipe, ring: Ring = ring) -> None:
            for x, out in itertools.pairwise(steps):
                launch_ring(ring, out, x, rows, recipe, None)

        run()
        right = torch.cat(steps)
        for out in steps[1:]:
            out.zero_()
        with weights_written_long_ago():
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        first.copy_(torch.randn(1, 4096, device=GPU))
        graph.replay()
        first.copy_(right[:1])
        graph.replay()
        if not torch.equal(torch.cat(steps).view(torch.int16), right.view(torch.int16)):
            bad += 1
            print(f"WRONG {spec}: other bits in a chain of products")
    return bad


def launch(ring: Ring, out: Tensor, x: Tensor, rows: Tensor, recipe: Recipe, i: int) -> None:
    launch_ring(ring, out, x, rows[i], recipe, None)


def time_all(specs: list[str], shapes: list[tuple[int, int]], limit: float, sweep: bool) -> list[dict[str, object]]:
    rings = {
        (spec, *shape, way): ring_for(spec, *shape, torch.bfloat16, -1, way)
        for spec, shape, way in itertools.product(specs, shapes, (None, *(DIVISIONS if sweep else ())))
    }
    compile_all(set(rings.values()))
    lines: list[dict[str, object]] = []
    for (n, k), spec in itertools.product(shapes, specs):
        codec = nc.codec(spec)
        rows, recipe = rows_of(codec, n, k), codec.recipe(GPU)
        x, out = (
            torch.randn(1, k, device=GPU, dtype=torch.bfloat16),
            torch.empty(1, n, device=GPU, dtype=torch.bfloat16),
        )
        cut = choose.cut_of(x, rows[0], recipe, None)
        assert cut is not None
        ways = {"dot.cu, tile.cu": partial(launch_few, cut, out, x, rows, recipe)}
        for (*which, way), ring in rings.items():
            if which == [spec, n, k] and ring is not None:
                ways["chosen" if way is None else str(tuple(way))] = partial(launch, ring, out, x, rows, recipe)
        line: dict[str, object] = {"spec": spec, "n": n, "k": k, "limit": n * codec.row_bytes(k) / limit}
        for mode in ("early", "after"):
            with weights_written_long_ago() if mode == "early" else contextlib.nullcontext():
                line[mode] = {name: microseconds(run, len(rows), 5) for name, run in ways.items()}
        lines.append(line)
    return lines


def show(lines: list[dict[str, object]]) -> None:
    for line in lines:
        print(f"{line['spec']} {line['n']}x{line['k']}, limit {line['limit']:.2f} us:", end="")
        for mode in ("early", "after"):
            times = sorted(line[mode].items(), key=lambda item: item[1])  # type: ignore[attr-defined]
            print(f" {mode}", " | ".join(f"{name} {us:.2f} ({line['limit'] / us:.0%})" for name, us in times), end=";")  # type: ignore[operator]
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--shapes", default=";".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--specs", default=";".join(SPECS))
    parser.add_argument("--json", default=os.environ.get("OUT") and f"{os.environ['OUT']}/gpu_row.json")
    chosen = parser.parse_args()
    bad = 0 if chosen.skip_check else check() + check_chain()
    limit = read_bandwidth()
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in chosen.shapes.split(";"))]
    lines = time_all(chosen.specs.split(";"), shapes, limit, chosen.sweep)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, reads {limit / 1e6:.2f} TB/s")
    show(lines)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"read_TBps": limit / 1e6, "lines": lines}, indent=1))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
