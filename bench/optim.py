"""Moments of AdamW in rows beside other optimizers: time of a step, bytes a parameter, and the loss of a small model.

    PYTHONPATH=src python bench/optim.py              prints the markdown of docs/optim.md
    PYTHONPATH=src python bench/optim.py --steps 50   a shorter training

Steps are timed in one process, one optimizer after the other in each round; the figure is the least of all rounds.
bitsandbytes and torchao are timed where they are installed. Losses are of held-out text, with three seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from machine import sentence
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text

SHAPES = [(1024, 1024)] * 6 + [(4096, 1024)] * 2
CONFIG = GPTConfig(layers=2, width=64, heads=4, context=64)
SEEDS = (0, 1, 2)


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    """Every optimizer that can be had here."""
    found: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch, fused": lambda p: torch.optim.AdamW(p, fused=True),
        "torch, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "narrowcast, state=None, fused": lambda p: nc.optim.AdamW(p, fused=True),
        **{
            f"narrowcast, state={state!r}": lambda p, state=state: nc.optim.AdamW(p, state=state)
            for state in ("int8", "fp8_e4m3", "int4", "nf4")
        },
    }
    try:
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = lambda p: bitsandbytes.optim.AdamW8bit(p)
    except Exception as error:
        print(f"bitsandbytes: not here ({type(error).__name__})\n")
    try:
        import torchao.optim

        found["torchao AdamW8bit"] = lambda p: torchao.optim.AdamW8bit(p)
    except Exception as error:
        print(f"torchao: not here ({type(error).__name__})\n")
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of everything in its state, of tensors inside tensors too."""

    def size(value: Any) -> int:
        if hasattr(value, "__tensor_flatten__"):
            return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.nbytes if isinstance(value, Tensor) else 0

    return sum(size(value) for state in optimizer.state.values() for value in state.values())


def time_steps(rounds: int) -> None:
    """Print the table of step times and bytes."""
    numel = sum(rows * columns for rows, columns in SHAPES)
    entries = {}
    for name, make in optimizers().items():
        parameters = [nn.Parameter(0.02 * torch.randn(shape)) for shape in SHAPES]
        for parameter in parameters:
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        optimizer = make(parameters)
        try:
            optimizer.step()
        except Exception as error:
            print(f"{name}: does not step on this machine ({type(error).__name__})\n")
            continue
        entries[name] = (optimizer, [])
    for _ in range(rounds):
        for optimizer, seconds in entries.values():
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    least = {name: min(seconds) for name, (_, seconds) in entries.items()}
    fused = least["torch, fused"]
    print(f"A step of {numel / 1e6:.1f} million parameters, {torch.get_num_threads()} threads, least of {rounds}:\n")
    print("| optimizer | ms | beside torch, fused | bytes of moments a parameter |\n|---|---:|---:|---:|")
    for name, (optimizer, _) in entries.items():
        each = state_bytes(optimizer) / numel
        print(f"| {name} | {1e3 * least[name]:.1f} | {least[name] / fused:.2f} | {each:.2f} |")
    print()


def trained(seed: int, steps: int, state: str | None) -> float:
    """The held-out loss of a small model."""
    model, text = ByteGPT(CONFIG, seed=seed), batches(stdlib_text(), CONFIG.context, 16, seed=seed)
    optimizer = nc.optim.AdamW(model.parameters(), lr=2e-3, state=state)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * (0.1 + 0.9 * (1 - step / steps))
    )
    for _ in range(steps):
        x, y = next(text)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        schedule.step()
    held_out = batches(stdlib_text(held_out=True), CONFIG.context, 64, seed=99)
    with torch.no_grad():
        losses = [loss_of(model(x), y).item() for x, y in (next(held_out) for _ in range(16))]
    return sum(losses) / len(losses)


def compare_losses(steps: int) -> None:
    """Print the table of losses."""
    numel = sum(parameter.numel() for parameter in ByteGPT(CONFIG).parameters())
    print(f"Held-out loss of a byte GPT of {numel / 1e6:.2f} million parameters after {steps} steps, seeds {SEEDS}:\n")
    print("| moments | each seed | mean | beside floats |\n|---|---|---:|---:|", flush=True)
    floats = 0.0
    for state in (None, "int8", "fp8_e4m3", "int4", "nf4"):
        losses = [trained(seed, steps, state) for seed in SEEDS]
        mean = sum(losses) / len(losses)
        floats = floats or mean
        each = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {state or 'floats'} | {each} | {mean:.4f} | {100 * (mean / floats - 1):+.2f}% |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    print(f"{sentence()}.\n")
    time_steps(given.rounds)
    compare_losses(given.steps)


if __name__ == "__main__":
    main()
