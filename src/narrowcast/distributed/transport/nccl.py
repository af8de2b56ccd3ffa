"""Rows on CUDA devices, over NCCL: from device to device, in one grouped send and receive on the lane's stream.

A large row goes in two halves, over two communicators: one alone takes 1.6 times as long over sockets (H200, 16 MB to
and from a peer: 8.6 and 5.2 ms), since it has one thread that feeds them.

A header over gloo would make every call wait for the host. So ranks agree on a call's arguments the first time each set
of them is used; with NARROWCAST_DEBUG=1, every time. An all_to_all whose counts each rank knows only its own of is
agreed on every time: one rank cannot see that the counts of two others have changed, and these would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions

from narrowcast.distributed.transport.agreement import Call, Header
from narrowcast.distributed.transport.gloo import GlooWire
from narrowcast.distributed.transport.nccl_guard import Guard
from narrowcast.distributed.transport.wire import Exchange, WireError

REMEMBERED = 1024
"""So many sets of arguments, the last ones, are known to be agreed on."""

HALVED = 1 << 16
"""Rows of more bytes go in two halves."""

ABORT_SECONDS = 10.0
"""How long a communicator is waited for that is to give up."""

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclWire:
    """`Wire` for rows on CUDA devices: NCCL moves rows, gloo compares headers. A `pair` has one communicator."""

    eager = 0
    chunks = 1
    together = True

    def __init__(self, control: GlooWire, store: dist.Store, device: torch.device, *, pair: bool = False) -> None:
        self.control = control
        self.rank, self.size = control.rank, control.size
        self.turns = self.size
        self.trouble: WireError | None = None
        """Why what the stream was given is lost."""
        self._timeout = control.gloo.timeout
        self._groups = [self._communicator(store, name) for name in ("nccl", "nccl, halves")[: 1 if pair else 2]]
        self._guard = Guard(
            device, control.gloo.targets, self._timeout.total_seconds(), control.gloo.look, self._give_up
        )
        self._here = AllToAllOptions()
        self._here.asyncOp = False
        """On the current stream, not on one of the communicator's own."""
        self._agreed: OrderedDict[bytes, None] = OrderedDict()
        self._outgoing: dict[int, Tensor] = {}
        self._halves = False
        """Whether long rows of the call under way go in two halves. Where ranks do not know each other's counts, some
        may have no long row, and NCCL hangs where not all ranks come to a communicator."""
        self._always = os.environ.get("NARROWCAST_DEBUG", "0") not in ("", "0")
        self._meet(device)

    def knows(self, call: Call) -> bool:
        """Whether ranks have agreed on a call like this one, and need not meet for it."""
        return not self._always and self.trouble is None and call.key in self._agreed

    def agree(
        self,
        header: Header,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        if self.trouble is not None:
            raise self.trouble
        meanwhile()
        key = header.key
        if self._always or key not in self._agreed:
            self.control.agree(header, lambda peer: None, [header.data[:0]] * self.size)
        self.control.agreed = True
        self._halves = key is not None and len(self._groups) == 2
        if key is not None:  # all ranks make the same calls: what one has forgotten, all have
            self._agreed[key] = None
            self._agreed.move_to_end(key)
            if len(self._agreed) > REMEMBERED:
                self._agreed.popitem(last=False)

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        def arrivals() -> Iterator[int]:
            nothing = incoming[0][:0]
            rows = [self._outgoing.pop(peer, nothing) for peer in range(self.size)]
            self.exchange(self.prepare(rows, incoming))
            yield from (peer for peer in range(self.size) if peer != self.rank)

        return arrivals

    def send(self, row: Tensor, peers: Sequence[int], stage: int = 0) -> None:
        self._outgoing.update(dict.fromkeys(peers, row))  # they all go when the rows of the others are asked for

    def prepare(self, rows: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        nothing = into[0][:0]
        given, taken = ([row if i != self.rank else nothing for i, row in enumerate(each)] for each in (rows, into))
        if not self._halves or max(map(len, (*given, *taken))) <= HALVED:
            return [(0, taken, given)]
        return [(i, _half(taken, i), _half(given, i)) for i in range(2)]

    def exchange(self, prepared: Exchange) -> None:
        if self.trouble is not None:
            raise self.trouble
        if len(prepared) == 1:
            ((i, into, rows),) = prepared
            self._groups[i].alltoall(into, rows, self._here)  # the stream has it: there is nothing to wait for
            return
        for work in [self._groups[i].alltoall(into, rows) for i, into, rows in prepared]:
            work.wait()  # makes the stream wait, not the host

    def flush(self) -> None:
        self.control.flush()
        self._guard.given()

    def trim(self) -> None:
        pass

    @property
    def agreed(self) -> bool:
        return self.control.agreed

    def close(self, last_words: bytes = b"") -> None:
        self._guard.close()
        self.control.close(last_words)
        self._abort()

    def last_words(self, peer: int) -> bytes:
        return self.control.last_words(peer)

    def retire(self) -> None:
        self._guard.close()
        if self._groups and self._guard.wait(self._timeout.total_seconds()):
            for group in self._groups:
                group.shutdown()
            self._groups = []
        self._abort()
        self.control.retire()

    def _communicator(self, store: dist.Store, name: str) -> Any:
        """A communicator that leaves failures to this wire: torch's own watchdog would end the process."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = max(10 * self._timeout, timedelta(minutes=10))
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = "0"
        try:
            return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), self.rank, self.size, options)
        finally:
            if before is None:
                del os.environ[_HANDLING]
            else:
                os.environ[_HANDLING] = before

    def _meet(self, device: torch.device) -> None:
        """Let all ranks come to the second communicator: later a rank without long rows would not."""
        for group in self._groups[1:]:
            bytes_ = torch.zeros(2, self.size, dtype=torch.uint8, device=device)
            into, rows = ([each[i : i + (i != self.rank)] for i in range(self.size)] for each in bytes_)
            group.alltoall(into, rows).wait()

    def _give_up(self, error: WireError) -> None:
        self.trouble = error
        self._abort()

    def _abort(self) -> None:
        groups, self._groups = self._groups, []
        # All at the same time: while the kernel of one waits on the GPU, the memory of another cannot be freed.
        aborting = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
        for thread in aborting:
            thread.start()
        for thread in aborting:
            thread.join(ABORT_SECONDS)


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def _half(rows: Sequence[Tensor], which: int) -> list[Tensor]:
    """The first half of each row, or the second one, which short rows do not have."""
    middles = [len(row) if len(row) <= HALVED else len(row) // 32 * 16 for row in rows]
    return [row[middle:] if which else row[:middle] for row, middle in zip(rows, middles, strict=True)]
