"""The kernels of codecs on a GPU: first their bits against the reference, then their time against a copy.

    PYTHONPATH=src python3 bench/gpu.py             checks, then times every codec on 1 GiB of fp32
    PYTHONPATH=src python3 bench/gpu.py --sweep     tries tiles of other sizes for the codecs that have a target
    PYTHONPATH=src python3 bench/gpu.py --variants  times the reduction of 4-bit codes in other ways, and checks each
    ... --only int4,nf4   --skip-check   --json PATH (default: $OUT/gpu.json where OUT is set)

Shares are of a device-to-device copy in the same run, both counted as bytes read plus bytes written. The target is 90%
for encode, decode and the decode-sum-encode of 8 rows. Checks run in several processes, since what takes time is
compiling; outputs are poisoned first. Exits with 1 if any bit differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Levels
from narrowcast.kernels import reference
from narrowcast.kernels.cuda import signs, sums

TARGETS = ("int8", "int4", "fp8_e4m3", "nf4", "apot4")
OTHERS = (
    "raw",
    "bf16",
    "fp16",
    "fp8_e5m2",
    "sign",
    "int2",
    "int3",
    "int5",
    "int6",
    "apot8",
    "pot5",
    "fp8_e4m3:scale=none",
    "int8:zero_point=true",
    "int8:stochastic=true",
    "int8:block=1024",
    "int8:block=row",
)
VARIANTS = (
    *("int8:block=8", "int8:block=24", "int8:block=4096", "int8:block=row", "int8:scale=bf16", "int8:scale=fp16"),
    *(
        "int8:scale=e8m0",
        "int8:zero_point=true",
        "int8:stochastic=true",
        "int8:block=16392",
        "int6:block=24,scale=fp16",
    ),
    *("int5:block=32,zero_point=true", "int4:block=8", "int4:block=24,scale=e8m0", "int4:block=32,scale=fp32"),
    *("int4:block=800", "int4:block=128,scale=fp16,zero_point=true", "int4:block=row", "int4:stochastic=true"),
    *("int4:block=32,zero_point=true,stochastic=true", "int3:block=8", "int3:block=24,zero_point=true"),
    *("int3:block=row,stochastic=true", "int2:block=8,scale=e8m0", "int2:block=24,zero_point=true", "int2:scale=fp32"),
    *("sign:block=8", "sign:block=24,scale=fp32", "sign:block=4096,scale=fp16", "sign:block=row", "sign:block=65536"),
    *("fp8_e4m3:block=32", "fp8_e4m3:block=24,scale=e8m0", "fp8_e4m3:block=row,scale=bf16", "fp8_e5m2:block=128"),
    *("apot4:k=3", "apot5:k=5,block=32", "apot6:scale=e8m0", "pot5:block=row", "nf4:block=24,scale=fp32"),
    *("nf4:block=row,scale=e8m0", "nf4:block=800,scale=fp16", "levels:table=-1.0|0.0|1.0", "levels:table=-1.0|1.0"),
    "levels:table=-0.3|-0.1|0.0|0.7|5.0,block=24,scale=fp32",
)
TABLES = {"levels40": 40, "levels200": 200}
DTYPES = (torch.float16, torch.bfloat16, torch.float64)
FLT_MAX = torch.finfo(torch.float32).max
RANKS = 8


def codec_of(name: str) -> nc.Codec:
    if name in TABLES:
        levels = torch.linspace(-1, 1, TABLES[name], dtype=torch.float64)
        return Levels(levels.sign() * levels.abs() ** 3)
    return nc.codec(name)


def kernel() -> Any:
    from narrowcast.kernels import triton as gpu

    found, why = gpu.load()
    if found is None:
        raise SystemExit(why)
    return found


# -- bits ------------------------------------------------------------------------------------------------------------


def every_kind(numel: int, seed: int) -> Tensor:
    """Rows of random numbers and of what has gone wrong somewhere, on the CPU."""
    random = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    place = torch.arange(numel)
    infinite, lost = random.clone(), random.clone()
    infinite[numel // 2] = -torch.inf
    lost[numel // 3] = torch.nan
    lost[-1] = torch.tensor(-0x3FF00F, dtype=torch.int32).view(torch.float32)
    kinds = [
        random,
        random * torch.exp2((place // 40 % 25 - 12).float()),
        torch.where(place % 37 == 5, random * 1e6, random),
        random * 2.0**-135,
        torch.where(place % 3 == 0, 0.0, -0.0),
        torch.where(place % 2 == 0, FLT_MAX, -FLT_MAX) * random.clamp(-1, 1),
        torch.full((numel,), -FLT_MAX),
        random.round() + 0.5,
        infinite,
        lost,
    ]
    return torch.stack(kinds)


def same(a: Tensor, b: Tensor) -> bool:
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


def checks(name: str, seed: int) -> Iterator[tuple[str, bool]]:
    """Every comparison for one codec; what is compared with is the reference on the CPU."""
    codec = codec_of(name)
    there, here = codec.recipe(torch.device("cuda")), codec.recipe(torch.device("cpu"))
    triton = kernel()

    def encoded(rows: Tensor) -> Tensor:
        out = torch.full((len(rows), codec.row_bytes(rows.shape[1])), 0xA5, dtype=torch.uint8, device="cuda")
        triton.encode(out, rows.cuda(), there, seed)
        return out.cpu()

    def decoded(data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(data), numel), 7.0, dtype=dtype, device="cuda")
        triton.decode(out, data.cuda(), there)
        return out.cpu()

    def summed(data: Tensor, numel: int, own: Tensor | None, rank: int, divisor: int) -> Iterator[bool]:
        mine = None if own is None else own.cuda()
        total = torch.full((numel,), 7.0, device="cuda")
        triton.decode_sum(total, data.cuda(), there, mine, rank, divisor)
        yield same(total.cpu(), reference.decode_sum(data, numel, torch.float32, here, own, rank, divisor))
        expected = reference.decode_sum_encode(data, numel, here, own, rank, divisor, seed)
        good = True
        for fewest in (1 << 62, 1):  # in Triton, and where there is one in a kernel for large sums
            sums.FEWEST = signs.FEWEST = fewest
            out = torch.full((data.shape[1],), 0xA5, dtype=torch.uint8, device="cuda")
            triton.decode_sum_encode(out, data.cuda(), numel, there, mine, rank, divisor, seed)
            good = good and same(out.cpu(), expected)
        yield good

    rows = every_kind(1000, seed)
    data = reference.encode(rows, here, seed)
    yield "encode rows of every kind", same(encoded(rows), data)
    yield (
        "decode rows of every kind",
        same(decoded(data, 1000, torch.float32), reference.decode(data, 1000, torch.float32, here)),
    )
    noise = torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    yield (
        "decode any bytes",
        same(decoded(noise, 1000, torch.float32), reference.decode(noise, 1000, torch.float32, here)),
    )

    for numel in (1 << 17, (1 << 17) + 29):
        # The first four kinds in one row: finite, so that sums mean something for one block per row too.
        ranks = torch.stack([every_kind(numel // 4 + 9, seed + r)[:4].reshape(-1)[:numel] for r in range(RANKS)])
        data = reference.encode(ranks, here, seed)
        yield f"encode {numel}", same(encoded(ranks[:1]), data[:1])
        yield (
            f"decode {numel}",
            same(decoded(data[:1], numel, torch.float32), reference.decode(data[:1], numel, torch.float32, here)),
        )
        for what, good in zip(("decode_sum", "decode_sum_encode"), summed(data, numel, None, 0, 1), strict=True):
            yield f"{what} {numel}", good
    if name not in (*TARGETS, *OTHERS):
        return
    for dtype in DTYPES:
        rows = every_kind(333, seed).to(dtype)
        data = reference.encode(rows, here, seed)
        yield f"encode {dtype}", same(encoded(rows), data)
        yield f"decode {dtype}", same(decoded(data, 333, dtype), reference.decode(data, 333, dtype, here))
    for ranks_, rank, divisor in ((3, 0, 3), (4, 3, 4), (20, 1, 20)):
        rows = torch.stack([every_kind(1100, seed + r)[:4].reshape(-1) for r in range(ranks_)])
        data = reference.encode(rows, here, seed)
        for what, good in zip(
            ("decode_sum", "decode_sum_encode"), summed(data, 4400, -rows[0].half(), rank, divisor), strict=True
        ):
            yield f"{what} of {ranks_} with own {rank} over {divisor}", good


def check_some(names: list[str], seed: int) -> tuple[int, list[str]]:
    """A worker's share: how many comparisons held, and which did not. An error on the device ends it."""
    torch.set_num_threads(1)
    passed, failed = 0, []
    for place, name in enumerate(names):
        try:
            for what, good in checks(name, seed):
                passed += good
                if not good:
                    failed.append(f"{name}: {what}")
        except Exception as error:
            failed.append(f"{name}: {last_lines(error)}")
            if "CUDA" in str(error):
                failed.append(f"not checked after that: {', '.join(names[place + 1 :])}")
                break
    return passed, failed


