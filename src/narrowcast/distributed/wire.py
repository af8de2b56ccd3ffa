"""Bytes between ranks: a private gloo copy of a process group.

A `Wire` belongs to one lane and is used by one thread at a time. It does three things:

- `agree`: a header to and from every peer, all at once, and the verdict on them. A row of up to `EAGER` bytes rides
  along with it, so that a small tensor needs one trip where a large one needs two. Receives have room for both; gloo
  lets a message be shorter than its receive, and aborts the process on one that is longer, which is why sizes are
  agreed on first.
- `send` and `expect`: rows to and from every peer. A rank sends to rank+1 first, then to rank+2 and so on, so at any
  time ranks send to different ones; at most `ROUNDS` rows to each are under way, and none waits for a receive. So a
  link stays busy while its rank encodes, adds up or decodes. bench/wire.py holds it against gloo's own collectives.
- `close`: breaks the connections, so that every peer that waits for this rank learns of a failure at once; and says
  why first, in a message for which every rank has been listening since the wire was made (`last_words`).

Every wait is bounded by the group's timeout, and ends within two seconds where a connection breaks (message.py), unless
it cuts a short message. What goes wrong is a `WireError` that names the peer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed import agreement
from narrowcast.distributed.message import Message, Watch, WireError
from narrowcast.errors import MismatchError

EAGER = 128 * 1024
"""Rows of up to so many bytes travel with the header. Of 64, 128 and 256 KB, tried on 32 MB at 1 Gbit/s with
bench/wire.py, 128 was best by 1 to 4%, which is hardly more than the noise."""

SHORT = 14_000
"""Messages of up to so many bytes, ten packets, leave at once on a connection that is idle: one has come whole, or not
begun. Longer rows have a tail (message.py). A thread that waits for them instead took eight ranks on two cores a fifth
of the time of an all_reduce."""

ROUNDS = 3
"""To each peer, so many rows may be on their way."""

_HEADERS, _LAST_WORDS, _NEVER_SENT, _ROWS = 0, 1, 2, 3
_WORDS_BYTES = 2048


class Wire(Protocol):
    """A connection of every rank of a group with every other."""

    rank: int
    size: int
    turns: int
    """How many calls of `send` it takes until a row is surely sent."""
    pieces: int
    """How many pieces of a tensor may be under way at a time."""
    eager: int
    """Rows of up to so many bytes travel with the header."""

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Compare headers with every rank, and raise `MismatchError` where they do not fit together.

        `eager(peer)` is the row that rides along to that peer, or None; `meanwhile` is called while headers are on
        their way. Rows of `incoming` that are small enough to have come along are filled.
        """

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        """Say where the next row of each peer goes; rows of no bytes do not come. The earlier it is said, the better.

        Calling what is returned gives the peers one by one, as their rows are there.
        """

    def send(self, row: Tensor, peer: int, stage: int = 0) -> None:
        """Start sending a row; one of no bytes is not sent. It must stay as it is for `turns` more of these calls.

        A stage is a sequence of rows of its own: those of one stage to one peer arrive in order.
        """

    def flush(self) -> None:
        """Wait until all headers and rows are sent: the end of every collective."""

    def close(self, last_words: bytes = b"") -> None:
        """Break every connection, so that peers which wait for this rank learn of it, and of the reason."""

    def last_words(self, peer: int) -> bytes:
        """The reason that a peer gave when it broke the connections; nothing from one that gave none."""

    def retire(self) -> None:
        """Let go of its thread, once nothing is on its way any more."""


