"""Linear layers on encoded weights on a GPU: first their numbers against fp64, then their time against the limit.

    PYTHONPATH=src python3 bench/gpu_linear.py             checks, then times batches 1, 8, 16 and 64 at four shapes
    PYTHONPATH=src python3 bench/gpu_linear.py --sweep     tries other cuts of the work
    ... --sweep-slices 32,64                               the same for cuda/slices.cu, at these batches
    ... --competitors --end-to-end                         other libraries' layers, and a 7B decoder's tokens a second
    ... --skip-check   --json PATH (default: $OUT/gpu_linear.json where OUT is set)

The limit is reading the encoded weights at the read bandwidth measured in the same run. Weights rotate past the L2
cache, and calls are replayed as a CUDA graph. Exits with 1 if a number is outside its bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import gpu_competitors
import narrowcast as nc
from narrowcast.kernels import reference
from narrowcast.kernels.cuda import choose, nvrtc
from narrowcast.kernels.cuda.cuts import Cut, tile_cut
from narrowcast.kernels.cuda.formats import block_of, codes_of, sources
from narrowcast.kernels.cuda.launch import launch_cut, launch_slices, reading
from narrowcast.kernels.cuda.slices import Slices, divide
from narrowcast.kernels.layout import Recipe

SHAPES = ((4096, 4096), (22016, 4096), (32000, 4096), (4096, 11008))
CODECS = ("int8:block=row", "int8", "int4:block=128", "int4", "nf4", "apot4", "fp8_e4m3")
READ = """
extern "C" __global__ void read_all(const uint4* p, unsigned* out, long long n) {
    unsigned sum = 0;
    long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += 8 * step) {
        uint4 v[8];
        #pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = i + j * step < n ? __ldcs(p + i + j * step) : make_uint4(0, 0, 0, 0);
        #pragma unroll
        for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 0x12345678) *out = sum;
}
"""


def microseconds(run: Callable[[int], object], count: int, repeats: int = 7) -> float:
    """The median time of one call out of a replayed graph, the weights taking turns."""
    for i in range(count):
        run(i)
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, 64 // count)
    with torch.cuda.graph(graph):
        for i in list(range(count)) * rounds:
            run(i)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / (count * rounds) * 1e3)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a microsecond, from a kernel that does nothing but read 1 GiB."""
    path = Path("/tmp/read_all.cu")
    path.write_text(READ)
    big = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = nvrtc.function((path,), "read_all", (), torch.cuda.current_device())
    units = big.numel() // 16
    best = min(
        microseconds(lambda _, grid=132 * many, threads=threads: kernel(grid, threads, 0, (big, out, units)), 1, 3)
        for many in (4, 8, 16, 32)
        for threads in (256, 512)
    )
    return big.numel() / best


def rows_of(codec: nc.Codec, n: int, k: int, count: int = 0) -> Tensor:
    """Encoded random weights, as often as it takes to pass the L2 cache."""
    one = codec.encode(torch.randn(n, k, device="cuda") * 0.02)
    return one.expand(count or max(2, int(200e6 / one.numel()) + 1), -1, -1).contiguous()


# -- numbers -----------------------------------------------------------------------------------------------------------


FUSED = (
    *CODECS,
    *("int8:block=32", "int8:block=64,scale=bf16", "int4:block=32", "int4:block=row", "nf4:block=128", "pot4"),
    *("int4:block=256,scale=e8m0", "int4:scale=fp16", "fp8_e5m2", "fp8_e4m3:scale=none", "apot8"),
)
OTHERS = ("int3", "int2", "int8:zero_point=true", "sign", "bf16", "apot5", "int4:block=24", "int6:block=row")
BATCHES = ((1, True), (1, False), (2, True), (8, True), (13, False), (33, True), (64, False), (65, False), (300, False))