def check(names: list[str], seed: int, limit: float) -> tuple[int, list[str]]:
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    shares = [names[i::workers] for i in range(workers) if names[i::workers]]
    passed, failed = 0, []
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    jobs = {pool.submit(check_some, share, seed): share for share in shares}
    try:
        for job in as_completed(jobs, timeout=limit):
            try:
                good, bad = job.result()
                passed, failed = passed + good, failed + bad
            except Exception as error:
                failed.append(f"{jobs[job]}: {last_lines(error)}")
    except Late:
        late = [name for job, share in jobs.items() if not job.done() for name in share]
        failed.append(f"not finished after {limit:.0f} s: {', '.join(late)}")
        for process in pool._processes.values():
            process.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    return passed, failed


def last_lines(error: BaseException) -> str:
    return " | ".join("".join(traceback.format_exception(error)).strip().splitlines()[-3:])[-600:]


# -- time ------------------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], object], rounds: int = 15) -> float:
    """The median of `rounds` runs, each between two events, after a warm-up."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, stop in marks:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in marks)


def operations(codec: nc.Codec, x: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """The three operations on a row x, each with the bytes it must move."""
    triton, recipe, numel = kernel(), codec.recipe(x.device), x.shape[1]
    data = torch.empty(RANKS, codec.row_bytes(numel), dtype=torch.uint8, device=x.device)
    for rank in range(RANKS):
        triton.encode(data[rank : rank + 1], x, recipe, rank)
    one, back = torch.empty_like(data[:1]), torch.empty_like(x)
    return {
        "encode": (lambda: triton.encode(one, x, recipe, 1), x.nbytes + one.nbytes),
        "decode": (lambda: triton.decode(back, data[:1], recipe), x.nbytes + one.nbytes),
        "decode_sum_encode": (
            lambda: triton.decode_sum_encode(one[0], data, numel, recipe, None, 0, 1, 1),
            (RANKS + 1) * one.nbytes,
        ),
    }


def timed(codec: nc.Codec, x: Tensor, copy: float) -> dict[str, dict[str, float]]:
    found = {}
    for name, (run, moved) in operations(codec, x).items():
        ms = milliseconds(run)
        found[name] = {"ms": ms, "TB/s": moved / ms / 1e9, "share": moved / ms / 1e9 / copy}
    return found


def copy_speed(x: Tensor) -> float:
    to = torch.empty_like(x)
    return 2 * x.nbytes / milliseconds(lambda: to.copy_(x), 30) / 1e9


def competitors(x: Tensor, copy: float) -> dict[str, dict[str, float]]:
    """torch.compile of what a user would write for int8 in blocks of 128, and the eager reference."""

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.view(-1, 128)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        return (blocks / scale).round().clamp(-127, 127).to(torch.int8), scale

    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale

    def decode_sum_encode(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return encode((codes * scale).sum(0))

    found = {}
    compiled = [torch.compile(part) for part in (encode, decode, decode_sum_encode)]
    codes, scale = compiled[0](x)
    one = codes.nbytes + scale.nbytes
    many = codes.expand(RANKS, -1, -1).contiguous(), scale.expand(RANKS, -1, -1).contiguous()
    int8 = nc.codec("int8").recipe(x.device)
    for name, run, moved in (
        ("torch.compile encode", lambda: compiled[0](x), x.nbytes + one),
        ("torch.compile decode", lambda: compiled[1](codes, scale), x.nbytes + one),
        ("torch.compile decode_sum_encode", lambda: compiled[2](*many), (RANKS + 1) * one),
        ("reference encode", lambda: reference.encode(x, int8, 0), x.nbytes + one),
    ):
        ms = milliseconds(run, 5)
        found[name] = {"ms": ms, "TB/s": moved / ms / 1e9, "share": moved / ms / 1e9 / copy}
    return found


# -- tiles of other sizes --------------------------------------------------------------------------------------------


def candidates() -> list[tuple[int, int]]:
    return [
        (elements, warps)
        for elements in (1024, 2048, 4096, 8192, 16384)
        for warps in (1, 2, 4, 8, 16)
        if 8 <= elements // (32 * warps) <= 64
    ]


def set_tile(elements: int, warps: int) -> None:
    from narrowcast.kernels.triton import cuts

    cuts.TILES.update({key: cuts.Tile(elements, warps) for key in cuts.TILES})


def compile_ahead(name: str, elements: int, warps: int) -> None:
    """In a worker: leaves the kernels in Triton's cache, which all processes share."""
    set_tile(elements, warps)
    for run, _ in operations(nc.codec(name), torch.randn(1, 1 << 20, device="cuda")).values():
        run()
    torch.cuda.synchronize()


