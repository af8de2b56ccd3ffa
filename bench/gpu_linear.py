"""Linear layers on encoded weights on a GPU: first their numbers against fp64, then their time against rivals and the limit.

    PYTHONPATH=src python3 bench/gpu_linear.py             checks, then times batches 1, 8 and 16 at four shapes
    PYTHONPATH=src python3 bench/gpu_linear.py --sweep     tries other cuts of the work for the formats that have a target
    ... --skip-check   --json PATH (default: $OUT/gpu_linear.json where OUT is set)

The limit is reading the encoded weights at the read bandwidth measured in the same run. Weights rotate past the L2 cache,
and calls are replayed as a CUDA graph. Exits with 1 if a number is outside its bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.kernels import gpu_linear, nvrtc
from narrowcast.kernels.nvrtc import Int

SHAPES = ((4096, 4096), (22016, 4096), (32000, 4096), (4096, 11008))
CODECS = ("int8:block=row", "int8", "int4:block=128", "int4", "nf4", "apot4", "fp8_e4m3")
READ = """
extern "C" __global__ void read_all(const uint4* p, unsigned* out, long long n) {
    unsigned sum = 0;
    long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
        #pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(p + i + j * step);
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
    big, out = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = nvrtc.function(path, "read_all", (), torch.cuda.current_device())
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


def check() -> int:
    """How many results are outside their bound."""
    bad = total = 0
    specs = (*CODECS, "int8:block=32", "int8:block=64,scale=bf16", "int4:block=32", "int4:block=row", "nf4:block=128")
    specs = (*specs, "int4:block=256,scale=e8m0", "int4:scale=fp16", "fp8_e5m2", "fp8_e4m3:block=128", "apot8", "pot4")
    specs = (*specs, "int3", "int2", "int8:zero_point=true", "sign", "bf16", "apot5", "int4:block=24", "int6:block=row")
    shapes = ((1, 256), (17, 512), (100, 4096 + 64), (64, 11008), (16, 33 * 8), (5, 100))
    for spec, (n, k), dtype in itertools.product(specs, shapes, (torch.bfloat16, torch.float16, torch.float32)):
        codec = nc.codec(spec)
        torch.manual_seed(n + k)
        rows = codec.encode(torch.randn(n, k, device="cuda") * 0.02)
        weight = codec.decode(rows, k, torch.float64)
        for batch, with_bias in (
            (1, True),
            (1, False),
            (2, True),
            (8, True),
            (13, False),
            (32, True),
            (64, True),
            (65, False),
        ):
            x = torch.randn(batch, k, device="cuda").to(dtype)
            bias = torch.randn(n, device="cuda").to(dtype) if with_bias else None
            y = codec.linear(x, rows, bias)
            same = torch.equal(y, codec.linear(x, rows, bias))
            exact = x.double() @ weight.t() + (0 if bias is None else bias.double())
            size = x.double().abs() @ weight.abs().t() + (0 if bias is None else bias.double().abs())
            # k fp32 additions, twice 2**-24 each since tensor cores cut instead of rounding; one rounding of each weight
            # where x is not fp32; one of the result.
            eps = torch.finfo(dtype).eps
            bound = (
                size * (k + 2) * 2.0**-23 + exact.abs() * eps / 2 + (size * eps / 2 if dtype != torch.float32 else 0)
            )
            bound = bound + torch.finfo(dtype).tiny
            off = ((y.double() - exact).abs() / bound).max().item()
            total += 1
            if not (off <= 1 and same):
                bad += 1
                print(
                    f"WRONG {spec} {n}x{k} {dtype} batch {batch} bias {with_bias}: {off:.3g} times the bound, same {same}"
                )
    print(f"{total} results, {bad} outside their bound")
    return bad


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
    jobs = [
        ("int8:block=row", 1),
        ("int8", 1),
        ("int4:block=128", 1),
        ("int4", 1),
        ("apot4", 1),
        ("int8", 8),
        ("int4", 8),
    ]
    jobs += [("int8:block=row", 16), ("int4", 16), ("fp8_e4m3", 1), ("int4", 64), ("int8", 64)]
    for (spec, batch), (n, k) in itertools.product(jobs, SHAPES):
        codec = nc.codec(spec)
        rows = rows_of(codec, n, k)
        x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(batch, n, device="cuda", dtype=torch.bfloat16)
        recipe = codec._recipe(x.device)
        base = gpu_linear._cut(x, rows[0], recipe, None)
        assert base is not None
        tried = []
        for cut in cuts(base, n):
            try:
                taken = microseconds(
                    lambda i, cut=cut: gpu_linear._launch(cut, out, x, rows[i], recipe, None), len(rows), 3
                )
            except RuntimeError as error:
                print("skipped", dict(cut.defines), cut.grid, str(error).splitlines()[0])
                continue
            keys = {key: value for key, value in cut.defines if key in ("ROWS", "TEAMS", "KS", "UNROLL", "WIDE")}
            tried.append({"us": taken, "grid": cut.grid, "kernel": cut.name, **keys})
        tried.sort(key=lambda line: line["us"])
        print(f"{spec} batch {batch} {n}x{k}, limit {n * rows.shape[2] / limit:.2f} us")
        for line in tried[:5]:
            print("   ", f"{line['us']:.2f}", {key: value for key, value in line.items() if key != "us"})
        found.append({"spec": spec, "batch": batch, "n": n, "k": k, "limit": n * rows.shape[2] / limit, "tried": tried})
    return found


def cuts(base: gpu_linear.Cut, n: int) -> list[gpu_linear.Cut]:
    fixed = dict(base.defines)
    made = []
    if base.name == "dot":
        for rows, teams, parts, unroll in itertools.product((1, 2, 4), (4, 8), (1, 2, 4), (2, 4, 8)):
            threads = 32 * teams * parts
            if threads > 1024 or rows * unroll > 16:
                continue
            for per in sorted({max(1, 1024 // threads), max(1, 2048 // threads), 9999}):
                defines = fixed | {"ROWS": rows, "TEAMS": teams, "KS": parts, "UNROLL": unroll}
                grid = min(132 * per, -(-n // (rows * teams)))
                made.append(base._replace(defines=tuple(defines.items()), grid=grid, threads=threads))
    else:
        for parts, unroll in itertools.product((2, 4, 8, 16), (1, 2, 4)):
            for per in (16, 32, 64):
                grid = min(max(132, 132 * per // parts), -(-n // 16))
                defines = fixed | {"KS": parts, "UNROLL": unroll}
                made.append(base._replace(defines=tuple(defines.items()), grid=grid, threads=32 * parts))
    return list({(cut.defines, cut.grid): cut for cut in made}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--batches", default="1,8,16,64")
    parser.add_argument("--json", default=os.environ.get("OUT") and f"{os.environ['OUT']}/gpu_linear.json")
    chosen = parser.parse_args()
    bad = 0 if chosen.skip_check else check()
    limit = read_bandwidth()
    found: dict[str, object] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_TBps": limit / 1e6,
    }
    print(f"{found['machine']}, torch {torch.__version__}, reads {limit / 1e6:.2f} TB/s")
    if chosen.sweep:
        found["sweep"] = sweep(limit)
    found["lines"] = report(limit, [int(batch) for batch in chosen.batches.split(",")])
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