def check(specs: tuple[str, ...]) -> int:
    """How many results are outside their bound."""
    bad = total = 0
    shapes = ((1, 256), (17, 512), (100, 4096 + 64), (64, 11008), (16, 33 * 8), (5, 100))
    for spec, (n, k), dtype in itertools.product(specs, shapes, (torch.bfloat16, torch.float16, torch.float32)):
        codec = nc.codec(spec)
        torch.manual_seed(n + k)
        recipe = codec.recipe(torch.device("cpu"))
        encoded = reference.encode(torch.randn(n, k) * 0.02, recipe, 0)
        rows, weight = encoded.cuda(), reference.decode(encoded, k, torch.float64, recipe).cuda()
        for batch, with_bias in BATCHES:
            if batch > 16 and not (spec in ("int8", "int4", "nf4") and dtype == torch.bfloat16):
                continue
            x = torch.randn(batch, k, device="cuda").to(dtype)
            bias = torch.randn(n, device="cuda").to(dtype) if with_bias else None
            y = codec.linear(x, rows, bias)
            same = torch.equal(y, codec.linear(x, rows, bias))
            exact, bound = within(x, weight, bias)
            off = ((y.double() - exact).abs() / bound).max().item()
            total += 1
            if not (off <= 1 and same):
                bad += 1
                print(
                    f"WRONG {spec} {n}x{k} {dtype} batch {batch} bias {with_bias}: {off:.3g} of the bound, same {same}"
                )
    print(f"{total} results, {bad} outside their bound")
    return bad