def sweep(names: list[str], x: Tensor, copy: float) -> dict[str, Any]:
    tried: dict[str, Any] = {}
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_ahead, name, *tile) for name in names for tile in candidates()]
        lost = [last_lines(error) for job in jobs if (error := job.exception()) is not None]
    for line in lost[:5]:
        print("compile:", line)
    for name in names:
        for elements, warps in candidates():
            set_tile(elements, warps)
            try:
                for operation, (run, moved) in operations(nc.codec(name), x).items():
                    share = moved / milliseconds(run, 7) / 1e9 / copy
                    tried.setdefault(f"{name} {operation}", {})[f"{elements}/{warps}"] = round(share, 4)
            except Exception as error:
                print(name, elements, warps, last_lines(error))
        for operation in ("encode", "decode", "decode_sum_encode"):
            best = sorted(tried.get(f"{name} {operation}", {}).items(), key=lambda pair: -pair[1])[:5]
            print(f"{name:10} {operation:7}", "  ".join(f"{tile}: {share:.1%}" for tile, share in best), flush=True)
    return tried


# -- other ways to sum 4-bit codes ------------------------------------------------------------------------------------

WAYS = {
    "int4": (0, 0b01000100, 0b01010100, 0b10010100, 0b01110100, 0b01101010, 0b10010010),
}
"""What `cuts.BYTEWISE` may be."""
WAY_TILES = ((1024, 1), (1024, 2), (2048, 2), (4096, 2), (4096, 4))


