"""Averages of buckets that no codec touches: of one rank, which sends nothing, or by torch's own all_reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket, last_result
from narrowcast.distributed.gradients.error_feedback.redistribution import added_to_average


def average_alone(state: GradientCompression, bucket: DdpBucket) -> torch.futures.Future[Tensor]:
    """The average of one rank. Residuals of several ranks, from before, are added in the first step that is applied."""
    states, buffer = state.loaded_of_all(), bucket.buffer
    if states and state.momentum is None and state.meetings is None:
        outcome = state.outcome_of(bucket.index == 0)
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            residual = added_to_average(states, state.parameters.name_of(parameter))
            if residual is not None:
                gradient = buffer[offset : offset + residual.numel()]
                gradient.copy_(gradient.float().add_(residual.to(buffer.device)))
        outcome.note(buffer)
        outcome.complete = bucket.last
        if bucket.last and outcome.applies:
            state.forget()
    state.step += bucket.last
    averaged: torch.futures.Future[Tensor] = torch.futures.Future()
    averaged.set_result(buffer)
    return averaged


def average_by_torch(state: GradientCompression, bucket: DdpBucket, plain_bytes: int) -> torch.futures.Future[Tensor]:
    """The average by torch's own all_reduce: what DDP does without a hook."""
    state.count_idle(bucket.index, bucket.buffer.numel(), plain_bytes)
    state.step += bucket.last
    average = bucket.buffer.div_(dist.get_world_size(state.members))
    work = dist.all_reduce(average, group=state.members, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(last_result)
    return averaged
