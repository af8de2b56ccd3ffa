"""What leaves a host where several ranks share it, by the kernel's count of its interface, on a network in a box.

    python bench/hosts.py                    two hosts of two ranks, and three of two, as root: a table
    ... --only 2x2  --calls 4  --rate 1gbit  --mb 32  --out FOLDER   (hosts.md, hosts.json)

Each network has one namespace per host; ranks of a host reach each other by loopback, which the interface does not see.
Tensors have 8 MB unless told otherwise; DDP's model has about as many gradients, with error feedback below 8 bits. `by
hosts` is the default, `flat` takes all ranks for equal (dist.group.WORLD), `none` is torch's own. `MB` is what the
interface of a host sent for one all_reduce or step, the mean of all hosts; `share` is that over 2(H-1)/H of one encoded
tensor, which is what H hosts cannot do without: the rest is headers of TCP, and of calls. `s` is the slowest rank's
time, the median of the calls: of a machine that may be busy, and ranks that share its cores."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import narrowcast as nc  # noqa: E402
from machine import sentence  # noqa: E402
from narrowcast import distributed as ncd  # noqa: E402
from netlab import Network, read  # noqa: E402

SHAPES = {"2x2": (2, 2), "3x2": (3, 2)}
CODECS = ("int8", "int4", "int2")
WIDTH = 1024
LAYER_MB = 4 * WIDTH * WIDTH >> 20
SETTLE = 0.2
"""Seconds until the last acknowledgements have passed."""


# -- a rank -----------------------------------------------------------------------------------------------------------


def sums(numel: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Ways to add up a tensor, each with the bytes of one encoded tensor."""
    x, world = torch.randn(numel), dist.group.WORLD
    ways: dict[str, tuple[Callable[[], object], float]] = {"none": (lambda: dist.all_reduce(x), 4 * numel)}
    for codec in CODECS:
        encoded = nc.codec(codec).row_bytes(numel)
        ways[f"{codec}, by hosts"] = (lambda codec=codec: ncd.all_reduce(x, codec=codec)), encoded
        ways[f"{codec}, flat"] = (lambda codec=codec: ncd.all_reduce(x, group=world, codec=codec)), encoded
    return ways


def steps(layers: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Ways to take a step of a model, each with the bytes of its gradients, encoded; biases travel as they are."""
    x = torch.randn(1, WIDTH)

    def model() -> DDP:
        torch.manual_seed(0)
        return DDP(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]), bucket_cap_mb=layers)

    def step(ddp: DDP) -> Callable[[], object]:
        return lambda: ddp(x).square().mean().backward()

    weights, biases = layers * WIDTH * WIDTH, 4 * layers * WIDTH
    ways = {"none": (step(model()), 4 * weights + biases)}
    for codec in CODECS:
        encoded = nc.codec(codec).row_bytes(weights) + biases
        for form, group in (("by hosts", None), ("flat", dist.group.WORLD)):
            ddp = model()
            nc.compress_gradients(ddp, codec, process_group=group)
            ways[f"{codec}, {form}"] = step(ddp), encoded
    return ways


def counted(way: Callable[[], object], calls: int) -> tuple[int, float]:
    """Bytes that this rank's host sent for a call, and the median of its seconds."""
    for _ in range(2):  # connections, and DDP's buckets as they stay
        way()
    dist.barrier()
    time.sleep(SETTLE)
    before, seconds = read(), []
    for _ in range(calls):
        began = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - began)
    time.sleep(SETTLE)
    sent = (read() - before).tx_bytes / calls
    dist.barrier()
    return int(sent), statistics.median(seconds)


def rank_main(calls: int, mb: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hosts = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    rows = []
    for what, ways in (("all_reduce", sums(mb << 18)), ("DDP", steps(mb // LAYER_MB))):
        for name, (way, encoded) in ways.items():
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, counted(way, calls))
            sent = statistics.mean(bytes_ for bytes_, _ in found)
            least = 2 * (hosts - 1) / hosts * encoded
            row = {"what": what, "form": name, "MB": sent / 1e6, "share": sent / least}
            rows.append({**row, "s": max(seconds for _, seconds in found)})
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


# -- the networks -----------------------------------------------------------------------------------------------------


def run(shape: str, calls: int, mb: int = 8, rate: str | None = None) -> list[dict[str, Any]]:
    """The rows of one network."""
    hosts, local = SHAPES[shape]
    with Network(hosts * local, rate, per_host=local) as network:
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", "--calls", str(calls), "--mb", str(mb)]
        ranks = network.start(command, pipes=True)
        said = [rank.communicate(timeout=540) for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise subprocess.SubprocessError("\n".join(err.decode()[-2000:] for _, err in said))
    return [{"network": shape, **row} for row in json.loads(said[0][0].decode().splitlines()[-1])]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| hosts x ranks | | | MB | share | s |", "|---|---|---|--:|--:|--:|"]
    for row in rows:
        numbers = f"{row['MB']:.3f} | {row['share']:.3f} | {row['s']:.3f}"
        lines.append(f"| {row['network']} | {row['what']} | {row['form']} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks, by the start of their names")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--mb", type=int, default=8, help="of a tensor, and of DDP's gradients: a multiple of 4")
    parser.add_argument("--rate", help="of each host's link, such as 1gbit; else as fast as the machine")
    parser.add_argument("--out", type=Path, help="folder for hosts.md and hosts.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.calls, given.mb)
        return
    rows = [
        row for shape in SHAPES if shape.startswith(given.only) for row in run(shape, given.calls, given.mb, given.rate)
    ]
    print(markdown(rows))
    if given.out:
        head = f"# What leaves a host\n\n{sentence()}. Command: `{' '.join(sys.argv)}`. "
        given.out.mkdir(parents=True, exist_ok=True)
        text = f"{head}The top of bench/hosts.py explains the columns.\n\n{markdown(rows)}"
        (given.out / "hosts.md").write_text(text)
        (given.out / "hosts.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
