"""How DistributedDataParallel hands over its gradients: a communication hook, which it calls bucket by bucket.

The hook gives DDP a future of the averages at once, and backward goes on: the lane of the group does the work
meanwhile. A step is over with the bucket that DDP calls the last one of a backward.
"""

# DDP reads the annotations of a hook: no `from __future__ import annotations` here.
import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.distributed import arguments
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.layout import ChunkLayout, Gradient, check_cover, lay_out
from narrowcast.distributed.gradients.options import numbers
from narrowcast.distributed.gradients.reduction import FlatBucket, Reduction
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.errors import CollectiveError, DtypeError, SpecError


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
    state.trainer = weakref.ref(ddp)
    ddp.register_comm_hook(state, gradient_hook)


def gradient_hook(state: GradientCompression, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp.register_comm_hook(state, gradient_hook)`: the average of a bucket over all ranks, compressed."""
    buffer = bucket.buffer()
    try:
        _check(state, bucket)
    except Exception as error:
        members = arguments.members(state.process_group, "compress_gradients")
        if members is not None:
            group_for(members, buffer.device, "gradients").refuse("gradients", error)
        raise
    first, parameters = buffer.storage_offset(), bucket.parameters()
    offsets = [int(gradient.storage_offset() - first) for gradient in bucket.gradients()]
    # A complex gradient lies in a real buffer as twice the elements, and DDP counts its place in complex ones.
    offsets = [offset * numbers(p) for offset, p in zip(offsets, parameters, strict=True)]
    return average_bucket(state, buffer, parameters, offsets, bucket.index(), bucket.is_last())


def average_bucket(
    state: GradientCompression,
    buffer: Tensor,
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    index: int,
    last: bool,
) -> torch.futures.Future[Tensor]:
    """Average a bucket over all ranks, in place: a future of it. Offsets are counted in elements of the buffer."""
    members = arguments.members(state.process_group, "compress_gradients")
    if members is None or members.size() == 1:
        return _alone(state, buffer, last)
    group = state.agree(members, buffer)
    plain_bytes = 2 * arguments.nbytes(buffer) * (group.size - 1) // group.size  # what a ring sends
    if state.idle:
        return _as_torch_does(state, members, buffer, index, last, plain_bytes)

    def cut(all_exempt: bool) -> list[ChunkLayout]:
        return _layout(state, parameters, offsets, buffer.numel(), group, all_exempt)

    with group.refusing("gradients"):
        reduction = state.prepare(buffer, index, plain_bytes, cut, state.step)
        outcome = state.outcome_of(index == 0)
        bucket = FlatBucket(buffer, reduction.layout, state.residuals, outcome, reduction.probe)
        future = _start(state, group, reduction, bucket, last)
    if last:
        state.clock.handed_over()
        state.step += 1
    return future


def _start(
    state: GradientCompression, group: Group, reduction: Reduction, bucket: FlatBucket, last: bool
) -> torch.futures.Future[Tensor]:
    index, outcome = reduction.stats.index, bucket.outcome
    if index == 0:
        state.clock.next_step()

    def job() -> list[Tensor]:
        if outcome.error is None:
            # DDP waits for its buckets in order. An error is raised when the lane is done with all of them: DDP would
            # otherwise fill buffers for the next step that the lane still writes to.
            with contextlib.suppress(Exception):
                state.reduce(group, reduction, bucket, f"bucket {index}")
        else:
            group.give_up("gradients", outcome.error)
        if last and outcome.error is not None:
            raise outcome.error
        outcome.complete = last
        return [bucket.gradients]

    work = group.lane.start("gradients", job, [bucket.gradients], async_op=True)
    assert work is not None
    return work.get_future().then(_first)


def _layout(
    state: GradientCompression,
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    total: int,
    group: Group,
    all_exempt: bool,
) -> list[ChunkLayout]:
    """How a bucket of `total` elements with these parameters is cut."""
    key = (*map(id, parameters), *offsets, total, all_exempt)
    if key not in state.layouts:
        gradients = []
        for parameter, offset in zip(parameters, offsets, strict=True):
            name, numel = state.parameters.name_of(parameter), numbers(parameter) * parameter.numel()
            exempt = all_exempt or state.parameters.is_exempt(name, numel, group.size)
            gradients.append(Gradient(name, offset, numel, exempt))
        check_cover(gradients, total)
        state.layouts[key] = lay_out(gradients, group.size, at_once=group.nccl)
    return state.layouts[key]


def _alone(state: GradientCompression, buffer: Tensor, last: bool) -> torch.futures.Future[Tensor]:
    """The average of one rank."""
    state.check_alone()
    state.step += last
    averaged: torch.futures.Future[Tensor] = torch.futures.Future()
    averaged.set_result(buffer)
    return averaged


def _as_torch_does(
    state: GradientCompression, members: dist.ProcessGroup, buffer: Tensor, index: int, last: bool, plain_bytes: int
) -> torch.futures.Future[Tensor]:
    """The average by torch's own all_reduce: what DDP does without a hook."""
    state.count_idle(index, buffer.numel(), plain_bytes)
    state.step += last
    work = dist.all_reduce(buffer.div_(members.size()), group=members, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(_first)
    return averaged


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


def _check(state: GradientCompression, bucket: dist.GradBucket) -> None:
    _check_join(state.trainer())
    if bucket.buffer().is_sparse:
        name = ", ".join(state.parameters.name_of(p) for p in bucket.parameters())  # DDP puts it in alone
        raise DtypeError(
            f"{name}: its gradient is sparse, and codecs take dense ones. Make the embedding with sparse=False."
        )


def _check_join(ddp: Any) -> None:
    """Raise if a sum is to be divided by the number of ranks that have inputs left: DDP tells no hook how many have."""
    if ddp is not None and ddp._join_config.enable and not getattr(ddp, "_divide_by_initial_world_size", True):
        raise SpecError(
            "join(divide_by_initial_world_size=False): compressed gradients are averaged over all ranks of the group, "
            "and DDP does not tell a communication hook how many have inputs left. Call model.join(), which divides by "
            "the number of all ranks."
        )
