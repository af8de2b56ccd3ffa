"""How DistributedDataParallel hands over its gradients: a communication hook, which it calls bucket by bucket.

The hook gives DDP a future of the averages at once, and backward goes on: the lane of the process group does the work
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

from narrowcast.codecs import Codec
from narrowcast.distributed import arguments
from narrowcast.distributed.gradients.buckets import Bucket
from narrowcast.distributed.gradients.columns import Entry, PieceLayout, check_cover, lay_out
from narrowcast.distributed.gradients.compression import GradientCompression, codec_for
from narrowcast.distributed.gradients.options import numbers
from narrowcast.distributed.gradients.telemetry import BucketStats
from narrowcast.distributed.launch import start
from narrowcast.distributed.protocols.encoder import lossless
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Peers, peers_of
from narrowcast.distributed.transport.lane import Work
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
        group = arguments.group_of(state.process_group, "compress_gradients")
        if group is not None:
            peers_of(group, buffer.device, "gradients").refuse("gradients", error)
        raise
    first, parameters = buffer.storage_offset(), bucket.parameters()
    offsets = [int(gradient.storage_offset() - first) for gradient in bucket.gradients()]
    # A complex gradient lies in a real buffer as twice the elements, and DDP counts its place in complex ones.
    offsets = [offset * numbers(p) for offset, p in zip(offsets, parameters, strict=True)]
    return reduce(state, buffer, parameters, offsets, bucket.index(), bucket.is_last())


def _check(state: GradientCompression, bucket: dist.GradBucket) -> None:
    _check_join(state.trainer())
    if bucket.buffer().is_sparse:
        name = ", ".join(state.name_of(parameter) for parameter in bucket.parameters())  # DDP puts it in alone
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


def reduce(
    state: GradientCompression,
    buffer: Tensor,
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    index: int,
    last: bool,
) -> torch.futures.Future[Tensor]:
    """Average a bucket over all ranks, in place: a future of it. Offsets are counted in elements of the buffer."""
    group = arguments.group_of(state.process_group, "compress_gradients")
    if group is None or group.size() == 1:
        return _alone(state, buffer, last)
    peers = state.agree(group, buffer)
    if state.idle:
        return _as_torch_does(state, group, buffer, index, last)
    with peers.refusing("gradients"):
        codec, reason = state.codec_at(state.step)
        pieces = _pieces(state, parameters, offsets, buffer.numel(), peers, codec is None)
        found = BucketStats(index, buffer.numel(), sum(piece.exempt_numel for piece in pieces))
        found.plain_bytes = _plain_bytes(buffer, peers.size)
        codec = codec_for(found, codec, reason)
        outcome = state.outcome_of(index == 0)
        bucket = Bucket(buffer, pieces, state.residuals, outcome, state.probe_for(found, state.step))
        work = _start(state, peers, bucket, found, codec, last)
    if last:
        state.clock.handed_over()
        state.step += 1
    return work.get_future().then(_first)


def _alone(state: GradientCompression, buffer: Tensor, last: bool) -> torch.futures.Future[Tensor]:
    """The average of one rank."""
    state.check_alone()
    state.step += last
    averaged: torch.futures.Future[Tensor] = torch.futures.Future()
    averaged.set_result(buffer)
    return averaged


def _as_torch_does(
    state: GradientCompression, group: dist.ProcessGroup, buffer: Tensor, index: int, last: bool
) -> torch.futures.Future[Tensor]:
    """The average by torch's own all_reduce: what DDP does without a hook."""
    found = BucketStats(index, buffer.numel(), buffer.numel())
    found.plain_bytes = _plain_bytes(buffer, group.size())
    state.count_idle(found)
    state.step += last
    work = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(_first)
    return averaged


def _start(
    state: GradientCompression, peers: Peers, bucket: Bucket, found: BucketStats, codec: Codec | None, last: bool
) -> Work:
    step, buffer, outcome = state.step, bucket.buffer, bucket.outcome
    if found.index == 0:
        state.clock.next_step()
    words = f"bucket {found.index}, dtype={buffer.dtype}, numel={found.numel}, exempt={found.exempt}"
    call = Call("gradients", lossless(buffer.dtype) if codec is None else codec, words)

    def job() -> list[Tensor]:
        if outcome.error is None:
            # DDP waits for its buckets in order. An error is raised when the lane is done with all of them: DDP would
            # otherwise fill buffers for the next step that the lane still writes to.
            with contextlib.suppress(Exception):
                state.perform(peers, call, bucket.reduce, found, bucket.probe, step, outcome)
        else:
            peers.give_up("gradients", outcome.error)
        if last and outcome.error is not None:
            raise outcome.error
        outcome.complete = last
        return [buffer]

    work = start(peers, "gradients", job, [buffer], True)
    assert work is not None
    return work


def _pieces(
    state: GradientCompression,
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    total: int,
    peers: Peers,
    all_exempt: bool,
) -> list[PieceLayout]:
    """The pieces of a bucket of `total` elements with these parameters."""
    key = (*map(id, parameters), *offsets, total, all_exempt)
    if key not in state.layouts:
        entries = []
        for parameter, offset in zip(parameters, offsets, strict=True):
            name, numel = state.name_of(parameter), numbers(parameter) * parameter.numel()
            entries.append(Entry(name, offset, numel, all_exempt or state.is_exempt(name, numel, peers.size)))
        check_cover(entries, total)
        state.layouts[key] = lay_out(entries, peers.size, at_once=peers.nccl)
    return state.layouts[key]


def _plain_bytes(buffer: Tensor, ranks: int) -> int:
    """What a ring sends of it."""
    return 2 * arguments.nbytes(buffer) * (ranks - 1) // ranks


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]
