"""One collective: the call that ranks agree on, the group that makes it, and the protocol that moves its rows.

`run()` makes it here and now, `launch()` in the group's lane. Counting, timing and the translation of failures happen
in `run`, once for every kind of collective. While it runs, a protocol finds in it what it needs: the wire, an encoder,
and the ways to agree and to send.

`Operands` are the tensors of a call, as a protocol takes them; a `Request` is what else its caller says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec, checks
from narrowcast.distributed.encoder import Encoder, derive_seed
from narrowcast.distributed.stats import Meter, span
from narrowcast.distributed.transport.agreement import HEADER_BYTES, Call, Header
from narrowcast.distributed.transport.group import Group, group_for
from narrowcast.distributed.transport.wire import Wire
from narrowcast.distributed.transport.work import Work
from narrowcast.errors import ShapeError

Counts = tuple[int, ...]


class Collective:
    """A collective of `group`. `protocol(collective)` moves the rows, once it runs.

    `name` is what statistics and errors call it; `plain_bytes` is what it would send without a codec. Ranks that are
    given the same seed draw apart, by their global numbers: those of two hosts or replicas, too. `here` says that
    over NCCL it needs none of the group's memory, and may stay on the caller's stream.
    """

    wire: Wire
    encoder: Encoder

    def __init__(
        self,
        group: Group,
        call: Call,
        protocol: Callable[[Collective], None],
        *,
        name: str = "",
        plain_bytes: int = 0,
        seed: int = 0,
        here: bool = False,
    ) -> None:
        self.group = group
        self.call = call
        self.name = name or call.op
        self.rank, self.size = group.rank, group.size
        self._protocol = protocol
        self._plain_bytes = plain_bytes
        self._seed = derive_seed(seed, group.ranks[group.rank]) if call.codec.stochastic else 0
        self._turn = 0
        self._here = here

    @functools.cached_property
    def targets(self) -> list[int]:
        """The other ranks, in the order in which this one sends to them."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far."""
        return self.encoder.meter.sent_bytes

    # -- its life -----------------------------------------------------------------------------------------------------

    def launch(self, operands: Operands, async_op: bool) -> Work | None:
        """Run it in its turn; a `Work` of the tensors written where it is asynchronous."""

        def job() -> list[Tensor]:
            with span(f"narrowcast::{self.name}"), operands.writing():
                self.run()
                operands.copy_back()
            return operands.written

        at_once = self.group.agreed_before(self.call)
        return self.group.lane.start(self.name, job, operands.touched, async_op, at_once, here=self._here)

    def run_in_lane(self) -> None:
        """Run it in its turn and wait for it, where it touches no tensor of the caller's."""

        def job() -> list[Tensor]:
            self.run()
            return []

        self.group.lane.run(self.call.op, job)

    def run(self) -> None:
        """Make it here and now, in a job of the lane."""
        try:
            with torch.no_grad():
                self.group.carry(self.name, self._attempt)
        finally:
            if self.group.buffers.trim():
                self.group.prepared.clear()  # it would keep them

    def _attempt(self, wire: Wire, number: int) -> None:
        meter = Meter(self.name, self._plain_bytes)
        self.wire = wire
        self.encoder = Encoder(self.call.codec, self._seed, meter, self.group.buffers, self.group.device)
        self._header = Header(self.call, number, self.rank, self.size)
        try:
            self._protocol(self)
            wire.flush()
        finally:
            wire.trim()
        meter.done()

    # -- what protocols do with it ------------------------------------------------------------------------------------

    def agree(
        self,
        eager: Callable[[int], Tensor | None] = lambda peer: None,
        incoming: Sequence[Tensor] | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        *,
        in_advance: bool = False,
    ) -> None:
        """Agree with all ranks; `eager` rows ride along, into those of `incoming` that are small enough.

        With `in_advance`, rows leave in `meanwhile` (wire.py).
        """

        def along(peer: int) -> Tensor | None:
            row = eager(peer)
            self._count(0 if row is None else len(row))
            return row

        if not self.group.agreed_before(self.call):
            self._count(HEADER_BYTES * (self.size - 1))
        if incoming is None and not self.wire.together:
            incoming = [torch.empty(0, dtype=torch.uint8, device=self.group.device)] * self.size
        self.wire.agree(self._header, along, incoming or (), meanwhile, in_advance=in_advance)

    def swap(
        self,
        outgoing: Callable[[int], Tensor],
        sizes: Sequence[int],
        incoming: Sequence[Tensor],
        arrived: Callable[[int], None] = lambda peer: None,
    ) -> None:
        """Agree with all ranks, and exchange a row with each.

        `outgoing(peer)` makes the `sizes[peer]` bytes for a peer, which must stay as they are while `wire.turns` others
        are made. `incoming[peer]` is filled with that peer's row, then `arrived(peer)` is called: never before all
        ranks agree. It is called for this rank, too.
        """
        small = self.wire.eager

        def send_large() -> None:
            for peer in self.targets:
                if sizes[peer] > small:
                    self.send(outgoing(peer), peer)

        self._swap(lambda peer: outgoing(peer) if 0 < sizes[peer] <= small else None, send_large, incoming, arrived)

    def swap_one(
        self, row: Tensor, incoming: Sequence[Tensor], arrived: Callable[[int], None] = lambda peer: None
    ) -> None:
        """`swap`, where every peer gets the same row."""
        small = len(row) <= self.wire.eager
        along, after = (row, row[:0]) if small else (row[:0], row)
        self._swap(lambda peer: along if len(along) else None, lambda: self.send_to_all(after), incoming, arrived)

    def _swap(
        self,
        along: Callable[[int], Tensor | None],
        send_large: Callable[[], None],
        incoming: Sequence[Tensor],
        arrived: Callable[[int], None],
    ) -> None:
        """Agree, with small rows along; then send large ones, and take those of the others as they come."""
        self.agree(along, incoming)
        arrivals = self.wire.expect([row[:0] if len(row) <= self.wire.eager else row for row in incoming])
        send_large()
        arrived(self.rank)
        for peer in arrivals():
            arrived(peer)

    def send(self, row: Tensor, peer: int, stage: int = 0) -> None:
        self._count(len(row))
        self.wire.send(row, [peer], stage)

    def send_to_all(self, row: Tensor, stage: int = 0, skip: int = -1) -> None:
        """Send one row to all others (but `skip`)."""
        peers = [peer for peer in self.targets if peer != skip]
        self._count(len(row) * len(peers))
        self.wire.send(row, peers, stage)

    def share(self, rows: Sequence[Tensor], skip: int = -1) -> None:
        """Send this rank's row of `rows` to all others (but `skip`), and fill the other rows with theirs."""
        arrivals = self.wire.expect([row[:0] for row in rows] if self.rank == skip else rows)
        self.send_to_all(rows[self.rank], skip=skip)
        for _ in arrivals():
            pass

    def reserve(self, nbytes: int) -> None:
        """Take memory for the rows to send, of up to so many bytes each. Called once in a collective."""
        self._rows = self.encoder.take("outbox", self.wire.turns * nbytes).view(self.wire.turns, nbytes)

    def next_row(self, nbytes: int) -> Tensor:
        """Memory for a row to send, which no other row gets before this one has left."""
        self._turn += 1
        return self._rows[self._turn % self.wire.turns, :nbytes]

    def _count(self, nbytes: int) -> None:
        self.encoder.meter.sent_bytes += nbytes


