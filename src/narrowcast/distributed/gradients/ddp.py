"""How DistributedDataParallel hands over its gradients: a communication hook, which it calls bucket by bucket.

The hook gives DDP a future of the averages at once, and backward goes on: the lane of the group does the work
meanwhile. A step is over with the bucket that DDP calls the last one of a backward.
"""

# DDP reads the annotations of a hook: no `from __future__ import annotations` here.
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from narrowcast.distributed.gradients import local_updates, uncompressed
from narrowcast.distributed.gradients.buckets import flat_bucket, layout_of, plain_bytes_of
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket, JoinedBuckets, last_result
from narrowcast.distributed.gradients.error_feedback.outcome import raise_at_the_end
from narrowcast.distributed.gradients.layout import ChunkLayout
from narrowcast.distributed.gradients.momentum import FormedMomentum
from narrowcast.distributed.gradients.options import reals_per_element
from narrowcast.distributed.gradients.parameters import strides_in_bucket
from narrowcast.distributed.gradients.reduction import Bucket, Reduction
from narrowcast.distributed.meshes import Given, check_mesh, size_of
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.group import Group
from narrowcast.errors import CollectiveError, DtypeError, ShapeError, SpecError


def attach(ddp: DistributedDataParallel, state: GradientCompression) -> None:
    """Register the hook, once all ranks are known to be configured alike."""
    if ddp._comm_hooks:
        raise CollectiveError(
            "model: this DistributedDataParallel has a communication hook already, and DDP takes one. Call "
            "compress_gradients once, or make a new DistributedDataParallel to change it."
        )
    like = next(parameter for parameter in ddp.parameters() if parameter.requires_grad)
    _check_mesh(state.process_group, ddp)
    ranks = size_of(state.process_group, "compress_gradients")
    _watch_momentum(state, [p for p in ddp.parameters() if p.requires_grad], ranks)
    if state.meetings is not None:
        local_updates.name_parameters(ddp, state)
    if ranks > 1:
        state.agree(state.process_group, like.detach())
    if state.momentum is not None and ddp.find_unused_parameters:
        state.momentum.leave_unused_alone()
    state.trainer = weakref.ref(ddp)
    state.order.count_for(ddp)
    ddp.register_comm_hook(state, gradient_hook)
    if state.meetings is not None:
        local_updates.attach(ddp, state)


def _watch_momentum(state: GradientCompression, parameters: Sequence[Tensor], ranks: int) -> None:
    if state.momentum is not None:
        travelling = [p for p in parameters if state.parameters.travels_in_codec(p, ranks)]
        state.momentum.watch((state.parameters.name_of(p), p) for p in state.momentum.unwatched(travelling))


def _check_mesh(given: Given, ddp: Any) -> None:
    if isinstance(given, DeviceMesh):
        check_mesh(given, "process_group", "compress_gradients")
        of_mesh, of_ddp = sorted(given.mesh.flatten().tolist()), sorted(dist.get_process_group_ranks(ddp.process_group))
        if of_mesh != of_ddp:
            raise ShapeError(
                f"process_group: a mesh of ranks {of_mesh}, and the DistributedDataParallel is on ranks {of_ddp}. Give "
                "it a mesh of the ranks that the model is on."
            )


