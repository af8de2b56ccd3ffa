"""Predictions of `narrowcast plan` beside the times that they predict, on a network in a box.

    python bench/plan.py                     every network below, as root: a table, and with --out FOLDER plan.{md,json}
    ... --only 4x100mbit  --rounds 5  --codecs int8,int4  --gradients

On each network ranks make a plan (narrowcast.distributed.planning.planner), then all_reduce the same buckets for real:
gloo's own for "none", narrowcast.distributed.all_reduce for each codec, or with --gradients what compress_gradients
does in its place, error feedback included below 8 bits. They take turns, round by round; a time is the slowest rank's
for all buckets, the figure the median of the rounds, and `best` their best: what else the machine did meanwhile makes
the difference. `predicted / measured` should be within 25% of 1. `loss` is what following the plan costs: the time of
the codec that it chose, over that of the most precise codec within the plan's margin of the one that was fastest in
fact."""

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from machine import sentence  # noqa: E402
from narrowcast import distributed as ncd  # noqa: E402
from narrowcast.cli.shared.specs import split_specs  # noqa: E402
from narrowcast.distributed.gradients.compression import GradientCompression  # noqa: E402
from narrowcast.distributed.gradients.ddp import average_bucket  # noqa: E402
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket  # noqa: E402
from narrowcast.distributed.planning.planner import plan  # noqa: E402
from narrowcast.distributed.planning.prediction import NONE  # noqa: E402
from narrowcast.netlab.tcp import choose  # noqa: E402

NETWORKS = {f"{ranks}x{rate}": (ranks, rate) for rate in ("100mbit", "1gbit", "unlimited") for ranks in (2, 4)}
BUCKETS = (1 << 18, 6_553_600)
"""Elements: DDP's first bucket is 1 MB, and the others 25 MB."""


# -- a rank ----------------------------------------------------------------------------------------------------------


def contestants(tensors: list[torch.Tensor], codecs: list[str], gradients: bool) -> dict[str, Callable[[], object]]:
    """What takes turns: each sums (gradients: averages) all tensors."""

    def plain() -> None:
        for x in tensors:
            dist.all_reduce(x)

    def reduced(codec: str) -> None:
        for x in tensors:
            ncd.all_reduce(x, codec=codec)

    def averaged(state: GradientCompression) -> None:
        last = len(tensors) - 1
        for future in [average_bucket(state, DdpBucket(x, [x], [0], i, i == last)) for i, x in enumerate(tensors)]:
            future.wait()

    runs: dict[str, Callable[[], object]] = {NONE: plain}
    for codec in codecs:
        runs[codec] = (
            partial(averaged, GradientCompression(codec, exempt=None)) if gradients else partial(reduced, codec)
        )
    return runs


def measure(buckets: list[int], codecs: list[str], rounds: int, gradients: bool) -> dict[str, list[float]]:
    """Seconds (slowest rank's) of each round for each codec, in turns."""
    tensors = [torch.randn(numel) for numel in buckets]
    runs = contestants(tensors, codecs, gradients)
    times: dict[str, list[float]] = {name: [] for name in (NONE, *codecs)}
    for turn in range(rounds + 1):  # the first is a warm-up: it makes connections
        for name, seconds in times.items():
            for x in tensors:
                x.mul_(1 / dist.get_world_size())  # which the sum will undo
            dist.barrier()
            start = time.perf_counter()
            runs[name]()
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:
                seconds.append(took.item())
    return times


def rank_main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    start = time.perf_counter()
    chosen_plan = plan(job["buckets"], gradients=job["gradients"], candidates=job["codecs"])
    took = time.perf_counter() - start
    times = measure(job["buckets"], job["codecs"], job["rounds"], job["gradients"])
    if dist.get_rank() == 0:
        Path(job["output"]).write_text(json.dumps({"plan": chosen_plan.as_dict(), "took": took, "found": times}))
    dist.barrier()
    dist.destroy_process_group()


# -- the driver ------------------------------------------------------------------------------------------------------


