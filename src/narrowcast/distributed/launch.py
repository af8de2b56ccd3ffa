"""From a checked call to a running one: its tensors, the lane, the meter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from narrowcast.codecs import Codec, checks
from narrowcast.distributed.protocols.encoder import Coder, derive_seed
from narrowcast.distributed.protocols.exchange import Exchange
from narrowcast.distributed.stats import Meter, span
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Peers
from narrowcast.distributed.transport.lane import Job, Work
from narrowcast.distributed.transport.wire import Wire
from narrowcast.errors import ShapeError


class Operands:
    """The tensors of one call, as a protocol takes them: their elements in order in memory, outside of autograd.

    Every tensor that a protocol reads or writes comes from here, so that on CUDA the side stream knows its memory.
    """

    def __init__(self, *written: Tensor) -> None:
        self.written = list(written)
        """What a `Work` of the call has as its result."""
        self.touched: list[Tensor] = list(written)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor with its elements in order in memory: itself, or a copy."""
        return self._touch(checks.plain(tensor).contiguous())

    def write(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor with the same values to write into; `bring_home` copies it back where it is another."""
        if tensor.is_contiguous() and not tensor.is_neg():
            return self._touch(tensor)
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ShapeError(
                f"a tensor of shape {tuple(tensor.shape)} is to be written to, but its elements share memory: it was "
                "made by expand(). Pass tensor.clone()."
            )
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        self._copies.append((tensor, copy))
        return self._touch(copy)

    def bring_home(self) -> None:
        """Write what copies hold into the tensors that they stand for."""
        for tensor, copy in reversed(self._copies):  # a part of a copy before the whole
            tensor.copy_(copy)

    def _touch(self, tensor: Tensor) -> Tensor:
        self.touched.append(tensor)
        return tensor


def launch(
    peers: Peers,
    call: Call,
    protocol: Callable[[Exchange], None],
    operands: Operands,
    *,
    name: str | None = None,
    plain_bytes: int,
    async_op: bool,
    seed: int | None,
) -> Work | None:
    """Run `protocol` in its turn; a `Work` of the tensors written for an asynchronous call."""
    op, number = name or call.op, seed_of(call.codec, seed)

    def job() -> list[Tensor]:
        with span(f"narrowcast::{op}"):
            perform(peers, call, protocol, name=op, plain_bytes=plain_bytes, seed=number)
            with torch.no_grad():
                operands.bring_home()
        return operands.written

    return start(peers, op, job, operands.touched, async_op)


def perform(
    peers: Peers, call: Call, protocol: Callable[[Exchange], None], *, name: str, plain_bytes: int, seed: int
) -> None:
    """Run `protocol` here and now, and count what it costs under `name`.

    Ranks that are given the same seed draw apart, by their global numbers: those of two hosts or replicas, too.
    """
    own = derive_seed(seed, peers.ranks[peers.rank]) if call.codec.stochastic else 0

    def attempt(wire: Wire, calls: int) -> None:
        meter = Meter(name, plain_bytes)
        try:
            protocol(Exchange(wire, calls, call, Coder(call.codec, own, meter, peers.arena, peers.device)))
            wire.flush()
        finally:
            wire.trim()
        meter.done()

    try:
        with torch.no_grad():
            peers.perform(name, attempt)
    finally:
        peers.arena.trim()


def start(peers: Peers, op: str, job: Job, tensors: Sequence[Tensor], async_op: bool) -> Work | None:
    """Give a job to the lane: queued, or done here and now."""
    if tensors[0].is_cuda:
        from narrowcast.distributed.transport.streams import StreamWork

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


def _run(work: Work) -> list[Tensor]:
    work.run()
    return work.result()
