"""Every codec on the CPU: bytes, error and time, each time beside a copy of the same tensor in the same run.

    PYTHONPATH=src python bench/codec.py                       64 MB of fp32, one thread, every codec
    ... --codecs int8,int4:block=32  --size 16  --threads 2  --quick  --no-compile  --json PATH  --markdown PATH

`xcopy` is time over the time of `dst.copy_(src)` of the fp32 tensor, the limit. `share` is bytes read and
written a second over the copy's. On one thread, time is the CPU time of the calling thread, so that other processes on
the machine count little; codec and copy take turns, and the figure is the median of the rounds' ratios. Outputs are
ready (`out=`) except in the column `new`, where encode allocates. `sum4` is decode_sum of 4 rows over one decode of the
same total bytes, `reduce4` decode_sum_encode of 4 rows over the copy of the floats they hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import narrowcast as nc
from codec_report import OPERATIONS, Row, markdown, pretty, pretty_competitors, rest
from data import gaussian, laplace, real, sqnr
from machine import facts
from narrowcast.cli.shared.specs import split_specs

VARIANTS = (
    *("int8:zero_point=true", "int4:zero_point=true", "int8:stochastic=true", "int4:stochastic=true"),
    *("int8:block=row", "int4:block=row", "int8:block=32", "int4:block=32", "int8:block=64,scale=bf16"),
    *("sign:block=128", "fp8_e4m3:scale=none", "fp8_e5m2:scale=none"),
)
STRICT = ("int8", "int4", "bf16")
THREADED = ("int8", "int4", "bf16", "sign", "nf4", "fp8_e4m3")
RANKS, SMALL = 4, 1000
Work = Callable[[], object]
console = Console(width=max(172, Console().width))


# -- timing ----------------------------------------------------------------------------------------------------------


def seconds(run: Work, clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


def against(run: Work, competitor: Work, rounds: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of `run`, and its ratio to `competitor`: medians over rounds in which the two take turns."""
    run(), competitor()
    times, ratios = [], []
    for _ in range(rounds):
        before, mine, after = seconds(competitor, clock), seconds(run, clock), seconds(competitor, clock)
        times.append(mine)
        ratios.append(2 * mine / (before + after))
    return statistics.median(times), statistics.median(ratios)


