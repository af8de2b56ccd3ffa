"""Decoders of other libraries beside ours: tokens a second at batch 1, all of them in one run, about 4 minutes.

    PYTHONPATH=src:bench:tests:wheels/peers python3 bench/decode_rivals.py [--only "NAME;NAME"] [--layers N] [--limit S]

Llama 7B shapes, random weights, bf16 between products. Every contender is a process. At first all of them build,
quantize, compile, tune and warm up; who is not ready after --limit seconds is ended, and the table says why one is
missing. Then they are timed one by one, while the others wait: three runs of 200 tokens from an empty cache, a CUDA
graph a token, after one run that does not count. Building, and whatever Inductor and Triton time to choose kernels, is
done by one process at a time.

`compiled`: each layer and the head by torch.compile, plain torch between products, with the tuning by which Inductor
writes its own kernels for one row of x; "its settings" adds what torchao sets by itself. The others replace the linear
layers in our runner, our kernels between them. Products that share an input are joined in all of them. gpt-fast's own
code is what wheels/gptfast/harness.py makes of a copy of it (not in this repository). Contenders are in
decode_contenders.py.

"of reading": what reading the weights once, without the embedding, takes of a token's time. JSON goes to
$OUT/rivals.json where OUT is set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

READING, GPT_FAST = "reading", "gpt-fast int8, its own code"
COMPILED = (
    *("bf16, compiled", "gpt-fast's int8 formula, compiled", "torchao int8, compiled"),
    *("torchao int8, compiled, its settings", "torchao int4 g128, compiled"),
)
LINEARS = ("gemlite int8", "gemlite int4 g128", "bitsandbytes nf4")
OURS = ("bf16", "int8", "int4:block=128", "nf4", "apot4", "fp8_e4m3")
NAMES = (READING, GPT_FAST, *COMPILED, *LINEARS, *(f"ours {codec}" for codec in OURS))
CONTENDER = Path(__file__).with_name("decode_contenders.py")
TIMING_LIMIT_S = 60.0


class Child:
    """The process of a contender, and what it has said. It is not given --only, which Inductor reads, too."""

    def __init__(self, name: str, given: argparse.Namespace, events: queue.Queue[Child]) -> None:
        self.name, self._ended = name, False
        self.said: dict[str, Any] = {}
        own: Path = given.folder / str(NAMES.index(name))
        own.mkdir()
        self._log = own / "log"
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
            "TRITON_CACHE_DIR": str(own / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
        }
        options = [f"--{option}={getattr(given, option)}" for option in ("shape", "tokens", "device", "folder")]
        options += [f"--contender={name}", *([f"--layers={given.layers}"] if given.layers else [])]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CONTENDER), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def _listen(self, events: queue.Queue[Child]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said |= json.loads(line)
            events.put(self)
        if not self.done:
            code = self.process.wait()
            self.said["error"] = f"its process ended with {code}: {(self.log.strip().splitlines() or [''])[-1][:300]}"
            events.put(self)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def time(self, events: queue.Queue[Child]) -> None:
        """Let it run alone, and end it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("run\n")
            self.process.stdin.flush()
        until = time.monotonic() + TIMING_LIMIT_S
        while not self.done and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                events.get(timeout=0.5)
        self.end(f"timing took over {TIMING_LIMIT_S:.0f} s")

    @property
    def done(self) -> bool:
        return "error" in self.said or "runs" in self.said

    @property
    def ready(self) -> bool:
        return "weights" in self.said and not self.done

    def end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = True
        if not self.done:
            self.said["error"] = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def line(self, bandwidth: float) -> str:
        """A line of the table."""
        if not self.said.get("runs"):
            return f"{self.name:40s} did not run: {self.said['error']}"
        speed: float = statistics.median(self.said["runs"])
        if self.name == READING:
            return f"{self.name:40s} {speed / 1e12:7.2f} TB/s"
        runs = ", ".join(f"{run:.1f}" for run in self.said["runs"])
        gib, share = self.said["weights"] / 2**30, speed * self.said["read"] / bandwidth
        spent = f"ready in {self.said['prepared_s']:.0f} s"
        return f"{self.name:40s} {speed:7.1f} tokens/s ({runs}); {gib:5.2f} GiB, {share:3.0%} of reading; {spent}"


def prepare(given: argparse.Namespace, events: queue.Queue[Child], children: list[Child]) -> list[str]:
    """Start contenders until all are ready or the time is over; those that were not even started."""
    waiting = [name for name in NAMES if name in given.only]
    until = time.monotonic() + given.limit
    while time.monotonic() < until:
        while waiting and sum(not child.ready and not child.done for child in children) < given.at_once:
            children.append(Child(waiting.pop(0), given, events))
        if all(child.ready or child.done for child in children):
            break
        with contextlib.suppress(queue.Empty):
            child = events.get(timeout=1)
            what = child.said.get("error") or f"ready in {child.said['prepared_s']:.0f} s"
            print(f"   {child.name}: {what}", file=sys.stderr, flush=True)
    for child in children:
        if not child.ready:
            child.end(f"not ready after {given.limit:.0f} s")
    return waiting


def save(given: argparse.Namespace, children: list[Child]) -> None:
    if "OUT" not in os.environ:
        return
    lines = [{"name": child.name, **child.said} for child in children]
    for line, child in zip(lines, children, strict=True):
        if "error" in line:
            line["log"] = child.log[-3000:]
    found = {"shape": given.shape, "layers": given.layers, "tokens": given.tokens, "lines": lines}
    Path(os.environ["OUT"], "rivals.json").write_text(json.dumps(found, indent=1))


def main(given: argparse.Namespace) -> None:
    events: queue.Queue[Child] = queue.Queue()
    children: list[Child] = []
    bandwidth = float("nan")
    try:
        for name in prepare(given, events, children):
            print(f"{name:40s} did not run: no time was left to start it", flush=True)
        for child in children:
            if child.ready:
                child.time(events)
            if child.name == READING and "runs" in child.said:
                bandwidth = statistics.median(child.said["runs"])
            print(child.line(bandwidth), flush=True)
            save(given, children)
    finally:
        for child in children:
            child.end("broken off")


def contenders(text: str) -> list[str]:
    chosen = text.split(";")
    if unknown := set(chosen) - set(NAMES):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {'; '.join(NAMES)}")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=contenders, default=list(NAMES), metavar="NAME;NAME")
    parser.add_argument("--layers", type=int, help="fewer layers, for a try")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds until all must be ready")
    parser.add_argument("--at-once", type=int, default=16, help="how many prepare at the same time")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--shape", default="7b", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    with tempfile.TemporaryDirectory(prefix="rivals_", ignore_cleanup_errors=True) as folder:
        chosen.folder = Path(folder)
        main(chosen)
