"""all_reduce on a real network stack: milliseconds and bytes, beside gloo's own, on links of a known rate.

    python bench/wire.py                        every scenario below, as root: tables, bench/results/wire.{md,json,png}
    ... --only slow,small  --rounds 5  --out FOLDER

Each scenario starts ranks in a network in a box (bench/netlab), and in that one run lets these take turns:

    fp32      gloo's all_reduce of the fp32 tensor: what a plain DDP does
    bf16      cast, gloo's all_reduce in bf16, cast back: PyTorch's compression hook
    gather8   8 bits per element, all-gathered and added up by everyone: the protocol of PyTorch's quantization hooks
    others    narrowcast.distributed.all_reduce with the codec of that name

A time is the slowest rank's, encoding included, over 5 calls in a row; figures are medians over the rounds. `x fp32` is
how many times faster than gloo's fp32. `limit` is the time that the rate alone allows for the bytes that the protocol
must send, 2(N-1)/N of the encoded tensor, and `share` how much of that limit was reached; frame and TCP headers alone
take 4.4% of a link. `sent` is what the kernel's interface counters saw go out of a rank in one call, in MB of 1,000,000
bytes, and `counted` that over those bytes: headers of packets and acknowledgements included. `SQNR` is of one call on
Gaussian numbers, beside their sum in fp64; the largest tensors go without.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import narrowcast as nc  # noqa: E402
import pictures  # noqa: E402
from data import sqnr  # noqa: E402
from machine import sentence  # noqa: E402
from narrowcast import distributed as ncd  # noqa: E402
from narrowcast.netlab import read  # noqa: E402
from narrowcast.netlab.tcp import choose  # noqa: E402

MB = 1 << 20
REPEAT = 5
"""Calls in a row for one time: ranks leave a barrier milliseconds apart, which is not the collective's doing."""
LARGE = 64
"""MB above which a tensor is sent once for a time, and not in fp64."""


@dataclass(frozen=True)
class Scenario:
    """One network and what is sent over it."""

    name: str
    ranks: int
    rate: float
    """Bits a second of each rank's link, each way; 0 for no limit."""
    sizes: tuple[float, ...]
    """Megabytes (2**20) of fp32."""
    codecs: tuple[str, ...]
    delay: str = ""


SCENARIOS = (
    Scenario("gigabit", 4, 1e9, (32,), ("int8", "int4", "sign", "raw")),
    Scenario("slow", 8, 2e8, (32,), ("int8", "int4")),
    Scenario("unlimited", 4, 0, (32,), ("int8", "int4")),
    Scenario("small", 4, 1e9, (1 / 1024, 1 / 16, 1 / 4, 1), ("int8", "int4")),
    Scenario("small-unlimited", 4, 0, (1 / 1024, 1 / 16, 1 / 4, 1), ("int8", "int4")),
    Scenario("growing-bytes", 4, 1e9, (1, 4, 16, 64, 256), ("int8", "int4")),
    *(Scenario(f"growing-ranks-{ranks}", ranks, 1e9, (32,), ("int8", "int4")) for ranks in (2, 3, 5, 6, 7, 8)),
    Scenario("delay", 4, 1e9, (1, 32), ("int8", "int4"), "1ms"),
)


# -- a rank ----------------------------------------------------------------------------------------------------------


def contestants(x: torch.Tensor, codecs: list[str]) -> dict[str, Callable[[], object]]:
    """What takes turns. Each one leaves the sum in `x`, which is shrunk before so that it stays finite."""
    ranks = dist.get_world_size()
    half = torch.empty_like(x, dtype=torch.bfloat16)
    gathered = torch.empty(ranks, nc.codec("int8").row_bytes(x.numel()), dtype=torch.uint8)
    int8 = nc.codec("int8")

    def bf16() -> None:
        half.copy_(x)
        dist.all_reduce(half)
        x.copy_(half)

    def gather8() -> None:
        mine = int8.encode(x)
        dist.all_gather(list(gathered), mine)
        int8.decode_sum(gathered, x.numel(), out=x)

    return {
        "fp32": lambda: dist.all_reduce(x),
        "bf16": bf16,
        "gather8": gather8,
        **{codec: lambda codec=codec: ncd.all_reduce(x, codec=codec) for codec in codecs},
    }


