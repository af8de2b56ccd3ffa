"""Rows on CUDA devices, over NCCL: from device to device, in one grouped send and receive on the lane's stream.

A large row goes in two halves, over two communicators: one alone takes 1.6 times as long over sockets (H200, 16 MB to
and from a peer: 8.6 and 5.2 ms), since it has one thread that feeds them.

A header over gloo would make every call wait for the host. So ranks agree on a call's arguments the first time each set
of them is used; with NARROWCAST_DEBUG=1, every time. An all_to_all whose counts each rank knows only its own of is
agreed on every time: one rank cannot see that the counts of two others have changed, and these would wait for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, AllToAllOptions

from narrowcast.distributed.transport.agreement import Call, Header
from narrowcast.distributed.transport.failures import Failure
from narrowcast.distributed.transport.gloo import GlooWire
from narrowcast.distributed.transport.nccl_guard import Guard
from narrowcast.distributed.transport.wire import Exchange, WireError
from narrowcast.distributed.transport.work import carried_by

T = TypeVar("T")

REMEMBERED = 1024
"""So many sets of arguments, the last ones, are known to be agreed on."""

HALVED = 1 << 19
"""Rows of more bytes go in two halves. That held the host up for 0.14 ms more (1 MB beside 64 KB with two ranks,
bench/results/nccl.md of commit b327314), which is what it saves of 690 KB, by the times above."""

HALVED_SUM = 1 << 22
"""Sums of more bytes go in two halves, too: 64 MB with four ranks take 20 ms then, and 35 whole (nccl.md)."""

SUMS = (1, 1 << 14, 1 << 20)
"""Elements of the sums that ranks meet with: NCCL connects them anew for each of its algorithms, which follow sizes."""

END_SECONDS = 10.0
"""How long a communicator is waited for that is to end."""

_environment = threading.Lock()

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclWire:
    """`Wire` for rows on CUDA devices: NCCL moves rows, gloo compares headers. A `pair` has one communicator."""

    eager = 0
    in_advance = 0
    chunks = 1
    together = True

    def __init__(self, control: GlooWire, store: dist.Store, device: torch.device, *, pair: bool = False) -> None:
        self.control = control
        self.rank, self.size = control.rank, control.size
        self.turns = self.size
        self.trouble: WireError | None = None
        """Why what the stream was given is lost."""
        self._own_words = b""
        """The reason that this rank gave when it broke the connections before the stream was through."""
        self.told = False
        """Whether a `wait` has said so."""
        self._two = not pair
        self._gave = False
        """Whether the call under way has given the stream rows."""
        self._timeout = control.gloo.timeout
        self._groups = [self._communicator(store, name) for name in ("nccl", "nccl, halves")[: 1 if pair else 2]]
        self._guard = Guard(
            device, control.gloo.targets, self._timeout.total_seconds(), control.gloo.look, self._give_up
        )
        self._here, self._sum_here = AllToAllOptions(), AllreduceOptions()
        self._here.asyncOp = self._sum_here.asyncOp = False
        """On the current stream, not on one of the communicator's own."""
        self._agreed: OrderedDict[bytes, None] = OrderedDict()
        self._outgoing: dict[int, Tensor] = {}
        self._halves = False
        """Whether long rows of the call under way go in two halves. Where ranks do not know each other's counts, some
        may have no long row, and NCCL hangs where not all ranks come to a communicator."""
        self._always = os.environ.get("NARROWCAST_DEBUG", "0") not in ("", "0")
        try:
            self._guard.watch(lambda: self._meet(device))
        except BaseException:
            threading.Thread(target=self._abort, daemon=True).start()  # one that waits for others may not let go
            raise

    def knows(self, call: Call) -> bool:
        """Whether ranks have agreed on a call like this one, and need not meet for it."""
        return not self._always and self.trouble is None and call.key in self._agreed

    def agree(
        self,
        header: Header,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
        *,
        in_advance: bool = False,
    ) -> None:
        if self.trouble is not None:
            raise self.trouble
        meanwhile()
        key = header.key
        if self._always or key not in self._agreed:
            self.control.agree(header, lambda peer: None, [header.data[:0]] * self.size)
        self.control.agreed = True
        self._halves = key is not None and self._two
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
        self._give(self._exchange, prepared)

    def add_up(self, tensor: Tensor) -> None:
        self._give(self._add_up, tensor)

    def _give(self, launch: Callable[[T], None], operand: T) -> None:
        """Give the stream something that waits for other ranks."""
        if self.trouble is not None:
            raise self.trouble
        self._gave = True
        try:
            launch(operand)
        except (IndexError, RuntimeError) as error:  # the guard has given up in the middle of it
            if self.trouble is not None:
                raise self.trouble from error
            raise

    def _exchange(self, prepared: Exchange) -> None:
        (first, into, rows), *rest = prepared
        beside = [self._groups[i].alltoall(*both) for i, *both in rest]
        self._groups[first].alltoall(into, rows, self._here)  # the stream has it: there is nothing to wait for
        for work in beside:
            work.wait()  # makes the stream wait, not the host

    def _add_up(self, tensor: Tensor) -> None:
        if not self._two or tensor.nbytes <= HALVED_SUM:
            self._groups[0].allreduce([tensor], self._sum_here)
            return
        first, second = tensor.tensor_split([len(tensor) // 256 * 128])
        beside = self._groups[1].allreduce([second])
        self._groups[0].allreduce([first], self._sum_here)
        beside.wait()  # makes the stream wait, not the host

    def flush(self) -> None:
        self.control.flush()
        if self._gave:
            self._gave = False
            carried_by(self)
            self._guard.given()

    def lost(self, op: str) -> BaseException | None:
        """What to raise in a call of that name, if what the stream was given is lost."""
        error = self.trouble
        if error is None:
            return None
        self.told = True
        ranks = self.control.gloo.ranks
        failure = Failure(error.kind, ranks[error.peer], ranks[self.rank], 0, op, str(error))
        with contextlib.suppress(ValueError):  # it gave no reason
            failure = Failure.from_bytes(self._own_words if error.peer == self.rank else self.last_words(error.peer))
        return failure.error(op, self._timeout)

    def trim(self) -> None:
        pass

    @property
    def agreed(self) -> bool:
        return self.control.agreed

    def close(self, last_words: bytes = b"") -> None:
        self._guard.close()
        self._lose_unfinished(last_words)
        self.control.close(last_words)
        self._abort()

    def last_words(self, peer: int) -> bytes:
        return self.control.last_words(peer)

    def retire(self) -> None:
        through = not self._groups or self._guard.wait(self._timeout.total_seconds())  # the guard looks on meanwhile
        self._guard.close()
        if through:
            groups, self._groups = self._groups, []
            _at_the_same_time(groups, "shutdown")
        else:
            self._lose_unfinished(b"")
        self._abort()
        self.control.retire()

    def _communicator(self, store: dist.Store, name: str) -> Any:
        """A communicator that leaves failures to this wire: torch's own watchdog would end the process."""
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True  # as the lane's: lane.py
        options._timeout = max(10 * self._timeout, timedelta(minutes=10))
        with _environment:
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
        """Let all ranks come to the communicators, before anything else can fail: NCCL waits for them without end.

        And a rank without long rows would not come to the second one later. Sums have connections of their own.
        """
        for group in self._groups:
            bytes_ = torch.zeros(2, self.size, dtype=torch.uint8, device=device)
            into, rows = ([each[i : i + (i != self.rank)] for i in range(self.size)] for each in bytes_)
            group.alltoall(into, rows).wait()
        for group, numel in itertools.product(self._groups if self._two else (), SUMS):
            group.allreduce([torch.zeros(numel, dtype=torch.float32, device=device)]).wait()

    def _lose_unfinished(self, words: bytes) -> None:
        """Calls that the stream is not through with end with the communicators, whether the guard has looked or not."""
        if self.trouble is None and self._guard.unfinished():
            self._own_words = words
            self.trouble = WireError(self.rank, "the connections were given up before the stream was through", "gone")

    def _give_up(self, error: WireError) -> None:
        self.trouble = error
        self._abort()

    def _abort(self) -> None:
        groups, self._groups = self._groups, []
        _at_the_same_time(groups, "abort")


def _at_the_same_time(groups: Sequence[Any], method: str) -> None:
    """End communicators, none of them waited for long.

    While the kernel of one waits on the GPU, the memory of another cannot be freed; and ranks end them in any order.
    """

    def end(group: Any) -> None:
        with contextlib.suppress(RuntimeError):
            getattr(group, method)()

    ending = [threading.Thread(target=end, args=(group,), daemon=True) for group in groups]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join(END_SECONDS)


def _half(rows: Sequence[Tensor], which: int) -> list[Tensor]:
    """The first half of each row, or the second one, which short rows do not have."""
    middles = [len(row) if len(row) <= HALVED else len(row) // 32 * 16 for row in rows]
    return [row[middle:] if which else row[:middle] for row, middle in zip(rows, middles, strict=True)]
