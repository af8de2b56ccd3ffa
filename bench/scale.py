"""Hundreds of ranks: what a call, a meeting and a purpose cost each of them, whatever is sent.

    PYTHONPATH=src python bench/scale.py --ranks 64,256      a table in bench/results/scale.md
    ... --rounds 5  --out PATH

Ranks are processes forked from one, all on this machine, over gloo and loopback. Each makes its first call (ranks meet,
and connect), one of another purpose, and then trips: calls in which ranks agree and nothing else is sent. Counted are
messages and bytes that a rank gives to gloo in a trip, the requests to the store until ranks are connected, and the
file descriptors that connections take. Sizes of 512 and more are by formula, and so is what stood before headers had
one size and purposes shared connections: commit 80081db.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import narrowcast as nc  # noqa: E402
from machine import facts  # noqa: E402
from narrowcast.distributed.collective import Collective  # noqa: E402
from narrowcast.distributed.transport.agreement import HEADER_BYTES, Call  # noqa: E402
from narrowcast.distributed.transport.gloo_connections import Gloo  # noqa: E402
from narrowcast.distributed.transport.group import group_for  # noqa: E402

LIMIT = datetime.timedelta(seconds=300)
REQUESTS = ("set", "get", "add", "check", "wait", "multi_get", "compare_set")
ON_PAPER = (512, 1024)
BESIDE = 5
"""Descriptors that connections take beside one for each peer, as measured with 8 ranks."""


# -- one rank ---------------------------------------------------------------------------------------------------------


def rank_main(rank: int, world: int, port: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LIMIT)
    counts = counted()
    before = descriptors()
    start = time.perf_counter()
    trip("collectives")
    found: dict[str, Any] = {"first_s": time.perf_counter() - start}
    found["requests"] = {name: counts[name] for name in REQUESTS if counts[name]}
    found["descriptors"] = [descriptors() - before]
    trip("gradients")
    found["descriptors"].append(descriptors() - before)
    counts.clear()
    trip("collectives")
    found["messages"], found["bytes"] = counts["messages"], counts["bytes"]
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(5):
            trip("collectives")
        seconds.append((time.perf_counter() - start) / 5)
    found["trip_s"] = statistics.median(seconds)
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # at once: hundreds of processes that tidy up take longer than all of the above


def trip(purpose: str) -> None:
    """A call in which ranks agree, and nothing else is sent."""
    group = group_for(c10d._get_default_group(), torch.device("cpu"), purpose)
    Collective(group, Call("trip", nc.codec("raw"), "nothing"), lambda collective: collective.agree()).run()


def counted() -> Counter[str]:
    """Messages and bytes given to gloo, and requests made to a store, from now on."""
    counts: Counter[str] = Counter()
    send = Gloo.send

    def counting_send(self: Gloo, row: torch.Tensor, *args: Any) -> Any:
        counts["messages"] += 1
        counts["bytes"] += row.numel()
        return send(self, row, *args)

    def counting(name: str, plain: Any) -> Any:
        def request(self: Any, *args: Any) -> Any:
            counts[name] += 1
            return plain(self, *args)

        return request

    Gloo.send = counting_send  # type: ignore[method-assign]
    for name in REQUESTS:
        setattr(dist.PrefixStore, name, counting(name, getattr(dist.PrefixStore, name)))
    return counts


def descriptors() -> int:
    dist.barrier()
    return len(os.listdir("/proc/self/fd"))


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(world: int, rounds: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        args = world, free_port(), rounds, folder
        processes = [context.Process(target=rank_main, args=(rank, *args), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
    others = found[1:]
    return {
        "messages": max(each["messages"] for each in found),
        "bytes": max(each["bytes"] for each in found),
        "requests": statistics.median(sum(each["requests"].values()) for each in found),
        "most_requests": max(sum(each["requests"].values()) for each in found),
        "descriptors": [max(each["descriptors"][i] for each in others) for i in range(2)],
        "first_s": max(each["first_s"] for each in found),
        "trip_s": max(each["trip_s"] for each in found),
    }


def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return int(store.port)


def before(world: int) -> list[str]:
    """At 80081db: counts of all ranks and words in every header, a look for every rank, connections of each purpose."""
    header, each = 224 + 16 * world, world - 1 + BESIDE
    sent = (world - 1) * header
    requests = (world + 2) + (2 * world + 1)  # ours, if all come at once, and gloo's
    row = [world, "before, by formula", header, f"{sent:,}", f"{requests:,}", f"{world * requests:,}"]
    return [*map(str, row), str(each), str(2 * each), ""]


def after(world: int, found: dict[str, Any] | None, largest: dict[str, Any]) -> list[str]:
    """Of so many ranks, as found, or as it would be: requests do not grow with ranks, but with the time they take."""
    requests = (found or largest)["requests"]
    sent = found["bytes"] if found else (world - 1) * HEADER_BYTES
    one, two = found["descriptors"] if found else [world - 1 + BESIDE] * 2
    seconds = f"{1e3 * found['trip_s']:.0f} ms" if found else ""
    name = "after" if found else "after, by formula"
    row = [world, name, HEADER_BYTES, f"{sent:,}", f"{requests:g}", f"{world * requests:,.0f}", one, two, seconds]
    return list(map(str, row))


def table(results: dict[int, dict[str, Any]]) -> str:
    head = ["ranks", "", "header, bytes", "bytes a rank sends in a trip"]
    head += ["store requests of a rank to meet and connect", "of all ranks"]
    head += ["descriptors, one purpose", "two", "time of a trip"]
    largest = results[max(results)]
    rows = [row for n in (*results, *ON_PAPER) for row in (before(n), after(n, results.get(n), largest))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def report(results: dict[int, dict[str, Any]]) -> str:
    lines = [f"- {name}: {value}" for name, value in facts().items()]
    for world, found in results.items():
        share = 1e6 * found["trip_s"] * (os.cpu_count() or 1) / (world * found["messages"])
        lines += [
            f"- {world} ranks: {found['messages']} messages of a rank in a trip, {share:.0f} us of a core for each; "
            f"the first call, in which ranks meet and connect, took {found['first_s']:.1f} s; 7 requests to the store "
            "are the fewest of a rank, and it looks again while it waits for others: "
            f"{found['most_requests']} were the most"
        ]
    return "\n".join(["# Hundreds of ranks\n", __doc__.split("\n\n")[2].strip(), "", table(results), "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale.md")
    given = parser.parse_args()
    text = report({world: measure(world, given.rounds) for world in map(int, given.ranks.split(","))})
    given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