def within(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact result, and how far off one may be.

    k fp32 additions, twice 2**-24 each since tensor cores cut instead of rounding; one rounding of each weight where x
    is not fp32; one of the result.
    """
    exact = x.double() @ weight.t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.abs().t() + (0 if bias is None else bias.double().abs())
    eps, half = torch.finfo(x.dtype).eps, x.dtype != torch.float32
    bound = size * (x.shape[1] + 2) * 2.0**-23 + exact.abs() * eps / 2 + (size * eps / 2 if half else 0)
    return exact, bound + torch.finfo(x.dtype).tiny


# -- time --------------------------------------------------------------------------------------------------------------


def timed(codec: nc.Codec, n: int, k: int, batch: int, limit: float) -> dict[str, object]:
    rows = rows_of(codec, n, k)
    x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
    taken = microseconds(lambda i: codec.linear(x, rows[i], None), len(rows))
    return {"name": codec.spec, "us": taken, "share": n * rows.shape[2] / limit / taken}


def cublas(n: int, k: int, batch: int, limit: float) -> dict[str, object]:
    weights = torch.randn(max(2, int(200e6 / (2 * n * k)) + 1), n, k, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
    taken = microseconds(lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))
    return {"name": "bf16 cuBLAS", "us": taken, "share": 2 * n * k / limit / taken}


def report(limit: float, batches: list[int]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for batch, (n, k) in itertools.product(batches, SHAPES):
        lines = [cublas(n, k, batch, limit)] + [timed(nc.codec(spec), n, k, batch, limit) for spec in CODECS]
        for line in lines:
            found.append(line | {"batch": batch, "n": n, "k": k})
    header = f"{'us (share of reading its bytes)':28s}" + "".join(f"{n}x{k}".rjust(18) for n, k in SHAPES)
    for batch in batches:
        print(f"\nbatch {batch}\n{header}")
        for name in dict.fromkeys(str(line["name"]) for line in found):
            cells = [line for line in found if line["name"] == name and line["batch"] == batch]
            print(f"{name:28s}" + "".join(f"{c['us']:8.2f} ({c['share']:4.0%})".rjust(18) for c in cells))
    return found


# -- sweep -------------------------------------------------------------------------------------------------------------


def sweep(limit: float) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    jobs = [("int4:block=128", 1), ("int4", 1), ("apot4", 1), ("int8", 8), ("int4", 8), ("int4", 16)]
    jobs += [("apot4", 16)]
    for (spec, batch), (n, k) in itertools.product(jobs, SHAPES):
        if batch > 1 and (n, k) not in SHAPES[:2]:
            continue
        codec = nc.codec(spec)
        rows = rows_of(codec, n, k)
        x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(batch, n, device="cuda", dtype=torch.bfloat16)
        recipe = codec.recipe(x.device)
        base = choose.cut_of(x, rows[0], recipe, None)
        assert base is not None
        tried = []
        for cut in cuts(base, n, k):
            try:
                taken = microseconds(partial(launch, cut, out, x, rows, recipe), len(rows), 3)
            except RuntimeError as error:
                print("skipped", dict(cut.defines), cut.grid, str(error).splitlines()[0])
                continue
            keys = {
                key: value for key, value in cut.defines if key in ("ROWS", "TEAMS", "KS", "UNROLL", "RESIDENT", "TALL")
            }
            tried.append({"us": taken, "grid": cut.grid, "kernel": cut.name, **keys})
        tried.sort(key=lambda line: line["us"])
        print(f"{spec} batch {batch} {n}x{k}, limit {n * rows.shape[2] / limit:.2f} us")
        for line in tried[:5]:
            print("   ", f"{line['us']:.2f}", {key: value for key, value in line.items() if key != "us"})
        found.append({"spec": spec, "batch": batch, "n": n, "k": k, "limit": n * rows.shape[2] / limit, "tried": tried})
    return found


def sweep_slices(batches: list[int]) -> list[dict[str, object]]:
    """Other divisions of slices.cu."""
    jobs = list(itertools.product(CODECS[:5], batches, (SHAPES[1], SHAPES[0], SHAPES[3])))
    made = {job: divisions(*job) for job in jobs}
    with ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.zeros(1, device="cuda")) as pool:
        files, device = sources("slices"), torch.cuda.current_device()
        every = {slices.defines for ways in made.values() for slices in ways}
        list(pool.map(lambda defines: nvrtc.function(files, "slices", (*defines, *reading()), device, True), every))
    found: list[dict[str, object]] = []
    for (spec, batch, (n, k)), ways in made.items():
        codec = nc.codec(spec)
        rows = rows_of(codec, n, k)
        x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(batch, n, device="cuda", dtype=torch.bfloat16)
        recipe, tried = codec.recipe(x.device), []
        exact, bound = within(x, codec.decode(rows[0], k, dtype=torch.float32).double(), None)
        for slices in ways:
            in_slices(slices, out.fill_(torch.nan), x, rows, recipe, 0)
            if not bool(((out.double() - exact).abs() <= bound).all()):
                print("WRONG", spec, batch, n, k, slices)
            taken = microseconds(partial(in_slices, slices, out, x, rows, recipe), len(rows), 3)
            keys = {key: value for key, value in slices.defines if key in ("TEAM", "TALL", "KS", "STAGES")}
            tried.append({"us": taken, "parts": slices.parts, "grid": slices.grid, **keys})
        tried.sort(key=lambda line: line["us"])
        print(f"{spec} batch {batch} {n}x{k}, {len(tried)} ways")
        for line in tried[:6]:
            print("   ", f"{line['us']:.2f}", {key: value for key, value in line.items() if key != "us"})
        found.append({"spec": spec, "batch": batch, "n": n, "k": k, "tried": tried})
    return found


def divisions(spec: str, batch: int, shape: tuple[int, int]) -> list[Slices]:
    """The ways to divide a product that are worth a try."""
    recipe = nc.codec(spec).recipe(torch.device("cuda"))
    codes, block = codes_of(recipe.format), block_of(recipe.format, shape[1])
    assert codes is not None
    common = {"CODES": codes, "X": 2, "BIAS": -1, "SCALE": int(recipe.format.scale), "BLOCK": block, "UNROLL": 1}
    room, made = choose._chip(torch.device("cuda", 0))[0], {}
    ways = itertools.product((1, 4), (1, 2), (8, 12, 16), (3, 4))
    for team, tall, warps, stages in ways:
        tiles = -(-batch // 8) if team == 1 else next(count for count in (2, 4, 8) if batch <= 8 * count)
        sums = tall * tiles * 4 * (2 if block else 1)
        if sums > {16: 64, 12: 80}.get(warps, 160) or (team == 1 and (warps == 12 or stages > 3 or batch > 32)):
            continue
        fitting = 0
        for parts in (1, 2, 3, 4, 6, 8, 11, 12, 16):
            slices = divide(common, team, tiles, tall, warps, stages, parts, *shape, 132, room)
            if slices is not None and fitting < 3:
                fitting += 1
                made[slices] = None
    return list(made)


def in_slices(slices: Slices, out: Tensor, x: Tensor, rows: Tensor, recipe: Recipe, i: int) -> None:
    launch_slices(slices, out, x, rows[i], recipe, None)


def launch(cut: Cut, out: Tensor, x: Tensor, rows: Tensor, recipe: Recipe, i: int) -> None:
    launch_cut(cut, out, x, rows[i], recipe, None)


def cuts(base: Cut, n: int, k: int) -> list[Cut]:
    fixed = dict(base.defines)
    made = []
    if base.name == "dot":
        ways = ((4, 4, 2), (2, 8, 2), (4, 4, 4), (4, 8, 1), (4, 8, 2))
        for (rows, teams, parts), unroll, per in itertools.product(ways, (1, 2), (1024, 2048, 1 << 20)):
            threads = 32 * teams * parts
            defines = fixed | {"ROWS": rows, "TEAMS": teams, "KS": parts, "UNROLL": unroll}
            grid = min(132 * max(1, per // threads), -(-n // (rows * teams)))
            made.append(base._replace(defines=tuple(defines.items()), grid=grid, threads=threads))
        return made
    talls = (1,) if fixed["TILES"] == 0 else (1, 2, 4) if fixed["TILES"] <= 2 else (1, 2)
    for parts, tall, unroll, resident in itertools.product((2, 4, 8, 16), talls, (1, 2), (256, 512, 1024)):
        few = resident < 32 * parts or (fixed["TILES"] >= 4 and parts > 4) or resident != (1024 if tall == 1 else 512)
        if few or (fixed["TILES"] and unroll > 1) or (fixed["TILES"] < 2 and parts == 2):
            continue
        for per in (resident // 32, 1 << 10):
            grid = max(132, 132 * per // parts)
            more = (fixed["CODES"], fixed["WIDE"], fixed["TILES"], tall, parts, resident, n, k, grid)
            cut = tile_cut(fixed | {"UNROLL": unroll}, *more)
            made += [cut] if cut else []
    return list({(cut.defines, cut.grid): cut for cut in made}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--fused", action="store_true", help="check only the formats that kernels/cuda takes")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--sweep-slices", default="", help="batches at which other divisions of slices.cu are tried")
    parser.add_argument("--competitors", action="store_true")
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--batches", default="1,8,16,64")
    parser.add_argument("--json", default=os.environ.get("OUT") and f"{os.environ['OUT']}/gpu_linear.json")
    chosen = parser.parse_args()
    bad = 0 if chosen.skip_check else check(FUSED if chosen.fused else (*FUSED, *OTHERS))
    limit = read_bandwidth()
    found: dict[str, object] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_TBps": limit / 1e6,
    }
    print(f"{found['machine']}, torch {torch.__version__}, reads {limit / 1e6:.2f} TB/s")
    if chosen.sweep:
        found["sweep"] = sweep(limit)
    if chosen.sweep_slices:
        found["slices"] = sweep_slices([int(batch) for batch in chosen.sweep_slices.split(",")])
    found["lines"] = report(limit, [int(batch) for batch in chosen.batches.split(",") if batch])
    if chosen.competitors:
        found["competitors"] = gpu_competitors.competitors(SHAPES, microseconds, limit)
    if chosen.end_to_end:
        found["end_to_end"] = gpu_competitors.end_to_end()
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
