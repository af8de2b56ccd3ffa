"""How DistributedDataParallel hands over its gradients: a communication hook."""

# DDP reads the annotations of a hook: no `from __future__ import annotations` here.
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.errors import CollectiveError, DtypeError


def gradient_hook(state: GradientCompression, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp.register_comm_hook(state, gradient_hook)`: the average of a bucket over all ranks, compressed."""
    buffer = bucket.buffer()
    if buffer.is_sparse:
        raise DtypeError(
            "a bucket holds a sparse gradient, and codecs take dense ones. Make the embedding with sparse=False."
        )
    first = buffer.storage_offset()
    offsets = [int(gradient.storage_offset() - first) for gradient in bucket.gradients()]
    return state.reduce(buffer, bucket.parameters(), offsets, bucket.index(), bucket.is_last())


def attach(ddp: DistributedDataParallel, state: GradientCompression) -> None:
    """Register the hook, once all ranks are known to be configured alike."""
    if ddp._comm_hooks:
        raise CollectiveError(
            "model: this DistributedDataParallel has a communication hook already, and DDP takes one. Call "
            "compress_gradients once, or make a new DistributedDataParallel to change it."
        )
    like = next(parameter for parameter in ddp.parameters() if parameter.requires_grad)
    group: Any = state.process_group or ddp.process_group
    if group.size() > 1:
        state.agree(group, like.detach())
    ddp.register_comm_hook(state, gradient_hook)
