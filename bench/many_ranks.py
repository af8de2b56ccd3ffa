"""A bucket of DDP among many ranks: what the number of columns in a chunk costs, and so the number of messages.

    python bench/many_ranks.py [--ranks 64] [--rounds 3] [--columns 16384,65536,131072]

Ranks are processes forked from one, over gloo and loopback. Each averages 25 MB of gradients in int4, in chunks of a
given number of columns, in turns. Printed are the slowest rank's seconds and the mean processor time of a rank, all of
its threads together, both in the best round. All ranks share one machine, so processor time is what tells."""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from machine import sentence  # noqa: E402
from narrowcast.distributed.gradients import layout  # noqa: E402
from narrowcast.distributed.gradients.compression import GradientCompression  # noqa: E402
from narrowcast.distributed.gradients.ddp import average_bucket  # noqa: E402
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket  # noqa: E402

NUMEL = 6_553_600


def rank_main(rank: int, world: int, rounds: int, columns: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    patience = datetime.timedelta(seconds=400)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    x = torch.zeros(NUMEL)
    times: dict[int, list[tuple[float, float]]] = {each: [] for each in columns}
    for turn in range(rounds + 1):  # the first is a warm-up: it makes connections
        for each, seconds in times.items():
            layout.CHUNK_COLUMNS = each
            state = GradientCompression("int4", error_feedback=False, exempt=None)
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            average_bucket(state, DdpBucket(x, [x], [0], 0, True)).wait()
            if turn:
                seconds.append((time.perf_counter() - start, time.process_time() - used))
    best = {each: [min(column) for column in zip(*pairs, strict=True)] for each, pairs in times.items()}
    Path(folder, str(rank)).write_text(json.dumps(best))
    dist.barrier()
    os._exit(0)  # at once: many processes that tidy up take longer than all of the above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--columns", default="16384,65536,131072")
    given = parser.parse_args()
    columns = [int(each) for each in given.columns.split(",")]
    context = multiprocessing.get_context("fork")
    print(f"{sentence()}. Command: `{' '.join(sys.argv)}`.\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        args = given.ranks, given.rounds, columns, folder
        processes = [context.Process(target=rank_main, args=(rank, *args), daemon=True) for rank in range(given.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(given.ranks)]
    print("| ranks | columns of a chunk | chunks | messages of a rank | s | processor ms of a rank |")
    print("|--:|--:|--:|--:|--:|--:|")
    for each in columns:
        layout.CHUNK_COLUMNS = each
        chunks = len(layout.lay_out([layout.Gradient("", 0, NUMEL, False)], given.ranks))
        wall = max(rank[str(each)][0] for rank in found)
        used = sum(rank[str(each)][1] for rank in found) / given.ranks
        messages = (1 + 2 * chunks) * (given.ranks - 1)
        print(f"| {given.ranks} | {each} | {chunks} | {messages} | {wall:.2f} | {used * 1e3:.0f} |")


if __name__ == "__main__":
    main()
