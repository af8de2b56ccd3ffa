"""Models whose momentum travels, for the tests of it: the same parameters, warm-up and steps."""

from __future__ import annotations

from typing import Any

import trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc

SHAPES, WARMUP, STEPS, REFRESH = trained.SHAPES, 2, 9, 4
BETA1, BETA2 = 0.9, 0.95


def made(
    codec: str = "sign", *, lr: float = 1e-3, fused: bool = False, buckets: float = trained.FEW, **options: Any
) -> Any:
    ddp = DDP(trained.Given(SHAPES), bucket_cap_mb=buckets)
    optimizer = nc.optim.AdamW(ddp.parameters(), lr, betas=(BETA1, BETA2), fused=fused)
    options = {"warmup_steps": WARMUP, "seed": trained.SEED, **options}
    return ddp, optimizer, nc.compress_gradients(ddp, codec, momentum=optimizer, **options)


def step_once(ddp: nn.Module, optimizer: Any, rank: int, step: int) -> trained.Named:
    """What `.grad` is after a backward; then the optimizer steps."""
    grads = trained.backward(ddp, trained.given(SHAPES, rank, step))
    optimizer.step()
    return grads
