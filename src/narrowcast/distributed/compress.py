"""`compress_gradients`: the one line that a training script adds."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.distributed import ddp
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.gradient_options import Exempt, Mode, Schedule, one_dimensional
from narrowcast.distributed.gradients import GradientCompression
from narrowcast.errors import ModelKindError


def compress_gradients(
    model: nn.Module,
    codec: AnyCodec | None = "int8",
    *,
    error_feedback: Mode | None = None,
    warmup_steps: int = 0,
    schedule: Schedule | None = None,
    exempt: Exempt = one_dimensional,
    process_group: dist.ProcessGroup | None = None,
    seed: int | None = None,
) -> GradientCompression:
    """Compress the gradients of a DDP model from the next backward on. Every rank calls it alike.

    `process_group` is the model's own by default. The other arguments are those of `GradientCompression`, which is
    returned.
    """
    found = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if not isinstance(found, DistributedDataParallel):
        raise ModelKindError(
            f"model: {type(model).__name__} exchanges no gradients. Wrap it first: "
            "model = DistributedDataParallel(model), then compress_gradients(model, ...)."
        )
    state = GradientCompression(
        codec,
        error_feedback=error_feedback,
        warmup_steps=warmup_steps,
        schedule=schedule,
        exempt=exempt,
        process_group=process_group or found.process_group,
        model=found.module,
        seed=seed,
    )
    ddp.attach(found, state)
    return state
