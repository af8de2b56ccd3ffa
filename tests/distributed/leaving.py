"""A rank that leaves in one of several ways: python leaving.py WAY RANK STORE. test_leaving.py looks at how it ends.

"plain" is a process with a group of its own, which narrowcast was never called in.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta

import faults
import torch
import torch.distributed as dist

from narrowcast import distributed as ncd
from narrowcast.distributed.transport.gloo_connections import _Addresses


def main(way: str, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    limit, size = timedelta(seconds=60), 1 if way == "plain" else 2
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    if way == "plain":
        time.sleep(1)
    elif way not in ("never met", "connecting"):
        ncd.all_reduce(torch.ones(10))
        dist.barrier()
    if way == "in flight":
        for _ in range(20):
            ncd.all_reduce(torch.ones(1_000_000), async_op=True)
    elif way in ("hang", "never met", "raise"):
        if rank == 1:
            time.sleep(2)
        else:
            for _ in range(3):
                ncd.all_reduce(torch.ones(10), async_op=True)
            time.sleep(0.3)
    elif way == "half-way":
        if rank == 1:
            faults.at("after headers", lambda: time.sleep(30))
        ncd.all_reduce(torch.ones(20_000_000), async_op=True)
        time.sleep(1 + rank)
    elif way == "connecting":
        if rank == 1:
            _Addresses.set = lambda *given: time.sleep(30)  # type: ignore[assignment,method-assign]
        ncd.all_reduce(torch.ones(10), async_op=True)
        time.sleep(1 + rank)
    elif way == "fork":
        work = ncd.all_reduce(torch.ones(2_000_000), async_op=True)
        assert work is not None
        worker = multiprocessing.get_context("fork").Process(target=print, args=("worker",))
        worker.start()
        worker.join()
        pid = os.fork()
        if pid:
            work.wait()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ncd.all_reduce(torch.ones(10))
            if (worker.exitcode, code) != (0, 7):
                sys.exit(1)
        else:
            sys.exit(7)  # through the interpreter's own end
    print(time.monotonic(), flush=True)
    if way == "raise" and rank == 0:
        raise LookupError("the script's own")
    sys.exit(5 if way == "hang" else 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
