"""Two checkouts, call by call in turns: what a change made slower.

    git worktree add /tmp/before COMMIT
    python bench/before_after.py /tmp/before . [--rounds 60] [--only "encode (int8|apot)"] [--json PATH]

Each checkout has a process of its own, on the same core, with its own native core (built into build/before_after).
Call by call they take turns, and the figure is the median of the ratios of neighbouring calls, in CPU time of one
thread: a machine that is slow for a second is so for both. Runs of whole benchmarks one after the other differ by 15 to
30% on a shared machine; this tells 3% apart. The table has codecs (4 MB of fp32: encode, decode, and the two sums of
four rows) and linear layers.

What it cannot tell: the same instructions may take other times where the linker puts them elsewhere. Compare the code
(objdump) before a change is blamed for a codec that it did not touch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CODECS = (
    *("raw", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int6", "int5", "int4", "int3", "int2", "sign", "nf4"),
    *("apot3", "apot4", "apot8", "pot4", "int8:zero_point=true", "int4:zero_point=true", "int8:stochastic=true"),
    *("int8:block=row", "int8:block=32", "int4:block=32", "sign:block=128"),
)
LAYERS = ("int8", "int8:block=row", "int4:block=64", "int4:block=64,zero_point=true", "nf4", "fp8_e4m3", "apot4")
NUMEL, RANKS = 1 << 20, 4
Timed = Callable[[], object]


def calls() -> Iterator[tuple[str, Timed]]:
    """What is timed, by name. Runs in a checkout's own process."""
    import torch

    import narrowcast as nc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, own = torch.randn(1, NUMEL), torch.randn(NUMEL)
    for name in CODECS:
        codec = nc.codec(name)
        rows = codec.encode(torch.randn(RANKS, NUMEL), 1)
        row, floats, total = torch.empty_like(rows[:1]), torch.empty(1, NUMEL), torch.empty(NUMEL)
        given = {"own": own, "own_rank": 1, "divisor": RANKS}
        yield f"encode {name}", lambda codec=codec, row=row: codec.encode(x, 1, out=row)
        yield f"decode {name}", lambda c=codec, rows=rows, out=floats: c.decode(rows[:1], NUMEL, out=out)
        yield f"sum {name}", lambda c=codec, rows=rows, out=total: c.decode_sum(rows, NUMEL, out=out)
        yield (
            f"reduce {name}",
            lambda c=codec, rows=rows, out=row[0], given=given: c.decode_sum_encode(rows, NUMEL, 1, out=out, **given),
        )
    few = torch.randn(1000)
    yield "encode int8, 1,000 floats, 100 times", lambda: [nc.encode(few, "int8") for _ in range(100)]
    for name in LAYERS:
        layer = torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False))
        nc.quantize_(layer, name)
        for batch in (1, 8, 32):
            inputs = torch.randn(batch, 4096)
            yield f"linear {name}, {batch} rows of x", lambda layer=layer, inputs=inputs: layer(inputs)


def serve() -> None:
    """Answer names of calls on the standard input with the seconds that they took."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    import torch

    every = dict(calls())
    print(json.dumps(list(every)), flush=True)
    for line in sys.stdin:
        with torch.no_grad():
            began = time.thread_time()
            every[line.rstrip("\n")]()
            print(time.thread_time() - began, flush=True)


def start(checkout: Path, core: int) -> subprocess.Popen[str]:
    """A process that serves a checkout."""
    build = checkout / "build" / "before_after"
    for step in (["-S", str(checkout), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"], ["--build", str(build), "-j2"]):
        subprocess.run(["cmake", *step], check=True, stdout=subprocess.DEVNULL)
    paths = {"PYTHONPATH": str(checkout / "src"), "NARROWCAST_CORE": str(build / "_narrowcast_core.so")}
    command = ["taskset", "-c", str(core), sys.executable, __file__, "--serve"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **paths})


def ask(process: subprocess.Popen[str], name: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="calls whose name has a match of this regular expression")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    both = [start(checkout.resolve(), core) for checkout in (options.before, options.after)]
    names = [json.loads(process.stdout.readline()) for process in both if process.stdout is not None]
    found = {}
    print("| | before, ms | after, ms | ratio |\n|---|--:|--:|--:|")
    for name in names[0]:
        if name not in names[1] or not re.search(options.only, name):
            continue
        times: list[list[float]] = [[], []]
        for turn in range(-2, options.rounds):
            for i in (0, 1) if turn % 2 else (1, 0):
                seconds = ask(both[i], name)
                if turn >= 0:  # the first two warm up
                    times[i].append(seconds)
        ratio = statistics.median(after / before for before, after in zip(*times, strict=True))
        found[name] = [*(1e3 * statistics.median(each) for each in times), ratio]
        print(f"| {name} | {found[name][0]:.3f} | {found[name][1]:.3f} | {ratio:.3f} |", flush=True)
    ratios = sorted(each[2] for each in found.values())
    span = f"ratios from {ratios[0]:.3f} to {ratios[-1]:.3f}, median {statistics.median(ratios):.3f}"
    print(f"\n{len(ratios)} calls; {span}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