def small_tensors(names: list[str], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Microseconds to nc.encode and to nc.decode a small tensor: medians of batches, the codecs taking turns."""
    works: list[Work] = []
    for spec in names:
        codec = nc.codec(spec)
        payload = nc.encode(x, codec, seed=1)
        works.append(lambda codec=codec: nc.encode(x, codec, seed=1))  # type: ignore[misc]
        works.append(lambda payload=payload: nc.decode(payload))  # type: ignore[misc]

    def batch(run: Work) -> float:
        return 1e4 * seconds(lambda: [run() for _ in range(100)], time.thread_time)

    batches = [[batch(run) for run in works] for _ in range(3 * rounds)]
    middle = [statistics.median(times) for times in zip(*batches, strict=True)]
    return {spec: middle[2 * i : 2 * i + 2] for i, spec in enumerate(names)}


# -- one codec -------------------------------------------------------------------------------------------------------


def measure(spec: str, x: Tensor, sources: dict[str, Tensor], rounds: int, clock: Callable[[], float]) -> Row:
    codec = nc.codec(spec)
    numel, copied = x.numel(), torch.empty_like(x)
    quarter = x.view(RANKS, -1)
    data = codec.encode(x, 1)
    out, back, total = torch.empty_like(data), torch.empty_like(x), torch.empty_like(quarter[0])
    ranks = codec.encode(quarter, 1)
    reduced = torch.empty_like(ranks[0])

    def copy() -> object:
        return copied.copy_(x)

    def decode() -> object:
        return codec.decode(data, numel, out=back)

    row: Row = {"codec": spec, "bytes": codec.row_bytes(numel) / numel}
    row["sqnr"] = {name: sqnr(y, nc.decode(nc.encode(y, codec, seed=1))) for name, y in sources.items()}
    for name, run in (("encode", lambda: codec.encode(x, 1, out=out)), ("decode", decode)):
        took, ratio = against(run, copy, rounds, clock)
        share = (x.nbytes + data.nbytes) / (2 * x.nbytes) / ratio
        row[name] = {"GB/s": x.nbytes / took / 1e9, "xcopy": ratio, "share": share}
    row["new"] = against(lambda: codec.encode(x, 1), copy, max(3, rounds // 2), clock)[1]
    row["sum4"] = against(lambda: codec.decode_sum(ranks, numel // RANKS, out=total), decode, rounds, clock)[1]
    fused = against(lambda: codec.decode_sum_encode(ranks, numel // RANKS, 1, out=reduced), copy, rounds, clock)
    row["reduce4"] = fused[1]
    return row


def limits(spec: str, row: Row) -> Iterator[tuple[str, float, float]]:
    """Every figure that has a target, with it."""
    ratio = 1.0 if spec in STRICT else 1.5
    yield "encode", row["encode"]["xcopy"], ratio
    yield "decode", row["decode"]["xcopy"], ratio
    yield "sum4", row["sum4"], 1.5
    yield "us", row["small"][0], 15.0


def two_threads(spec: str, x: Tensor, rounds: int) -> Row:
    """One thread's time over two threads': by the wall clock, so the best of many, in turns of ten."""
    codec = nc.codec(spec)
    data, back = codec.encode(x, 1), torch.empty_like(x)
    works: list[Work] = [lambda: codec.encode(x, 1, out=data), lambda: codec.decode(data, x.numel(), out=back)]
    gain: Row = {"codec": spec}
    before = torch.get_num_threads()
    for name, run in zip(OPERATIONS, works, strict=True):
        best = {1: float("inf"), 2: float("inf")}
        for _ in range(3 * rounds):
            for threads in best:
                torch.set_num_threads(threads)
                best[threads] = min(best[threads], *(seconds(run, time.perf_counter) for _ in range(10)))
        gain[name] = best[1] / best[2]
    torch.set_num_threads(before)
    gain["over"] = [name for name in OPERATIONS if gain[name] <= 1.0]
    return gain


# -- competitors: what a user would write for int8 in blocks of 128, and bitsandbytes' nf4 in blocks of 64 -----------


def plain_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scale).round().clamp(-127, 127).to(torch.int8), scale


def plain_decode(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale


def of_bitsandbytes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from bitsandbytes import functional

    def encode(x: Tensor) -> tuple[Tensor, Any]:
        codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
        return codes, state

    return encode, functional.dequantize_4bit


COMPETITORS: dict[str, Callable[[], tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "eager torch int8": lambda: (plain_encode, plain_decode),
    "torch.compile int8": lambda: (torch.compile(plain_encode), torch.compile(plain_decode)),
    "bitsandbytes nf4": of_bitsandbytes,
}
"""Names, and what makes each one's encode and decode."""


def competitors(x: Tensor, compiled: bool, rounds: int, clock: Callable[[], float]) -> list[Row]:
    rows: list[Row] = []
    for name, make in COMPETITORS.items():
        if compiled or "compile" not in name:
            try:
                rows.append({"codec": name, **competitor(*make(), x, max(3, rounds // 2), clock)})
            except Exception as error:  # torch.compile needs a C++ compiler, bitsandbytes may not be there
                rows.append({"codec": name, "error": str(error).strip().splitlines()[-1][:100]})
    return rows


def competitor(
    encode: Callable[..., Any], decode: Callable[..., Any], x: Tensor, rounds: int, clock: Callable[[], float]
) -> Row:
    copied, encoded = torch.empty_like(x), encode(x)
    held = sum(getattr(part, "absmax", part).nbytes for part in encoded)  # bitsandbytes keeps its scales in a state
    row: Row = {"bytes": held / x.numel(), "sqnr": sqnr(x, decode(*encoded).view_as(x))}
    for what, run in (("encode", lambda: encode(x)), ("decode", lambda: decode(*encoded))):
        took, ratio = against(run, lambda: copied.copy_(x), rounds, clock)
        row[what] = {"GB/s": x.nbytes / took / 1e9, "xcopy": ratio}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default="")
    parser.add_argument("--size", type=int, default=64, help="MB of fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="16 MB, few rounds")
    parser.add_argument("--no-compile", action="store_true", help="leave the torch.compile competitor out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    size, rounds = (min(given.size, 16), 3) if given.quick else (given.size, 9)
    torch.set_num_threads(given.threads)
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    results: Row = {
        "machine": facts(data=f"{size} MB of fp32, {given.threads} thread{'s' if given.threads > 1 else ''}"),
        "codecs": [],
        "two threads": [],
    }
    console.print(*(f"{key}: {value}" for key, value in results["machine"].items()), sep="\n", highlight=False)

    with console.status("training a small model for its gradients"):
        sources = {"gauss": gaussian(1 << 19), "laplace": laplace(1 << 19), "gradients": real().gradients}
    x = gaussian(size << 18)
    names = split_specs(given.codecs) if given.codecs else [*nc.list_codecs(), *VARIANTS]
    for spec in track(names, "codecs", console=console, transient=True):
        results["codecs"].append(measure(spec, x, sources, rounds, clock))
    with console.status("small tensors, competitors, threads"):
        small = small_tensors(names, x[:SMALL].clone(), rounds)
        for row in results["codecs"]:
            row["small"] = small[row["codec"]]
            row["over"] = [what for what, value, limit in limits(row["codec"], row) if value > limit]
        results["competitors"] = competitors(x, not given.no_compile, rounds, clock)
        chosen = [spec for spec in names if spec in THREADED or given.codecs]
        results["two threads"] = [two_threads(spec, x, rounds) for spec in chosen] if os.cpu_count() != 1 else []

    console.print(pretty(results["codecs"]), pretty_competitors(results["competitors"]))
    for line in rest(results):
        console.print(line, highlight=False)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    if given.markdown:
        given.markdown.write_text(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
