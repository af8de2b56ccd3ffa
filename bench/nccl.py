"""all_reduce over NCCL beside NCCL's own, with several ranks on one GPU; and how much of it hides behind matmuls.

    python bench/nccl.py                        2 and 4 ranks: tables
    ... --ranks 2  --sizes 64,1024  --contenders NCCL,int8  --out FOLDER
    ... --host                                  what a call of each size holds the host up for (nccl_host.py)

The ranks share the GPU by MPS, and NCCL takes its sockets over loopback (tests/distributed/one_gpu.py): its speed is
that of the processors, a few GB/s. `one` is a call with the GPU waited for, `row` a call of several in a row, `host`
how long the host was at it, in ms, each a median over the rounds. `x NCCL` is how many times faster than NCCL's fp32
in a row. `hidden` is the share of 64 MB reductions that takes no time beside matmuls: 1 - (both - matmuls) / alone,
the median of the rounds, and half of what the middle half of them spans. The matmuls' own time varies by a percent,
which is a tenth of one reduction in int8: so as many reductions (`times`) as take about half of the matmuls' time are
started after one matmul each, as DDP starts those of its buckets. `slowed` is what the matmuls take beside them: the
rest of `both` is reductions that end after the matmuls. The GPU's clock depends on what ran before: each of
the three comes after the same load, in an order drawn by lot.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests" / "distributed")]

import one_gpu  # noqa: E402

import nccl_host  # noqa: E402
from machine import sentence  # noqa: E402
from narrowcast import distributed as ncd  # noqa: E402

CONTENDERS = ("NCCL", "raw", "int8", "int4")
ROUNDS = 7
HIDDEN_MB = 64
HIDDEN_ROUNDS = 16
TIMES = {"NCCL": 1, "raw": 2, "int8": 4, "int4": 7}
"""So many reductions, one after the other, beside the matmuls."""
MATMULS = 12
LOAD = 4
"""Matmuls before each of what is timed."""


def reduce(contender: str, tensor: torch.Tensor, async_op: bool = False) -> Any:
    if contender == "NCCL":
        return dist.all_reduce(tensor, async_op=async_op)
    return ncd.all_reduce(tensor, codec=contender, async_op=async_op)


def timed(call: Callable[[], object], calls: int) -> dict[str, float]:
    """Medians over the rounds, in ms."""
    call()
    call()
    seconds: dict[str, list[float]] = {"one": [], "row": [], "host": []}
    for _ in range(ROUNDS):
        meet()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds["one"].append(time.perf_counter() - start)
        meet()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        seconds["host"].append((launched - start) / calls)
        seconds["row"].append((time.perf_counter() - start) / calls)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def meet() -> None:
    dist.barrier()
    torch.cuda.synchronize()


def hidden(contender: str) -> dict[str, float]:
    """Milliseconds of matmuls alone, of reductions alone, and of both; the share that is hidden, and its spread."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    tensor = torch.randn(HIDDEN_MB << 18, device="cuda")
    seconds: dict[str, list[float]] = {"matmuls": [], "alone": [], "both": []}
    slowed: list[float] = []
    order = random.Random(0)  # the same on all ranks
    for round_ in range(HIDDEN_ROUNDS + 1):
        for what, values in order.sample(list(seconds.items()), 3):
            for _ in range(LOAD):
                torch.mm(matrix, matrix)
            tensor.normal_()
            meet()
            start = time.perf_counter()
            works, first = [], torch.cuda.Event(enable_timing=True)
            first.record()
            for i in range(MATMULS):
                if what != "alone":
                    torch.mm(matrix, matrix)
                if what != "matmuls" and i < TIMES[contender]:
                    works.append(reduce(contender, tensor, True))
            last = torch.cuda.Event(enable_timing=True)
            last.record()
            for work in works:
                work.wait()
            torch.cuda.synchronize()
            if round_:
                values.append(1e3 * (time.perf_counter() - start))
                slowed += [first.elapsed_time(last)] if what == "both" else []
    medians = {what: statistics.median(values) for what, values in seconds.items()}
    medians["slowed"] = statistics.median(slowed)
    lost = [both - matmuls for both, matmuls in zip(seconds["both"], seconds["matmuls"], strict=True)]
    low, middle, high = (1.0 - quartile / medians["alone"] for quartile in statistics.quantiles(lost, n=4))
    return {**medians, "times": TIMES[contender], "hidden": middle, "spread": (low - high) / 2}


