"""Averages of buckets that no codec touches: of one rank, which sends nothing, or by torch's own all_reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.error_feedback.redistribution import added_to_average


def average_alone(
    state: GradientCompression,
    buffer: Tensor,
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    first: bool,
    last: bool,
) -> torch.futures.Future[Tensor]:
    """The average of one rank. Residuals of several ranks, from before, are added in the first step that is applied."""
    states = state.loaded_of_all()
    if states and state.momentum is None and state.meetings is None:
        outcome = state.outcome_of(first)
        for parameter, offset in zip(parameters, offsets, strict=True):
            residual = added_to_average(states, state.parameters.name_of(parameter))
            if residual is not None:
                gradient = buffer[offset : offset + residual.numel()]
                gradient.copy_(gradient.float().add_(residual.to(buffer.device)))
        outcome.note(buffer)
        outcome.complete = last
        if last and outcome.applies:
            state.forget()
    state.step += last
    averaged: torch.futures.Future[Tensor] = torch.futures.Future()
    averaged.set_result(buffer)
    return averaged


def average_by_torch(
    state: GradientCompression, buffer: Tensor, index: int, last: bool, plain_bytes: int
) -> torch.futures.Future[Tensor]:
    """The average by torch's own all_reduce: what DDP does without a hook."""
    state.count_idle(index, buffer.numel(), plain_bytes)
    state.step += last
    work = dist.all_reduce(buffer.div_(dist.get_world_size(state.members)), group=state.members, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(first_result)
    return averaged


def first_result(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    """The one tensor of a work's result, for DDP, which wants it alone."""
    return done.value()[0]
