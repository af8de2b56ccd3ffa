"""What a message costs, and whether it hides behind the wire: the same bytes in few rows and in many.

    python bench/messages.py                    every network below, as root: a table, and with --out FOLDER messages.md
    ... --only 4x20mbit  --rounds 5

Ranks on a network in a box reduce one tensor in int8, in two stages, as all_reduce does; but it is cut into chunks
whose rows have a given size. A row to a peer and one from it count as one message. Taken are the slowest rank's
seconds (best of the rounds: what else a machine does can only add) and the processor time of a rank, all of its threads
together (best of the rounds, mean of the ranks). The first size is the largest; what other sizes take more, for each
message more, is what a message costs: `us a message`. On a link that is slow enough for the processors the bytes take
as long whatever the rows are, unless messages add to the wire."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from machine import sentence  # noqa: E402
from narrowcast.codecs import codec as as_codec  # noqa: E402
from narrowcast.distributed.collective import Collective, Operands  # noqa: E402
from narrowcast.distributed.planning.link import slowest  # noqa: E402
from narrowcast.distributed.protocols.pipeline import Chunk, Segment, reduce  # noqa: E402
from narrowcast.distributed.transport.agreement import Call  # noqa: E402
from narrowcast.distributed.transport.group import Group, group_for  # noqa: E402
from narrowcast.netlab.tcp import choose  # noqa: E402

NETWORKS = {"2x20mbit": (2, "20mbit"), "4x20mbit": (4, "20mbit"), "8x20mbit": (8, "20mbit")}
NETWORKS |= {"4x100mbit": (4, "100mbit"), "2x1gbit": (2, "1gbit"), "8xunlimited": (8, "unlimited")}
ROWS_KB = (128, 32, 16, 8, 2)
PART_KB = 512
"""What a rank owns, in int8."""


def reduce_once(group: Group, x: torch.Tensor, columns: int) -> tuple[float, float]:
    """Wall and processor seconds of one reduction, in chunks of so many columns."""
    codec = as_codec("int8")

    def protocol(collective: Collective) -> None:
        chunks = x.split(columns * collective.size)
        parts = [chunk.split(columns) for chunk in chunks]
        segments = [Segment(collective.encoder, part, key=i) for i, part in enumerate(parts)]
        many = [Chunk(collective, [segment], i, 1, eager=False) for i, segment in enumerate(segments)]
        reduce(collective, many)

    slowest(group, [0.0])
    start, used = time.perf_counter(), time.process_time()
    call = Call("measure_link", codec, f"columns={columns}")
    Collective(group, call, protocol).launch(Operands(x), async_op=False)
    took, used = time.perf_counter() - start, time.process_time() - used
    return slowest(group, [took])[0], used


def rank_main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    group = group_for(dist.group.WORLD, torch.device("cpu"), "collectives")  # type: ignore[arg-type]
    x = torch.zeros(PART_KB * 1024 * group.size)
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in ROWS_KB}
    for turn in range(job["rounds"] + 1):
        for size, times in found.items():
            times_now = reduce_once(group, x, size * 1024)
            if turn:
                times.append(times_now)
    best = {size: [min(column) for column in zip(*times, strict=True)] for size, times in found.items()}
    used = torch.tensor([seconds for _, seconds in best.values()], dtype=torch.float64)
    dist.all_reduce(used)
    if dist.get_rank() == 0:
        table = {size: (best[size][0], total / group.size) for size, total in zip(best, used.tolist(), strict=True)}
        Path(job["output"]).write_text(json.dumps(table))
    dist.barrier()
    dist.destroy_process_group()


def run(network: str, rounds: int) -> dict[int, tuple[float, float]]:
    ranks, rate = NETWORKS[network]
    with tempfile.TemporaryDirectory() as folder:
        job = {"rounds": rounds, "output": f"{folder}/out"}
        command = [sys.executable, str(HERE / "netlab"), "--ranks", str(ranks), "--only", "0", "--quiet"]
        command += ["--tcp", choose()] + ([] if rate == "unlimited" else ["--rate", rate])
        command += ["--", sys.executable, str(HERE / "messages.py"), "--rank", json.dumps(job)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        return {int(size): tuple(pair) for size, pair in json.loads(Path(f"{folder}/out").read_text()).items()}


def lines_of(network: str, found: dict[int, tuple[float, float]]) -> list[str]:
    """One line per size of rows."""
    ranks, _ = NETWORKS[network]
    lines, few = [], 2 * (ranks - 1) * PART_KB // ROWS_KB[0]
    wall_0, used_0 = found[ROWS_KB[0]]
    for size, (wall, used) in found.items():
        messages = 2 * (ranks - 1) * PART_KB // size
        more = messages - few
        each = f"{(wall - wall_0) / more * 1e6:.0f} | {(used - used_0) / more * 1e6:.0f}" if more else " | "
        lines.append(f"| {network} | {size} | {messages} | {wall * 1e3:.1f} | {used * 1e3:.1f} | {each} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="networks, by the start of their names, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for messages.md")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(json.loads(given.rank))
        return
    head = "| network | KB a row | messages of a rank | ms | processor ms | us a message | processor us a message |"
    table = [head, "|---|--:|--:|--:|--:|--:|--:|"]
    print("\n".join(table))
    for network in NETWORKS:
        if network.startswith(tuple(given.only.split(","))):
            lines = lines_of(network, run(network, given.rounds))
            print("\n".join(lines), flush=True)
            table += lines
    if given.out:
        words = (
            f"# What a message costs\n\n{sentence()}. Command: `{' '.join(sys.argv)}`. The top of bench/messages.py "
        )
        words += "explains the columns.\n\n" + "\n".join(table) + "\n"
        (given.out / "messages.md").write_text(words)


if __name__ == "__main__":
    main()