def gradient_hook(state: GradientCompression, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp.register_comm_hook(state, gradient_hook)`: the average of a bucket over all ranks, compressed."""
    try:
        _check(state, bucket)
        index, last = state.order.place(bucket)
    except Exception as error:
        state.refuse(error, bucket.buffer().device)
        raise
    if local_updates.is_alone(state):
        return local_updates.keep(state, bucket.buffer(), index, last)
    ready, order = _as_ddp_bucket(bucket, index, last), state.order
    waiting = order.waiting if index else None  # what waited in a backward that broke off waits no more
    order.waiting = None
    if waiting is not None and not waiting.joins(ready):
        average_bucket(state, waiting).add_done_callback(waiting.settle)
        waiting = None
    ranks = size_of(state.process_group, "compress_gradients")
    if ready.waits(state.trainer(), state.travel_at(state.step).codec, ranks):
        order.waiting = ready
        return ready.averaged
    return average_bucket(state, ready, waiting)


def _as_ddp_bucket(bucket: dist.GradBucket, index: int, last: bool) -> DdpBucket:
    buffer, parameters = bucket.buffer(), bucket.parameters()
    starts = [int(gradient.storage_offset() - buffer.storage_offset()) for gradient in bucket.gradients()]
    # A complex gradient lies in a real buffer as twice the elements, and DDP counts its place in complex ones.
    offsets = [start * reals_per_element(p) for start, p in zip(starts, parameters, strict=True)]
    return DdpBucket(buffer, parameters, offsets, index, last)


def average_bucket(
    state: GradientCompression, bucket: DdpBucket, waiting: DdpBucket | None = None
) -> torch.futures.Future[Tensor]:
    """Average a bucket over all ranks, in place: a future of it. One that waited for it travels along."""
    if size_of(state.process_group, "compress_gradients") <= 1:
        return uncompressed.average_alone(state, bucket)
    group = state.agree(state.process_group, bucket.buffer)
    if state.idle:
        return uncompressed.average_by_torch(state, bucket, plain_bytes_of([bucket.buffer], group))
    joined = JoinedBuckets([bucket] if waiting is None else [waiting, bucket])

    def cut(all_exempt: bool) -> list[ChunkLayout]:
        return layout_of(state, joined.parameters, joined.offsets, joined.numel, group, all_exempt)

    with group.refusing("gradients"):
        reduction = state.prepare(joined.buffers, joined.index, plain_bytes_of(joined.buffers, group), cut, state.step)
        outcome = state.outcome_of(joined.index == 0)
        reduced = flat_bucket(reduction, joined.buffers, state.residuals_of(reduction), outcome, group)
        formed = _form(state, reduction, joined, group.size)
        future = _start(state, group, reduction, reduced, joined, formed)
    if joined.last:
        state.clock.handed_over()
        state.step += 1
    return future


def _form(state: GradientCompression, reduction: Reduction, joined: JoinedBuckets, ranks: int) -> FormedMomentum | None:
    """How gradients that are not exempt become the momentum before they travel; None in steps that send gradients."""
    if state.momentum is None or not reduction.momentum:
        return None
    travelling = [
        (parameter, _view(bucket.buffer, parameter, offset))
        for bucket in joined.buckets
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
        if state.parameters.travels_in_codec(parameter, ranks)
    ]
    return state.momentum.hand_over([p for p, _ in travelling], [gradient for _, gradient in travelling])


def _view(buffer: Tensor, parameter: Tensor, offset: int) -> Tensor:
    """A parameter's gradient in a bucket, in its shape.

    GradBucket.gradients() does not do it: its views are contiguous, also those of a parameter that is not.
    """
    return buffer.as_strided(parameter.shape, strides_in_bucket(parameter), buffer.storage_offset() + offset)


def _start(
    state: GradientCompression,
    group: Group | Mesh,
    reduction: Reduction,
    bucket: Bucket,
    joined: JoinedBuckets,
    formed: FormedMomentum | None,
) -> torch.futures.Future[Tensor]:
    index, last, outcome = joined.index, joined.last, bucket.outcome
    if index == 0:
        state.clock.next_step()
    if last:
        raise_at_the_end(outcome)

    def job() -> list[Tensor]:
        if formed is not None and outcome.error is None:
            outcome.error = _error_of(formed.form)
        if outcome.error is None:
            # DDP waits for its buckets in order. An error is raised when the lane is done with all of them: DDP would
            # otherwise fill buffers for the next step that the lane still writes to.
            with contextlib.suppress(Exception):
                state.reduce(group, reduction, bucket, f"bucket {index}")
        else:
            group.give_up("gradients", outcome.error)
        if formed is not None and outcome.error is None:
            outcome.error = _error_of(formed.restore)
        if last and outcome.error is not None and not outcome.raised_by_backward:
            raise outcome.error
        outcome.complete = last and outcome.error is None
        if outcome.complete:
            state.counted.end_step(index)
        return joined.buffers

    work = group.lane.start("gradients", job, joined.buffers, async_op=True)
    assert work is not None
    future = work.get_future()
    for waited in joined.buckets[:-1]:
        future.add_done_callback(waited.settle)
    return future.then(last_result)


def _error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def _check(state: GradientCompression, bucket: dist.GradBucket) -> None:
    _check_join(state)
    if local_updates.is_alone(state):
        local_updates.begin(state)
    if state.momentum is not None:
        # Those of a hook that was registered by hand have not been watched yet.
        _watch_momentum(state, bucket.parameters(), size_of(state.process_group, "compress_gradients"))
        state.momentum.check_fresh()
    if bucket.buffer().is_sparse:
        name = ", ".join(state.parameters.name_of(p) for p in bucket.parameters())  # DDP puts it in alone
        raise DtypeError(
            f"{name}: its gradient is sparse, and codecs take dense ones. Make the embedding with sparse=False."
        )


def _check_join(state: GradientCompression) -> None:
    """Raise if a sum is to be divided by the number of ranks that have inputs left: DDP tells no hook how many have.

    A rank without inputs takes no optimizer step, so its momentum is not that of the others from then on.
    """
    ddp: Any = state.trainer()
    if ddp is None or not ddp._join_config.enable:
        return
    if state.momentum is not None:
        raise SpecError(
            "join() with momentum=: a rank whose inputs have ended takes no optimizer step, and would send a momentum "
            "of the past. Give every rank as many batches, or leave momentum= out."
        )
    if state.meetings is not None:
        raise SpecError(
            "join() with sync_every=: a rank whose inputs have ended takes no step, and would never come to the next "
            "meeting. Give every rank as many batches, or leave sync_every= out."
        )
    if not getattr(ddp, "_divide_by_initial_world_size", True):
        raise SpecError(
            "join(divide_by_initial_world_size=False): compressed gradients are averaged over all ranks of the group, "
            "and DDP does not tell a communication hook how many have inputs left. Call model.join(), which divides by "
            "the number of all ranks."
        )
