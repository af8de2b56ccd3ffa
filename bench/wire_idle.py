"""When a rank's link is idle in an all_reduce of 32 MB: with rows that leave in advance of the agreement, and without.

    python bench/wire_idle.py [--rounds 7] [--tcp bbr] [--codecs int8,int4] [--megabytes 32]        (as root)

Four ranks at 1 Gbit/s in a network in a box (bench/netlab) make calls in both ways and in gloo's fp32, five in a row
for a time, in turns. Meanwhile the driver reads every rank's interface counters about once in a millisecond. A link is
idle where it carries less than half of its rate; what is missing to the rate then is idle time, in milliseconds of a
call, as a mean over ranks and all calls but the first of each five:

    start     from the call to the first row or header on the link
    first, middle, last   in the first quarter of the call, in the two in the middle, in the last one
    end       from the last byte on the link to the end of the call: what the others still send, and its decoding
"""

from __future__ import annotations

import argparse
import bisect
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from machine import sentence  # noqa: E402
from narrowcast import distributed as ncd  # noqa: E402
from narrowcast.distributed.transport.gloo import GlooWire  # noqa: E402
from narrowcast.netlab.tcp import choose  # noqa: E402

RANKS, RATE, REPEAT = 4, 1e9, 5
ON_WIRE = 1514 / 1448 * 8 / RATE
"""Seconds that the link needs for a byte of payload."""
SPANS = ("start", "first", "middle", "last", "end")


def rank_main(job: dict[str, Any]) -> None:
    rank, folder = int(os.environ["RANK"]), Path(job["folder"])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    possible, allowed = GlooWire.in_advance.fget, True  # type: ignore[attr-defined]
    GlooWire.in_advance = property(lambda wire: possible(wire) if allowed else 0)  # type: ignore[assignment, method-assign]
    x, lines = torch.randn(int(job["megabytes"] * (1 << 18))), []
    for turn in range(job["rounds"] + 1):  # the first is a warm-up
        for way, codec in [("gloo", "fp32"), *((way, c) for c in job["codecs"] for way in ("after", "in advance"))]:
            allowed = way == "in advance"
            x.mul_(RANKS**-REPEAT)
            dist.barrier()
            processor, moments = time.process_time(), [time.monotonic()]
            for _ in range(REPEAT):
                dist.all_reduce(x) if way == "gloo" else ncd.all_reduce(x, codec=codec)
                moments.append(time.monotonic())
            spent = time.process_time() - processor
            slowest = torch.tensor(moments[-1] - moments[0], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                lines.append({"key": (codec, way), "moments": moments, "ms": slowest.item(), "processor": spent})
    dist.barrier()
    (folder / f"calls{rank}").write_text(json.dumps(lines))
    dist.destroy_process_group()


def sample(folder: Path, process: subprocess.Popen[bytes]) -> list[tuple[float, ...]]:
    """Moments, and the bytes that each rank had sent by then, until the run is over."""
    names = [folder / f"pid{rank}" for rank in range(RANKS)]
    while not all(name.exists() and name.read_text() for name in names) and process.poll() is None:
        time.sleep(0.05)
    counters = [os.open(f"/proc/{name.read_text()}/net/dev", os.O_RDONLY) for name in names]
    samples = []
    while process.poll() is None and not (folder / "calls0").exists():
        sent = [int(os.pread(each, 4096, 0).split(b"eth0:")[1].split()[8]) for each in counters]
        samples.append((time.monotonic(), *map(float, sent)))
        time.sleep(0.001)
    process.wait()
    return samples


def idle_times(samples: list[tuple[float, ...]], rank: int, begin: float, end: float) -> list[float]:
    """Milliseconds in which a rank's link was idle in a call, by `SPANS`."""
    moments = [sample[0] for sample in samples]
    window = samples[bisect.bisect(moments, begin) - 1 : bisect.bisect(moments, end) + 1]
    steps = [(a[0], b[0], (b[1 + rank] - a[1 + rank]) * ON_WIRE) for a, b in pairwise(window)]
    busy = [(a, b) for a, b, used in steps if used >= 0.5 * (b - a)]
    first, last = max(begin, busy[0][0]), min(end, busy[-1][1])
    spans = [first - begin, 0.0, 0.0, 0.0, end - last]
    for a, b, used in steps:
        if used < 0.5 * (b - a) and first <= a and b <= last:
            share = ((a + b) / 2 - begin) / (end - begin)
            spans[1 if share < 0.25 else 3 if share > 0.75 else 2] += b - a - used
    return [1e3 * seconds for seconds in spans]


def table(calls: list[list[dict[str, Any]]], samples: list[tuple[float, ...]]) -> str:
    lines = [
        f"| | rows | ms | x fp32 | processor ms | idle ms | {' | '.join(SPANS)} |",
        f"|---|---|{'--:|' * (4 + len(SPANS))}",
    ]
    keys = list(dict.fromkeys(tuple(line["key"]) for line in calls[0]))
    times = {k: statistics.median(x["ms"] for x in calls[0] if tuple(x["key"]) == k) * 1e3 / REPEAT for k in keys}
    for key in keys:
        mine = [[line for line in of_rank if tuple(line["key"]) == key] for of_rank in calls]
        processor = statistics.mean(line["processor"] for of_rank in mine for line in of_rank) * 1e3 / REPEAT
        idle = [
            idle_times(samples, rank, begin, end)
            for rank, of_rank in enumerate(mine)
            for line in of_rank
            for begin, end in pairwise(line["moments"][1:])
        ]
        means = [statistics.mean(column) for column in zip(*idle, strict=True)]
        shown = " | ".join(f"{mean:.1f}" for mean in (sum(means), *means))
        ms = times[key]
        lines.append(f"| {key[0]} | {key[1]} | {ms:.1f} | {times[keys[0]] / ms:.2f} | {processor:.1f} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tcp", default="cubic")
    parser.add_argument("--codecs", default="int8,int4")
    parser.add_argument("--megabytes", type=float, default=32)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(json.loads(given.rank))
        return
    with tempfile.TemporaryDirectory() as name:
        folder, tcp = Path(name), choose(given.tcp)
        job = {"folder": name, "rounds": given.rounds, "codecs": given.codecs.split(","), "megabytes": given.megabytes}
        command = [sys.executable, str(HERE / "netlab"), "--ranks", str(RANKS), "--only", "0", "--tcp", tcp]
        command += ["--rate", f"{RATE:.0f}bit", "--", sys.executable, __file__, "--rank", json.dumps(job)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        samples = sample(folder, process)
        calls = [json.loads((folder / f"calls{rank}").read_text()) for rank in range(RANKS)]
    print(f"{sentence()}, TCP {tcp}. Command: `{' '.join(sys.argv)}`.\n\n{table(calls, samples)}")


if __name__ == "__main__":
    main()
