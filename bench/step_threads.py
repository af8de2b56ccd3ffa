"""Where the processor time of a training step goes: one rank's threads, method by method, four ranks over loopback.

    python bench/step_threads.py  --methods "no exchange,int4+EF,momentum sign"  --rounds 8  --turn 10

The small model of bench/training.py. Methods take turns; of each thread the processor's milliseconds and the switches a
step, and of the step the median of the slowest rank's seconds. Ranks share the cores: what threads take adds up.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from training import MODELS, loopback  # noqa: E402
from training_methods import METHODS  # noqa: E402
from training_ranks import SETTLING, Trainer  # noqa: E402

Counts = dict[str, tuple[float, int]]
"""By the name of a thread: milliseconds of processor time, and how often it was switched."""


def threads() -> Counts:
    """All threads of this process, those of one name as one."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    counts: Counts = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except FileNotFoundError:  # it has ended
            continue
        switches = int(lines["voluntary_ctxt_switches"]) + int(lines["nonvoluntary_ctxt_switches"])
        name = named.get(int(task.name)) or lines["Name"]
        before = counts.get(name, (0.0, 0))
        counts[name] = before[0] + nanoseconds / 1e6, before[1] + switches
    return counts


def rank(methods: list[str], rounds: int, turn: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    trainers = {
        name: Trainer(MODELS["small"], METHODS[name], 0, METHODS[name].warmup_steps(0), 1000) for name in methods
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    spent: dict[str, Counts] = {name: {} for name in methods}
    for number in range(rounds + 1):
        for name, trainer in trainers.items():
            dist.barrier()
            before, start = threads(), time.perf_counter()
            for _ in range(turn if number else 2 * SETTLING):
                trainer.step()
            taken, after = torch.tensor((time.perf_counter() - start) / turn, dtype=torch.float64), threads()
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number:
                seconds[name].append(taken.item())
                _add(spent[name], before, after)
    if dist.get_rank() == 0:
        for name in methods:
            print(json.dumps({"method": name, "seconds": seconds[name], "threads": spent[name]}), flush=True)
    dist.barrier()
    os._exit(0)


def _add(total: Counts, before: Counts, after: Counts) -> None:
    for name, (milliseconds, switches) in after.items():
        old, sum_so_far = before.get(name, (0.0, 0)), total.get(name, (0.0, 0))
        total[name] = sum_so_far[0] + milliseconds - old[0], sum_so_far[1] + switches - old[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="no exchange,int4+EF,int2,momentum sign")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turn", type=int, default=10, help="steps of a method in a row")
    given = parser.parse_args()
    methods = given.methods.split(",")
    if "RANK" in os.environ:
        rank(methods, given.rounds, given.turn)
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    command = [sys.executable, *loopback(), __file__, *sys.argv[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    steps = given.rounds * given.turn
    for line in done.stdout.splitlines():
        result = json.loads(line)
        total = sum(milliseconds for milliseconds, _ in result["threads"].values()) / steps
        median = 1e3 * statistics.median(result["seconds"])
        print(f"{result['method']}: {median:.1f} ms a step, {total:.1f} ms of this rank's processor time")
        for name, (milliseconds, switches) in sorted(result["threads"].items(), key=lambda item: -item[1][0]):
            if milliseconds / steps >= 0.05:
                print(f"    {name:24} {milliseconds / steps:7.2f} ms  {switches / steps:6.1f} switches")


if __name__ == "__main__":
    main()
