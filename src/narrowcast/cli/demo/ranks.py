"""One rank of the demo's trainings: `torchrun ... -m narrowcast.cli.demo.ranks FOLDER STEPS WAY...`.

A WAY is the codec of the gradients, or fp32. Rank 0 prints a line of JSON for each step, and saves each trained model
to the folder.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text

SHAPE = GPTConfig(layers=2, width=128, heads=4, context=64)
"""Small, with a short context: in the same time, many cheap steps reached a lower loss than few expensive ones."""
BATCH = 8
"""Sequences per step on each rank."""
RATE = 4e-3
"""The highest learning rate of the schedule."""


def train(way: str, steps: int, folder: Path) -> None:
    """Train one model with gradients in `way`, and save it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = ByteGPT(SHAPE)
    ddp = DistributedDataParallel(model)
    compression = None if way == "fp32" else nc.compress_gradients(ddp, way)
    plain = 2 * (size - 1) / size * sum(4 * parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(ddp.parameters(), RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1)
    data = batches(stdlib_text(), model.config.context, BATCH, seed=0, rank=rank)
    began = time.perf_counter()
    for step, (inputs, targets) in enumerate(islice(data, steps), 1):
        optimizer.zero_grad()
        loss = loss_of(ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if rank == 0:
            sent = step * plain if compression is None else compression.stats().sent_bytes
            record = {
                "way": way,
                "step": step,
                "loss": loss.item(),
                "sent": sent,
                "seconds": time.perf_counter() - began,
            }
            print(json.dumps(record), flush=True)
    if rank == 0:
        torch.save(model.state_dict(), folder / f"{way}.pt")


def main() -> None:
    folder, steps, *ways = sys.argv[1:]
    dist.init_process_group("gloo")
    for way in ways:
        train(way, int(steps), Path(folder))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