def rank_main(given: argparse.Namespace) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", rank=rank, world_size=world, timeout=limit, device_id=torch.device("cuda", 0))
    results: list[dict[str, Any]] = []
    for kb in given.sizes if given.host else ():
        for codec in ("raw", "int8"):
            results.append({"ranks": world, "kb": kb, "contender": codec, "host": nccl_host.pieces(kb, codec)})
        results[-1]["profile"] = nccl_host.profiled(kb, codec)
    for kb in () if given.host else given.sizes:
        tensor = torch.randn(kb * 256, device="cuda")
        for contender in given.contenders:
            tensor.normal_()
            times = timed(functools.partial(reduce, contender, tensor), 10 if kb < 5000 else 3)
            results.append({"ranks": world, "kb": kb, "contender": contender, **times})
    for contender in () if given.host or not given.overlap else given.contenders:
        results.append({"ranks": world, "contender": contender, **hidden(contender)})
        if rank == 0:
            print(results[-1], file=sys.stderr, flush=True)
    if rank == 0:
        print("RESULT" + json.dumps(results), flush=True)
    dist.destroy_process_group()


def measure(ranks: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks, and return what the first one says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--sizes", ",".join(map(str, given.sizes))]
    command += ["--contenders", ",".join(given.contenders)]
    command += ["--host"] * given.host + ["--no-overlap"] * (not given.overlap)
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **one_gpu.environment(rank), **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(ranks)
    ]
    said, _ = processes[0].communicate(timeout=500)
    for process in processes:
        process.wait(60)
    line = next(line for line in said.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))  # type: ignore[no-any-return]


def markdown(results: list[dict[str, Any]]) -> str:
    plain = {(r["ranks"], r["kb"]): r["row"] for r in results if "kb" in r and r["contender"] == "NCCL"}
    lines = ["| ranks | KB of fp32 | | one | row | host | x NCCL |", "|--:|--:|---|--:|--:|--:|--:|"]
    for r in results:
        if "kb" in r:
            times = " | ".join(f"{r[name]:.2f}" for name in ("one", "row", "host"))
            ratio = plain[r["ranks"], r["kb"]] / r["row"]
            lines.append(f"| {r['ranks']} | {r['kb']} | {r['contender']} | {times} | {ratio:.2f} |")
    lines += ["", "| ranks | | times | matmuls | slowed | alone | both | hidden |", "|--:|---|--:|--:|--:|--:|--:|--:|"]
    for r in results:
        if "both" in r:
            times = " | ".join(f"{r[name]:.1f}" for name in ("matmuls", "slowed", "alone", "both"))
            share = f"{r['hidden']:.0%} ± {r['spread']:.0%}"
            lines.append(f"| {r['ranks']} | {r['contender']} | {r['times']} | {times} | {share} |")
    return "\n".join(lines) + "\n"


def of_host(results: list[dict[str, Any]]) -> str:
    lines = ["| ranks | KB of fp32 | | piece | us |", "|--:|--:|---|---|--:|"]
    for r in results:
        for piece, time_ in r["host"].items():
            lines.append(f"| {r['ranks']} | {r['kb']} | {r['contender']} | {piece} | {time_:.1f} |")
    return "\n".join(lines) + "\n\n" + "\n\n".join(r["profile"] for r in results if "profile" in r) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument(
        "--sizes", default="64,1024,8192,32768", type=lambda text: [int(n) for n in text.split(",") if n]
    )
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="folder for nccl.md and nccl.json")
    parser.add_argument("--host", action="store_true", help="what a call holds the host up for, and nothing else")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(given)
        return
    if not torch.cuda.is_available():
        sys.exit("error: this needs a CUDA device.")
    with one_gpu.side_by_side() as together:
        if not together:
            print(
                "no nvidia-cuda-mps-control here: ranks take turns on the GPU, and times say nothing", file=sys.stderr
            )
        results = []
        for ranks in given.ranks:
            results += measure(ranks, given)
            print(f"{ranks} ranks: done", file=sys.stderr, flush=True)
    table = of_host(results) if given.host else markdown(results)
    print(table)
    if given.out:
        head = f"# all_reduce over NCCL, several ranks on one GPU\n\n{sentence()}. Command: `{' '.join(sys.argv)}`. "
        head += "What the columns mean stands at the top of bench/nccl.py.\n\n"
        given.out.mkdir(parents=True, exist_ok=True)
        name = "nccl-host" if given.host else "nccl"
        (given.out / f"{name}.md").write_text(head + table)
        (given.out / f"{name}.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
