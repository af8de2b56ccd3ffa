"""One rank of bench/training.py: trains a byte-level GPT, and records loss, seconds, bytes and memory.

A job is a dict from JSON, the same on every rank; rank 0 appends a line of JSON to `job["output"]` for each result.
`speed` lets methods take turns in one run, `quality` and `race` train one model after another, `memory` a few steps.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text
from narrowcast.netlab import read
from training_methods import METHODS, Method, attach, tensors_in

HELD_OUT_WINDOWS = 512
SETTLING = 3
"""Steps before the first time is taken: connections are made, DDP rearranges its buckets, PowerSGD starts."""


class Trainer:
    """One model on this rank, its optimizer and its data."""

    def __init__(self, job: dict[str, Any], method: Method, seed: int, warmup_steps: int, steps: int) -> None:
        self.config = GPTConfig(**job["config"])
        model = ByteGPT(self.config, seed=seed)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        # torch's own, to the bit, where the momentum does not travel.
        self.optimizer = nc.optim.AdamW(groups, lr=job["rate"], betas=(0.9, 0.95), fused=True)
        self.ddp, self.compression = attach(method, model, warmup_steps, self.optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: warm_cosine(step, steps))
        text = stdlib_text()
        self.data = batches(text, self.config.context, job["batch"], seed=seed, rank=dist.get_rank())
        self.exchanges = method.kind not in ("alone", "torchft")
        self.done = 0

    def step(self) -> Tensor:
        """One step; the loss of this rank's own batch."""
        inputs, targets = next(self.data)
        with contextlib.nullcontext() if self.exchanges else self.ddp.no_sync():
            loss = loss_of(self.ddp(inputs), targets)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.done += 1
        return loss.detach()

    def sync(self) -> None:
        """Let ranks that have trained alone meet."""
        if isinstance(self.compression, nc.GradientCompression):
            self.compression.sync()

    @torch.no_grad()
    def held_out_loss(self, windows: Tensor) -> float:
        """The mean over all ranks, each of which takes its share of the windows."""
        mine = windows[dist.get_rank() :: dist.get_world_size()]
        losses = [loss_of(self.ddp.module(part[:, :-1]), part[:, 1:]) * len(part) for part in mine.split(32)]
        total = torch.stack([torch.stack(losses).sum(), torch.tensor(float(len(mine)))]).double()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def same_on_all_ranks(self) -> bool:
        """Whether the parameters are the same bits everywhere."""
        mine = torch.cat([p.detach().flatten() for p in self.ddp.parameters()]).view(torch.int32)
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return torch.equal(least, most)


def warm_cosine(step: int, steps: int) -> float:
    """The share of the learning rate: up over the first twentieth of the steps, then down to a tenth on a cosine."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - rise) / max(1, steps - rise)))


def held_out_windows(config: GPTConfig, count: int) -> Tensor:
    """Windows of text that nobody trains on, evenly spaced."""
    text = stdlib_text(held_out=True)
    starts = torch.linspace(0, len(text) - config.context - 1, count).long()
    return text[starts[:, None] + torch.arange(config.context + 1)].long()


# -- parts -------------------------------------------------------------------------------------------------------------


def speed(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Seconds a step (the slowest rank's) and bytes sent (the most of any rank), in turns."""
    trainers = {}
    for name in job["methods"]:
        trainers[name] = Trainer(job, METHODS[name], 0, METHODS[name].warmup_steps(0), 1000)
    figures: dict[str, Any] = {name: {"seconds": [], "sent": []} for name in trainers}
    for turn in range(job["rounds"] + 1):
        for name, trainer in trainers.items():
            count = job["turn"] if turn else SETTLING
            dist.barrier()
            before, start = read().tx_bytes, time.perf_counter()
            for _ in range(count):
                trainer.step()
            both = [(time.perf_counter() - start) / count, (read().tx_bytes - before) / count]
            slowest = torch.tensor(both, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                figures[name]["seconds"].append(slowest[0].item())
                figures[name]["sent"].append(slowest[1].item())
    yield figures


def quality(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One training a seed: the loss on its batches, ten steps at a time, and on text that was held out."""
    method, steps = METHODS[job["method"]], job["steps"]
    windows = held_out_windows(GPTConfig(**job["config"]), HELD_OUT_WINDOWS)
    every = max(1, steps // 20)
    for seed in job["seeds"]:
        trainer = Trainer(job, method, seed, method.warmup_steps(steps), steps)
        start = time.perf_counter()
        losses, curve = [], []
        for step in range(1, steps + 1):
            losses.append(trainer.step())
            if step % every == 0 and step < steps:
                curve.append([step, trainer.held_out_loss(windows[::4])])
        trainer.sync()
        curve.append([steps, trainer.held_out_loss(windows)])
        means = torch.stack(losses).double()
        dist.all_reduce(means)
        means /= dist.get_world_size()
        yield {
            "seed": seed,
            "final": curve[-1][1],
            "curve": [[step, round(loss, 5)] for step, loss in curve],
            "train": [round(part.mean().item(), 4) for part in means.split(10)],
            "same_bits": trainer.same_on_all_ranks(),
            "seconds": round(time.perf_counter() - start, 1),
        }


def race(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One training in a network in a box: seconds of its steps, the slowest rank's, and losses, off the clock."""
    method, steps = METHODS[job["method"]], job["steps"]
    windows = held_out_windows(GPTConfig(**job["config"]), HELD_OUT_WINDOWS)
    trainer = Trainer(job, method, job.get("seed", 0), method.warmup_steps(steps), steps)
    every = max(1, round(steps / job.get("points", 1)))
    every = -(-every // (method.every or 1)) * (method.every or 1)  # between meetings ranks have models of their own
    spent, curve = 0.0, []
    for first in range(0, steps, every):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(first, min(steps, first + every)):
            trainer.step()
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        spent += taken.item()
        curve.append([trainer.done, round(spent, 3), round(trainer.held_out_loss(windows), 5)])
    yield {"steps": steps, "seconds": round(spent, 2), "final": curve[-1][2], "curve": curve}


def memory(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Peak memory of rank 0 after a few steps, how much of it came after the first, and what a compression keeps."""
    method = METHODS[job["method"]]
    trainer = Trainer(job, method, 0, method.warmup_steps(0), 1000)
    peaks = []
    for _ in range(2):
        for _ in range(2 * SETTLING):
            trainer.step()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    numel = sum(p.numel() for p in trainer.ddp.parameters())
    held = sum(tensor.nbytes for tensor in tensors_in(trainer.compression))
    yield {"peak": peaks[-1], "growth": peaks[1] - peaks[0], "kept_per_parameter": held / numel}


PARTS = {"speed": speed, "quality": quality, "race": race, "memory": memory}


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    for result in PARTS[job["part"]](job):
        if dist.get_rank() == 0:
            with Path(job["output"]).open("a") as output:
                output.write(json.dumps(result) + "\n")
    dist.barrier()
    # All is written. Now and then a plain DDP with one of PyTorch's hooks aborts while the interpreter ends
    # ("terminate called without an active exception"), which would read as a failed run.
    os._exit(0)