def run(
    network: str, codecs: list[str], rounds: int, buckets: tuple[int, ...] = BUCKETS, gradients: bool = False
) -> dict[str, Any]:
    """The plan, how long it took to make, and the times in fact, on one of the networks."""
    ranks, rate = NETWORKS[network]
    with tempfile.TemporaryDirectory() as folder:
        job = {"codecs": codecs, "rounds": rounds, "buckets": buckets, "gradients": gradients}
        job["output"] = f"{folder}/out"
        command = [sys.executable, str(HERE / "netlab"), "--ranks", str(ranks), "--only", "0", "--quiet"]
        command += ["--tcp", choose()]
        command += [] if rate == "unlimited" else ["--rate", rate]
        command += ["--", sys.executable, str(HERE / "plan.py"), "--rank", json.dumps(job)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        result: dict[str, Any] = json.loads(Path(f"{folder}/out").read_text())
    return result


def rows(network: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per codec: predicted and measured seconds."""
    seconds = {name: statistics.median(times) for name, times in result["found"].items()}
    prediction = result["plan"]
    close = [name for name in seconds if seconds[name] <= (1 + prediction["margin"]) * min(seconds.values())]
    precise = {p["codec"]: (p["noise"], p["codec"] != NONE) for p in prediction["predictions"]}
    right = min(close, key=precise.__getitem__)
    return [
        {
            "network": network,
            "codec": p["codec"],
            "predicted": p["seconds"],
            "measured": seconds[p["codec"]],
            "best": min(result["found"][p["codec"]]),
            "ratio": p["seconds"] / seconds[p["codec"]],
            "chosen": p["codec"] == prediction["chosen"],
            "loss": seconds[prediction["chosen"]] / seconds[right],
        }
        for p in prediction["predictions"]
    ]


def markdown(table: list[dict[str, Any]]) -> str:
    lines = [
        "| network | | predicted s | measured s | best s | predicted / measured | chosen | loss |",
        "|---|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in table:
        numbers = f"{row['predicted']:.3g} | {row['measured']:.3g} | {row['best']:.3g} | {row['ratio']:.2f}"
        chosen = f"x | {row['loss']:.2f}" if row["chosen"] else " | "
        lines.append(f"| {row['network']} | {row['codec']} | {numbers} | {chosen} |")
    return "\n".join(lines) + "\n"


def verdict(table: list[dict[str, Any]]) -> str:
    near, nearer = (sum(abs(row["predicted"] / row[key] - 1) <= 0.25 for row in table) for key in ("measured", "best"))
    return f"{near} of {len(table)} predictions are within 25% of what was measured, {nearer} of the best round."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks, by the start of their names, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", default="bf16,int8,int6,int4")
    parser.add_argument("--gradients", action="store_true", help="what compress_gradients does, not all_reduce alone")
    parser.add_argument("--out", type=Path, help="folder for plan.md and plan.json")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(json.loads(given.rank))
        return
    table: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    for network in NETWORKS:
        if network.startswith(tuple(given.only.split(","))):
            raw[network] = run(network, split_specs(given.codecs), given.rounds, gradients=given.gradients)
            table += rows(network, raw[network])
            print(markdown(rows(network, raw[network])), f"planned in {raw[network]['took']:.1f} s", flush=True)
            print(raw[network]["plan"]["link"], flush=True)
    summary = verdict(table)
    print(summary)
    if given.out:
        plans = ", ".join(f"{network} {result['took']:.1f} s" for network, result in raw.items())
        head = f"# Predictions of all_reduce, and what it took\n\n{sentence()}. "
        head += f"Command: `{' '.join(sys.argv)}`. The top of bench/plan.py explains the columns.\n\n"
        given.out.mkdir(parents=True, exist_ok=True)
        name = "plan-gradients" if given.gradients else "plan"
        (given.out / f"{name}.md").write_text(f"{head}{summary} Time to plan: {plans}.\n\n{markdown(table)}")
        (given.out / f"{name}.json").write_text(json.dumps({"rows": table, "raw": raw}, indent=1))


if __name__ == "__main__":
    main()