def set_way(tile: tuple[int, int], mask: int) -> None:
    from narrowcast.kernels.triton import cuts

    cuts.TILES["decode_sum_encode of integers", 4] = cuts.Tile(*tile)
    cuts.BYTEWISE = mask


def sums_right(name: str, tile: tuple[int, int], mask: int) -> bool:
    """In a worker: compiles the reduction, and compares one of full tiles with the reference."""
    torch.set_num_threads(1)
    set_way(tile, mask)
    codec, numel = nc.codec(name), 1 << 18
    rows = torch.stack([every_kind(numel // 4, rank)[:4].reshape(-1) for rank in range(RANKS)])
    here = codec.recipe(torch.device("cpu"))
    data = reference.encode(rows, here, 0)
    out = torch.full((data.shape[1],), 0xA5, dtype=torch.uint8, device="cuda")
    kernel().decode_sum_encode(out, data.cuda(), numel, codec.recipe(torch.device("cuda")), None, 0, 1, 0)
    return same(out.cpu(), reference.decode_sum_encode(data, numel, here, None, 0, 1, 0))


def variants(names: list[str], x: Tensor, copy: float) -> dict[str, Any]:
    tried: dict[str, Any] = {"failed": []}
    ways = [(name, tile, mask) for name in names for mask in WAYS.get(name, (0,)) for tile in WAY_TILES]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {way: pool.submit(sums_right, *way) for way in ways}
        for way, job in jobs.items():
            error = job.exception()
            if error is not None or not job.result():
                tried["failed"].append(f"{way}: {'other bits' if error is None else last_lines(error)}")
    for name, tile, mask in ways:
        set_way(tile, mask)
        run, moved = operations(nc.codec(name), x)["decode_sum_encode"]
        share = moved / milliseconds(run, 9) / 1e9 / copy
        tried.setdefault(name, {})[f"{mask:08b} {tile[0]}/{tile[1]}"] = round(share, 4)
    for name in names:
        ranked = sorted(tried.get(name, {}).items(), key=lambda pair: -pair[1])
        print(name, *(f"  {way}: {share:.1%}" for way, share in ranked), sep="\n", flush=True)
    return tried


# -- the whole -------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any], copy: float) -> None:
    print(f"\ncopy {copy:.2f} TB/s; per operation: ms, TB/s, share of the copy (decode_sum_encode: of {RANKS} rows)")
    print(f"{'codec':22} {'encode':>21} {'decode':>21} {'decode_sum_encode':>21}")
    for name, found in results["codecs"].items():
        if "error" in found:
            print(f"{name:22} {found['error'][:90]}")
            continue
        cells = (f"{f['ms']:7.3f} {f['TB/s']:5.2f} {f['share']:6.1%}" for f in found.values())
        print(f"{name:22} " + " ".join(f"{cell:>21}" for cell in cells))
    for name, f in results["competitors"].items():
        print(f"{name:22} {f['ms']:7.3f} ms {f['TB/s']:5.2f} TB/s {f['share']:6.1%}" if "ms" in f else f"{name} {f}")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sweep", action="store_true")
    options.add_argument("--variants", action="store_true")
    options.add_argument("--only", default="")
    options.add_argument("--skip-check", action="store_true")
    options.add_argument("--check-limit", type=float, default=200.0)
    options.add_argument("--log2", type=int, default=28, help="elements timed, as a power of two")
    options.add_argument(
        "--json", type=Path, default=Path(os.environ["OUT"]) / "gpu.json" if "OUT" in os.environ else None
    )
    given = options.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu.py needs CUDA")
        return 1
    only = [name for name in given.only.split(",") if name]
    import triton

    seed = int(time.time()) % 100_000
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, seed {seed}"
    print(machine, flush=True)
    results: dict[str, Any] = {"machine": machine, "codecs": {}, "competitors": {}, "failed": []}
    if not (given.skip_check or given.sweep or given.variants):
        names = only or list(dict.fromkeys((*nc.list_codecs(), *OTHERS, *VARIANTS, *TABLES)))
        began = time.time()
        passed, failed = check(names, seed, given.check_limit)
        results |= {"passed": passed, "failed": failed}
        print(f"{passed} comparisons with the reference hold, {len(failed)} do not ({time.time() - began:.0f} s)")
        print("\n".join(failed[:20]), flush=True)

    if given.sweep or given.variants:  # of Triton
        sums.FEWEST = signs.FEWEST = 1 << 62
    x = torch.randn(1, 1 << given.log2, device="cuda")
    copy = results["copy"] = copy_speed(x)
    if given.sweep:
        results["sweep"] = sweep(only or list(TARGETS), x, copy)
    elif given.variants:
        results["variants"] = variants(only or list(WAYS), x, copy)
        results["failed"] = results["variants"]["failed"]
        print("\n".join(results["failed"]) or "all bits agree")
    else:
        for name in only or (*TARGETS, *OTHERS):
            try:
                results["codecs"][name] = timed(codec_of(name), x, copy)
            except Exception as error:
                results["codecs"][name] = {"error": last_lines(error)}
        try:
            results["competitors"] = {} if only else competitors(x, copy)
        except Exception as error:
            results["competitors"] = {"error": last_lines(error)}
        results["copy again"] = copy_speed(x)
        table(results, copy)
        print(f"copy again {results['copy again']:.2f} TB/s")
        print(f"{len(results['failed'])} comparisons failed" if results["failed"] else "all bits agree")
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1))
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