class HostWire:
    """A wire for rows in host memory."""

    pieces = 4
    eager = EAGER

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, connect_within: timedelta
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.timeout = timeout
        self._ranks = ranks
        self._targets = [(rank + i) % self.size for i in range(1, self.size)]
        self._sources = [(rank - i) % self.size for i in range(1, self.size)]
        self._group: Any = dist.ProcessGroupGloo(store, rank, self.size, connect_within)
        self._length = agreement.header_bytes(self.size)
        self._slots = torch.empty(2, self.size, self._length + EAGER, dtype=torch.uint8)
        self._headers: list[Message] = []
        self._window = ROUNDS * (self.size - 1)
        self.turns = self._window + 1
        look = functools.partial(_look, self._group, timeout)
        self._going = Watch("narrowcast going", look)
        self._coming = Watch("narrowcast coming", look)
        self._heard = torch.zeros(self.size, _WORDS_BYTES, dtype=torch.uint8)
        self._listening = [self._receive(self._heard[peer], peer, _LAST_WORDS) for peer in self._sources]

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self._going.wait()  # the headers of the last call lie where those of this one are to be
        outgoing, came = self._slots
        receives, self._headers = self._headers or self._expect_headers(), []
        outgoing[:, : self._length] = header
        for peer in self._targets:
            row = eager(peer)
            total = self._length
            if row is not None:
                total += len(row)
                outgoing[peer, self._length : total] = row
            self._going.add(self._send(outgoing[peer, :total], peer, _HEADERS))
        meanwhile()
        for message in receives:
            if self._length + len(incoming[message.peer]) <= SHORT or len(incoming[message.peer]) > EAGER:
                message.wait()
            else:
                self._coming.add(message)
                self._coming.wait()
        came[self.rank, : self._length] = header
        headers = came[:, : self._length].numpy().copy()
        for peer in self._sources:
            row = incoming[peer]
            if 0 < len(row) <= EAGER:
                row.copy_(came[peer, self._length : self._length + len(row)])
        # Those of the next call: a peer that is early need not ask first. One that has all it needs may have left; if
        # there is a next call, that one says so.
        with contextlib.suppress(WireError):
            self._headers = self._expect_headers()
        try:
            agreement.check(headers, self._ranks)
        except MismatchError:
            self.flush()  # the others are to read the same, even if this process ends with it
            raise

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        receives = [self._receive(incoming[peer], peer, _ROWS + stage) for peer in self._sources]

        def arrivals() -> Iterator[int]:
            if any(len(row) for row in incoming):
                self._going.begin()
            for receive in receives:
                receive.wait()
                yield receive.peer

        return arrivals

    def send(self, row: Tensor, peer: int, stage: int = 0) -> None:
        self._going.wait(self._window - 1)
        self._going.add(self._send(row, peer, _ROWS + stage))

    def flush(self) -> None:
        self._going.wait()

    def close(self, last_words: bytes = b"") -> None:
        words = torch.zeros(_WORDS_BYTES, dtype=torch.uint8)
        words[: len(last_words)] = agreement.as_tensor(last_words) if last_words else 0
        for peer in self._targets:
            with contextlib.suppress(WireError):  # it may be the one that is gone
                self._send(words, peer, _LAST_WORDS)
        for peer in self._sources:  # a wait that runs into its time limit breaks all of them
            with contextlib.suppress(WireError):
                self._receive(words[:1], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        for watch in (self._going, self._coming):
            watch.give_up(WireError(self.rank, "the wire was closed", "gone"))

    def last_words(self, peer: int) -> bytes:
        return self._heard[peer].numpy().tobytes().rstrip(b"\0")

    def retire(self) -> None:
        for watch in (self._going, self._coming):
            watch.close()

    def _expect_headers(self) -> list[Message]:
        return [self._receive(self._slots[1, peer], peer, _HEADERS) for peer in self._sources]

    def _send(self, row: Tensor, peer: int, tag: int) -> Message:
        return Message(self._group.send, row, peer, tag, self.timeout, _has_tail(row, tag))

    def _receive(self, row: Tensor, peer: int, tag: int) -> Message:
        return Message(self._group.recv, row, peer, tag, self.timeout, _has_tail(row, tag))


def _has_tail(row: Tensor, tag: int) -> bool:
    return tag >= _ROWS and row.numel() > SHORT


def _look(group: Any, timeout: timedelta, peer: int) -> None:
    """Raise where the connection to a peer is gone: gloo starts no receive there."""
    Message(group.recv, torch.empty(1, dtype=torch.uint8), peer, _NEVER_SENT, timeout)
