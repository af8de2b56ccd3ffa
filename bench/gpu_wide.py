"""Products with many rows of x on a Hopper GPU (cuda/wide.cu), checked against fp64 and timed beside cuBLAS in bf16.

    PYTHONPATH=src:bench python3 bench/gpu_wide.py                 what the library does, at four shapes of a 7B decoder
    PYTHONPATH=src:bench python3 bench/gpu_wide.py --sweep         other divisions, for the table of cuda/wide.py
    ... --batches 64,128,256,2048   --specs int4,nf4   --seconds 120 (of a sweep)   --json PATH (default: in $OUT)

Weights rotate past the L2 cache, calls are replayed as a CUDA graph. Exits with 1 if a number is outside its bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import narrowcast as nc
from gpu_linear import microseconds, within
from narrowcast.kernels import reference
from narrowcast.kernels.cuda import choose, nvrtc
from narrowcast.kernels.cuda.formats import block_of, codes_of, fp8_of, scaling_of, sources
from narrowcast.kernels.cuda.launch import launch_wide, reading
from narrowcast.kernels.cuda.wide import SHAPES as SHAPES_OF_TILES
from narrowcast.kernels.cuda.wide import Wide, cost, divisions
from narrowcast.kernels.layout import Element, Recipe, Scale, layout

SHAPES = ((22016, 4096), (4096, 4096), (12288, 4096), (4096, 11008))
SPECS = ("int4:block=128", "int4", "int8", "nf4", "apot4", "fp8_e4m3", "int8:block=row")
BF16 = torch.bfloat16


def rows_of(recipe: Recipe, n: int, k: int, count: int) -> Tensor:
    """Random codes that stand for numbers, and scales about 0.02: [count, n, row bytes]."""
    format, place = recipe.format, layout(recipe.format, k)
    generator = torch.Generator("cuda").manual_seed(n + k)
    rows = torch.randint(0, 256, (count, n, place.row_bytes), dtype=torch.uint8, device="cuda", generator=generator)
    if format.element == Element.LEVELS:
        rows = torch.where((rows & 15) == 15, rows - 1, rows)
        rows = torch.where(rows >> 4 == 15, rows - 16, rows)
    elif format.element != Element.INT:
        rows = torch.where((rows & 0x7F) == 0x7F, rows - 64, rows)
    if format.scale:
        kind = {Scale.FP32: torch.float32, Scale.BF16: BF16, Scale.FP16: torch.float16}[Scale(format.scale)]
        scales = torch.rand(count, n, place.blocks, device="cuda", generator=generator) * 0.02 + 0.01
        rows[..., place.scales_offset : place.zeros_offset] = scales.to(kind).view(torch.uint8)
    return rows


def ways(recipe: Recipe, batch: int, n: int, k: int, most: int) -> list[Wide]:
    """Divisions worth a try: for each shape the likeliest."""
    codes, device = codes_of(recipe.format), torch.device("cuda", 0)
    assert codes is not None
    block, scaling = block_of(recipe.format, k), scaling_of(recipe, BF16, k)
    common = {"CODES": codes, "X": 2, "BIAS": -1, "SCALE": int(recipe.format.scale), "BLOCK": block, "UNROLL": 1}
    common |= {"SCALING": scaling, "FP8": fp8_of(recipe.format)}
    room, processors = choose._chip(device)[0], choose._processors(device)
    likeliest: list[Wide] = []
    for shape in SHAPES_OF_TILES:
        if shape.width <= max(64, 2 * batch):
            every = divisions(common, shape, batch, n, k, processors, room)
            likeliest += sorted(every, key=lambda wide: cost(wide, k))[:most]
    return likeliest


def compile_all(every: set[tuple[tuple[str, int], ...]]) -> None:
    files, device, started = sources("wide"), torch.cuda.current_device(), time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.zeros(1, device="cuda")) as pool:
        list(pool.map(lambda defines: nvrtc.function(files, "wide", (*defines, *reading()), device, True), every))
    print(f"{len(every)} kernels compiled in {time.perf_counter() - started:.1f} s", flush=True)


def cublas(batch: int, n: int, k: int) -> float:
    weights = torch.randn(max(2, int(200e6 / (2 * n * k)) + 1), n, k, device="cuda", dtype=BF16)
    x = torch.randn(batch, k, device="cuda", dtype=BF16)
    return microseconds(lambda i: torch.nn.functional.linear(x, weights[i]), len(weights), 5)


def launch(wide: Wide, out: Tensor, x: Tensor, rows: Tensor, recipe: Recipe, i: int) -> None:
    launch_wide(wide, out, x, rows[i], recipe, None)


def sweep(specs: list[str], batches: list[int], seconds: float, most: int) -> tuple[list[dict[str, object]], int]:
    recipes = {spec: nc.codec(spec).recipe(torch.device("cuda")) for spec in specs}
    jobs = [(batch, shape, spec) for spec, batch, shape in itertools.product(specs, batches, SHAPES)]
    compile_all({wide.defines for b, (n, k), spec in jobs for wide in ways(recipes[spec], b, n, k, most)})
    found, bad, started, plain = [], 0, time.perf_counter(), {}
    for batch, (n, k), spec in jobs:
        if time.perf_counter() - started > seconds:
            print("out of time", flush=True)
            break
        if (batch, n, k) not in plain:
            plain[batch, n, k] = cublas(batch, n, k)
        recipe, base = recipes[spec], plain[batch, n, k]
        rows = rows_of(recipe, n, k, max(2, int(130e6 / (n * layout(recipe.format, k).row_bytes)) + 1))
        x, out = torch.randn(batch, k, device="cuda", dtype=BF16), torch.empty(batch, n, device="cuda", dtype=BF16)
        exact, bound = within(x, reference.decode(rows[0], k, torch.float64, recipe), None)
        tried = []
        for wide in ways(recipe, batch, n, k, most):
            launch(wide, out.fill_(torch.nan), x, rows, recipe, 0)
            off = ((out.double() - exact).abs() / bound).max().item()
            if not off <= 1:
                bad += 1
                print(
                    f"WRONG {spec} batch {batch} {n}x{k} {wide.shape} {wide.whole} {wide.parts}: {off:.3g}", flush=True
                )
            taken = microseconds(partial(launch, wide, out, x, rows, recipe), len(rows), 3)
            tried.append(
                {"us": taken, "shape": tuple(wide.shape), "whole": wide.whole, "parts": wide.parts, "off": off}
            )
        tried.sort(key=lambda line: line["us"])
        best = "  ".join(f"{line['us']:.1f} {line['shape']} {line['whole']}/{line['parts']}" for line in tried[:4])
        print(f"{batch:5d} {n}x{k} {spec:15s} cuBLAS {base:.1f}  {base / tried[0]['us']:.2f}x  {best}", flush=True)
        found.append({"spec": spec, "batch": batch, "n": n, "k": k, "cublas": base, "tried": tried})
    return found, bad


def report(specs: list[str], batches: list[int]) -> tuple[list[dict[str, object]], int]:
    """What the library does with these calls."""
    found, bad = [], 0
    for batch, (n, k) in itertools.product(batches, SHAPES):
        base = cublas(batch, n, k)
        line = f"{batch:5d} {n}x{k} cuBLAS {base:.1f} us"
        for spec in specs:
            codec = nc.codec(spec)
            recipe = codec.recipe(torch.device("cuda"))
            rows = rows_of(recipe, n, k, max(2, int(130e6 / (n * layout(recipe.format, k).row_bytes)) + 1))
            x = torch.randn(batch, k, device="cuda", dtype=BF16)
            exact, bound = within(x, reference.decode(rows[0], k, torch.float64, recipe), None)
            off = ((codec.linear(x, rows[0], None).double() - exact).abs() / bound).max().item()
            bad += not off <= 1
            taken = microseconds(lambda i, codec=codec, rows=rows, x=x: codec.linear(x, rows[i], None), len(rows), 7)
            line += f" | {spec} {taken:.1f} ({base / taken:.2f}x{'' if off <= 1 else ' WRONG'})"
            found.append({"spec": spec, "batch": batch, "n": n, "k": k, "cublas": base, "us": taken, "off": off})
        print(line, flush=True)
    return found, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--batches", default="64,128,256,2048")
    parser.add_argument("--specs", default=",".join(SPECS), help="separated by ';' where they have options")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--most", type=int, default=2, help="divisions to try of each shape")
    parser.add_argument("--json", default=os.environ.get("OUT") and f"{os.environ['OUT']}/gpu_wide.json")
    chosen = parser.parse_args()
    specs = chosen.specs.split(";") if ";" in chosen.specs else chosen.specs.split(",")
    batches = [int(batch) for batch in chosen.batches.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    found, bad = sweep(specs, batches, chosen.seconds, chosen.most) if chosen.sweep else report(specs, batches)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1))
    print(f"{bad} results outside their bound")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