def measure(megabytes: float, codecs: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds (slowest rank's) and bytes sent (most of any rank), of each round of each contestant; its error."""
    x = torch.randn(max(1, int(megabytes * MB / 4)))
    runs = contestants(x, codecs)
    repeat = REPEAT if megabytes <= LARGE else 1
    figures_of: dict[str, Any] = {name: {"ms": [], "sent": [], "sqnr": None} for name in runs}
    if megabytes <= LARGE:
        given, exact = x.clone(), x.double()
        dist.all_reduce(exact)
        for name, run in runs.items():
            x.copy_(given)
            run()
            figures_of[name]["sqnr"] = sqnr(exact, x)
        x.copy_(given)
    for turn in range(rounds + 1):  # the first is a warm-up: it makes connections
        for name, run in runs.items():
            x.mul_(dist.get_world_size() ** -repeat)  # what so many sums will undo
            dist.barrier()
            before = read().tx_bytes if "NETLAB_IFNAME" in os.environ else 0
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            elapsed = (time.perf_counter() - start) / repeat
            after = read().tx_bytes if "NETLAB_IFNAME" in os.environ else 0
            both = torch.tensor([elapsed * 1e3, (after - before) / repeat], dtype=torch.float64)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            if turn:
                figures_of[name]["ms"].append(both[0].item())
                figures_of[name]["sent"].append(both[1].item())
    return figures_of


def rank_main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for megabytes in job["sizes"]:
        rounds = max(3, job["rounds"] // 4) if megabytes > LARGE else job["rounds"] * (4 if megabytes < 2 else 1)
        measured = measure(megabytes, job["codecs"], rounds)
        if dist.get_rank() == 0:
            with open(job["output"], "a") as output:
                output.write(json.dumps({"megabytes": megabytes, "found": measured}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


# -- the driver ------------------------------------------------------------------------------------------------------


def run(scenario: Scenario, rounds: int, tcp: str) -> list[dict[str, Any]]:
    """One row per size and contestant."""
    with tempfile.TemporaryDirectory() as folder:
        job = {**asdict(scenario), "rounds": rounds, "output": f"{folder}/out"}
        command = [sys.executable, str(HERE / "netlab"), "--ranks", str(scenario.ranks), "--only", "0", "--tcp", tcp]
        command += ["--rate", f"{scenario.rate:.0f}bit"] if scenario.rate else []
        command += ["--delay", scenario.delay] if scenario.delay else []
        command += ["--", sys.executable, __file__, "--rank", json.dumps(job)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in Path(f"{folder}/out").read_text().splitlines()]
    return [row for line in lines for row in rows(scenario, line["megabytes"], line["found"])]


def rows(scenario: Scenario, megabytes: float, measured: dict[str, Any]) -> list[dict[str, Any]]:
    numel, ranks = max(1, int(megabytes * MB / 4)), scenario.ranks
    share = 2 * (ranks - 1) / ranks
    needed = {"fp32": share * 4 * numel, "bf16": share * 2 * numel}
    needed["gather8"] = (ranks - 1) * nc.codec("int8").row_bytes(numel)
    plain = statistics.median(measured["fp32"]["ms"])
    table = []
    for name, figures in measured.items():
        sent = needed.get(name) or share * nc.codec(name).row_bytes(numel)
        ms, limit = statistics.median(figures["ms"]), sent * 8 / scenario.rate * 1e3 if scenario.rate else 0.0
        table.append(
            {
                "scenario": scenario.name,
                "ranks": ranks,
                "rate": scenario.rate,
                "delay": scenario.delay,
                "megabytes": megabytes,
                "name": name,
                "ms": ms,
                "best_ms": min(figures["ms"]),
                "times_fp32": plain / ms,
                "limit_ms": limit,
                "share": limit / ms,
                "needed_bytes": sent,
                "sent_bytes": statistics.median(figures["sent"]),
                "sqnr": figures["sqnr"],
                "counted": statistics.median(figures["sent"]) / sent,
            }
        )
    return table


def markdown(results: list[dict[str, Any]]) -> str:
    head = (
        "| network | ranks | MB | | sent MB | SQNR dB | ms | x fp32 | limit ms | share | counted |\n"
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    lines = []
    for row in results:
        network = f"{row['rate'] / 1e6:.0f} Mbit/s" if row["rate"] else "no limit"
        network += f", {row['delay']}" if row["delay"] else ""
        limit = f"{row['limit_ms']:.1f} | {row['share']:.0%}" if row["rate"] else "- | -"
        error = "-" if row["sqnr"] is None else f"{row['sqnr']:.1f}"
        lines.append(
            f"| {network} | {row['ranks']} | {row['megabytes']:.4g} | {row['name']} | {row['sent_bytes'] / 1e6:.4g} "
            f"| {error} | {row['ms']:.4g} | {row['times_fp32']:.2f} | {limit} | {row['counted']:.3f} |"
        )
    return head + "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Time against bytes, and against ranks."""
    figure, (left, right) = pictures.canvas(1, 2, size=(11, 4.4))
    for axes, key in ((left, "megabytes"), (right, "ranks")):
        ends = {}
        for name in ("fp32", "bf16", "gather8", "int8", "int4"):
            points = [(r[key], r["ms"]) for r in results if r["name"] == name and _shown(r, key)]
            if points:
                points = sorted(dict(points).items())
                pictures.line(axes, *zip(*points, strict=True), name)
                ends[name] = points[-1]
        if key == "megabytes":
            axes.set(xscale="log", yscale="log", xlabel="MB of fp32", ylabel="ms")
            pictures.plain_ticks(axes.xaxis), pictures.plain_ticks(axes.yaxis)
            pictures.title(axes, "all_reduce, 4 ranks, 1 Gbit/s")
        else:
            axes.set(xlabel="ranks", ylabel="ms", ylim=0)
            pictures.title(axes, "all_reduce of 32 MB, 1 Gbit/s")
        pictures.name_right(figure, axes, ends)
    pictures.save(figure, path)


def _shown(row: dict[str, Any], key: str) -> bool:
    if key == "megabytes":
        return bool(row["scenario"] == "growing-bytes")
    return bool(row["megabytes"] == 32 and row["rate"] == 1e9 and not row["delay"])


def main() -> None:
    from rich.console import Console
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scenarios, by the start of their names")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tcp", default="cubic", help="how TCP shares a link: cubic (Linux's default), reno, bbr")
    parser.add_argument("--out", type=Path, help="folder for wire.md, wire.json and wire.png")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(json.loads(given.rank))
        return
    console = Console()
    wanted = tuple(given.only.split(","))
    results: list[dict[str, Any]] = []
    tcp = choose(given.tcp)
    for scenario in track([s for s in SCENARIOS if s.name.startswith(wanted)], "measuring", console=console):
        results += run(scenario, given.rounds, tcp)
    table = markdown(results)
    print(table)
    if given.out:
        head = f"# all_reduce on a network in a box\n\n{sentence()}, TCP {tcp}. "
        head += f"Command: `{' '.join(sys.argv)}`. "
        head += "What the columns mean stands at the top of bench/wire.py.\n\n"
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "wire.md").write_text(head + table)
        (given.out / "wire.json").write_text(json.dumps(results, indent=1))
        plot(results, given.out / "wire.png")


if __name__ == "__main__":
    main()
