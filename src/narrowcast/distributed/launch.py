"""From a checked call to a running one: the lane, the meter, and tensors whose memory is not in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from narrowcast.codecs import Codec, checks
from narrowcast.distributed.agreement import Call
from narrowcast.distributed.coder import Coder
from narrowcast.distributed.exchange import Exchange
from narrowcast.distributed.lane import Job, Work
from narrowcast.distributed.peers import Peers
from narrowcast.distributed.stats import Meter, span
from narrowcast.distributed.wire import Wire
from narrowcast.errors import ShapeError


def launch(
    peers: Peers,
    call: Call,
    protocol: Callable[[Exchange], None],
    written: Sequence[Tensor],
    read: Sequence[Tensor],
    *,
    name: str | None = None,
    plain_bytes: int,
    async_op: bool,
    seed: int | None,
) -> Work | None:
    """Run `protocol` in its turn; a `Work` of the tensors `written` for an asynchronous call."""
    op, number = name or call.op, seed_of(call.codec, seed)

    def job() -> list[Tensor]:
        with span(f"narrowcast::{op}"):
            perform(peers, call, protocol, name=op, plain_bytes=plain_bytes, seed=number)
        return list(written)

    return start(peers, op, job, [*written, *read], async_op)


def perform(
    peers: Peers, call: Call, protocol: Callable[[Exchange], None], *, name: str, plain_bytes: int, seed: int
) -> None:
    """Run `protocol` here and now, and count what it costs under `name`."""

    def attempt(wire: Wire, calls: int) -> None:
        meter = Meter(name, plain_bytes)
        protocol(Exchange(wire, calls, call, Coder(call.codec, seed, meter, peers.arena, peers.device)))
        wire.flush()
        meter.done()

    try:
        with torch.no_grad():
            peers.perform(name, attempt)
    finally:
        peers.arena.trim()


def start(peers: Peers, op: str, job: Job, tensors: Sequence[Tensor], async_op: bool) -> Work | None:
    """Give a job to the lane: queued, or done here and now."""
    if tensors[0].is_cuda:
        from narrowcast.distributed.streams import StreamWork

        work: Work = StreamWork(op, job, peers.stream, tensors)
        if peers.nccl:  # nothing in it waits on the host
            peers.lane.run(op, lambda: _run(work))
        elif async_op:
            peers.lane.submit(work)
        else:
            peers.lane.run(op, lambda: _run(work))
        if not async_op:
            work.wait()
        return work if async_op else None
    if async_op:
        work = Work(op, job)
        with span(f"narrowcast::{op}"):  # a range that lasted until it is done might outlive the profile: torch crashes
            peers.lane.submit(work)
        return work
    peers.lane.run(op, job)
    return None


def seed_of(codec: Codec, seed: int | None) -> int:
    """The seed of a call: drawn on the caller's thread, so that torch.manual_seed() settles it."""
    return checks.seed(seed) if codec.stochastic else 0


def readable(tensor: Tensor) -> Tensor:
    """A tensor with its elements in order in memory."""
    return checks.plain(tensor).contiguous()


def writable(tensor: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """A contiguous tensor with the same values to write into, and what then brings them home."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor, lambda: None
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ShapeError(
            f"a tensor of shape {tuple(tensor.shape)} is to be written to, but its elements share memory: it was made "
            "by expand(). Pass tensor.clone()."
        )
    twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return twin, lambda: tensor.copy_(twin)


def _run(work: Work) -> list[Tensor]:
    work.run()
    return work.result()
