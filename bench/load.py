"""How long loading and saving take, beside the package safetensors on the same file, in the same run.

    PYTHONPATH=src .venv/bin/python bench/load.py [--tensors 100000] [--times 5]

`nc.load` compares every checksum, so it reads every byte; `safetensors.torch.load_file` maps the file and reads none,
so it is timed again with a copy of every tensor behind it, which is what any use of the tensors costs. Times are CPU
seconds of this process, so that others count little; they alternate, and each figure is a median. The limit that many
tensors head for is twice safetensors' time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

import narrowcast as nc
from machine import sentence

LIMIT = 2.0


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    held = work()
    taken = time.process_time() - begin
    del held
    return taken


def touched(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor by the package safetensors, each of its bytes read once."""
    tensors = safetensors.torch.load_file(path)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def compared(ways: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """The median of each way; ways take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(times):
        for name, work in ways.items():
            taken[name].append(seconds(work))
    return {name: statistics.median(values) for name, values in taken.items()}


def report(title: str, state: dict[str, torch.Tensor], folder: Path, times: int) -> None:
    path = folder / "x.safetensors"
    nc.save(state, path)
    saving = compared(
        {
            "safetensors": lambda: safetensors.torch.save_file(state, folder / "y.safetensors"),
            "narrowcast": lambda: nc.save(state, path),
        },
        times,
    )
    loading = compared(
        {
            "safetensors": lambda: safetensors.torch.load_file(path),
            "safetensors, every byte read": lambda: touched(path),
            "narrowcast, verified": lambda: nc.load(path),
            "narrowcast, verify=False": lambda: nc.load(path, verify=False),
        },
        times,
    )
    print(f"\n{title}\n\n| | seconds | over safetensors |\n|---|---:|---:|")
    for verb, taken in (("save", saving), ("load", loading)):
        for name, value in taken.items():
            print(f"| {verb}: {name} | {value:.3f} | {value / taken['safetensors']:.2f} |")
    ratio = loading["narrowcast, verified"] / loading["safetensors"]
    print(f"\nverified over safetensors: {ratio:.2f}; the limit for many tensors is {LIMIT:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(sentence())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = {f"model.layers.{i // 10}.block.{i}.weight": torch.randn(4, 4) for i in range(options.tensors)}
        report(f"{options.tensors} tensors of 16 floats", tiny, folder, options.times)
        large = {f"layers.{i}.weight": torch.randn(2048, 4096) for i in range(8)}
        report("8 tensors of 32 MiB", large, folder, options.times)


if __name__ == "__main__":
    main()