class Operands:
    """The tensors of one call, as a protocol takes them: their elements in order in memory, outside of autograd.

    Every tensor that a protocol reads or writes comes from here, so that on CUDA the side stream knows its memory. What
    is written keeps its version, whichever way it is written: torch's all_reduce does not count as a change, either.
    """

    def __init__(self, *written: Tensor) -> None:
        self.written = list(written)
        """The caller's tensors that get the results: what the call's `Work` gives."""
        self.touched: list[Tensor] = list(written)
        """All tensors whose memory the call reads or writes."""
        self._copies: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor with its elements in order in memory: itself, or a copy."""
        return self._touch(checks.plain(tensor).contiguous())

    def write(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor with the same values to write into: itself, or a copy that `copy_back` copies back."""
        if tensor.is_contiguous() and not tensor.is_neg():
            return self._touch(tensor.data)  # the same memory, with a version of its own
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise ShapeError(
                f"a tensor of shape {tuple(tensor.shape)} is to be written to, but its elements share memory: it was "
                "made by expand(). Pass tensor.clone()."
            )
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        self._copies.append((tensor, copy))
        return self._touch(copy)

    def writing(self) -> contextlib.AbstractContextManager[object]:
        """Where a protocol may write: tensors of inference mode refuse torch's own operations outside of that mode."""
        return torch.inference_mode() if any(map(torch.is_inference, self.written)) else contextlib.nullcontext()

    def copy_back(self) -> None:
        """Write what copies hold into the tensors that they stand for."""
        if self._copies:
            with torch.no_grad():
                for tensor, copy in reversed(self._copies):  # a part of a copy before the whole
                    tensor.data.copy_(copy)

    def _touch(self, tensor: Tensor) -> Tensor:
        self.touched.append(tensor)
        return tensor


def seed_for(codec: Codec, seed: int | None) -> int:
    """The seed of a call: drawn on the caller's thread, so that torch.manual_seed() settles it."""
    return checks.seed(seed) if codec.stochastic else 0


@dataclass(frozen=True)
class Request:
    """What a caller asks of a collective, whichever it is."""

    op: str
    members: dist.ProcessGroup
    async_op: bool
    codec: Codec
    seed: int | None

    def launch(
        self,
        words: str,
        protocol: Callable[[Collective], None],
        operands: Operands,
        plain_bytes: int,
        sent: Counts = (),
        expected: Counts = (),
        sizes: Counts | None = (),
    ) -> Work | None:
        group, seed = group_for(self.members, operands.written[0].device), seed_for(self.codec, self.seed)
        call = Call(self.op, self.codec, words, sent, expected, sizes)
        return Collective(group, call, protocol, plain_bytes=plain_bytes, seed=seed).launch(operands, self.async_op)
