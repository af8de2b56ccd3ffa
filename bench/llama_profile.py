"""Where the time of a token goes, by torch.profiler, and the bandwidth that limits it: for bench/llama.py."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

CLASSES = (
    ("attention", r"^attend$|attend_kernel|combine_kernel|fmha|flash|attention|softmax"),
    ("norms", r"add_norm|rms_norm|RMSNorm"),
    ("gates", r"gate_kernel|silu"),
    ("products", r"^(dot|tile|ring|slices|wide|join|total)$|linear_kernel|gemm|gemv|cutlass|nvjet|splitK|cublas"),
)
"""The first that is found in a kernel's name; what is none of them is glue."""

TOKENS = 16


def class_of(name: str) -> str:
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name)), "glue")


def account(kernels: list[tuple[float, float, str]]) -> tuple[dict[str, float], Counter[str]]:
    """Microseconds and launches by class, of kernels (start, end, name) in one stream.

    A kernel may be set up while the one before it runs, so it counts from when that one ends. What is between the end
    of one and the start of the next is a gap.
    """
    taken: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    last = None
    for start, end, name in sorted(kernels):
        if last is not None:
            taken["gaps"] += max(0.0, start - last)
        begun = start if last is None else max(start, last)
        kind = class_of(name)
        taken[kind] += max(0.0, end - begun)
        launches[kind] += 1
        last = end if last is None else max(last, end)
    return dict(taken), launches


def profile(steps: Any, name: str, layers: int) -> dict[str, object]:
    """Microseconds of a token by class, of steps that are replayed."""
    for _ in range(4):
        steps.begin()
        steps.read()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as seen:
        began = time.perf_counter()
        for number in range(TOKENS):
            steps.begin()
            if number:
                steps.read()
        steps.read()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - began) / TOKENS * 1e6
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [
        (event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event.get("cat") == "kernel"
    ]
    taken, launches = account(kernels)
    names: defaultdict[str, list[float]] = defaultdict(list)
    for start, end, kernel in kernels:
        names[kernel].append(end - start)
    each = {kind: value / TOKENS for kind, value in taken.items()}
    count = {kind: value / TOKENS for kind, value in launches.items()}
    total = sum(count.values())
    print(f"profile of {name}: {wall:.0f} us a token under the profiler, {total:.0f} launches, {layers} layers")
    for kind, value in sorted(each.items(), key=lambda item: -item[1]):
        print(f"    {kind:10s} {value:8.1f} us {value / sum(each.values()):5.0%}  {count.get(kind, 0):6.1f} launches")
    most = sorted(names.items(), key=lambda item: -sum(item[1]))[:12]
    for kernel, durations in most:
        print(f"      {sum(durations) / TOKENS:8.1f} us  {len(durations) / TOKENS:6.1f} x  {kernel[:90]}")
    lasting = {kernel[:120]: [len(all_) / TOKENS, sum(all_) / TOKENS] for kernel, all_ in most}
    return {"name": name, "wall_us": wall, "us": each, "launches": count, "kernels": lasting}


def read_bandwidth(device: str) -> float:
    """Bytes a second, by the kernel of bench/gpu_linear.py that does nothing but read; on a CPU, not measured."""
    if device == "cpu":
        return float("nan")
    from gpu_linear import read_bandwidth as measured

    return measured() * 1e6
