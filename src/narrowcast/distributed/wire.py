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

Every wait is bounded by the group's timeout. What goes wrong is a `WireError` that names the peer.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _enable_record_function  # type: ignore[attr-defined]

from narrowcast.distributed import agreement
from narrowcast.distributed.lane import Lane, Work

EAGER = 128 * 1024
"""Rows of up to so many bytes travel with the header. Of 64, 128 and 256 KB, tried on 32 MB at 1 Gbit/s with
bench/wire.py, 128 was best by 1 to 4%, which is hardly more than the noise. Such a message has no tail (`_Message`)."""

LONG = 64 * 1024
"""Rows from so many bytes on have a tail, see `_Message`. A guess: what is shorter mostly leaves in one write."""

ROUNDS = 3
"""To each peer, so many rows may be on their way."""

_HEADERS, _LAST_WORDS, _NEVER_SENT, _ROWS = 0, 1, 2, 3
_WORDS_BYTES = 2048
_GLANCE_SECONDS = 0.2


class WireError(Exception):
    """A message did not go through. Never leaves this package: the lane says what it means for the collective."""

    def __init__(self, peer: int, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.peer = peer
        self.kind = kind
        """What it says of the peer: "late", "gone", or "unmet" where no connection was made."""


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
        """Wait until all rows are sent."""

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
        self._headers: list[_Message] = []
        self._sending: deque[_Message] = deque()
        self._window = ROUNDS * (self.size - 1)
        self.turns = self._window + 1
        self._aside = Lane("narrowcast wire")
        self._scrap = torch.empty(1, dtype=torch.uint8)
        self._heard = torch.zeros(self.size, _WORDS_BYTES, dtype=torch.uint8)
        self._listening = [self._receive(self._heard[peer], peer, _LAST_WORDS) for peer in self._sources]

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        outgoing, came = self._slots
        receives, self._headers = self._headers or self._expect_headers(), []
        outgoing[:, : self._length] = header
        sends = []
        for peer in self._targets:
            row = eager(peer)
            total = self._length
            if row is not None:
                total += len(row)
                outgoing[peer, self._length : total] = row
            sends.append(self._send(outgoing[peer, :total], peer, _HEADERS))
        meanwhile()
        for message in (*receives, *sends):
            message.wait()
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
        agreement.check(headers, self._ranks)

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        receives = [self._receive(incoming[peer], peer, _ROWS + stage) for peer in self._sources]

        def arrivals() -> Iterator[int]:
            for receive in receives:
                receive.wait()
                yield receive.peer

        return arrivals

    def send(self, row: Tensor, peer: int, stage: int = 0) -> None:
        # Directly, unlike in `flush`: a row of the same peer was waited for since, and as a rule told of a break.
        while len(self._sending) >= self._window:
            self._sending.popleft().wait()
        self._sending.append(self._send(row, peer, _ROWS + stage))

    def flush(self) -> None:
        # gloo never wakes the wait for a send whose connection broke half-way. So long ones are waited for aside, while
        # this thread looks now and then whether connections are there: gloo starts no receive where one is not.
        messages, self._sending = list(self._sending), deque()
        if max((message.nbytes for message in messages), default=0) < LONG:
            for message in messages:
                message.wait()
            return

        def all_sent() -> list[Tensor]:
            for message in messages:
                message.wait()
            return []

        aside = self._aside.submit(Work("rows", all_sent))
        while not aside.done_within(_GLANCE_SECONDS):
            try:
                for message in messages:
                    self._receive(self._scrap, message.peer, _NEVER_SENT)
            except WireError:
                if not aside.done_within(_GLANCE_SECONDS):  # which knows better what went wrong
                    raise
        aside.wait()

    def close(self, last_words: bytes = b"") -> None:
        words = torch.zeros(_WORDS_BYTES, dtype=torch.uint8)
        words[: len(last_words)] = agreement.as_tensor(last_words) if last_words else 0
        for peer in self._targets:
            with contextlib.suppress(WireError):  # it may be the one that is gone
                self._send(words, peer, _LAST_WORDS)
        # A wait that runs into its time limit is how gloo lets go of all of a context's connections.
        for peer in self._sources:
            with contextlib.suppress(WireError):
                self._receive(words[:1], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def last_words(self, peer: int) -> bytes:
        return self._heard[peer].numpy().tobytes().rstrip(b"\0")

    def retire(self) -> None:
        self._aside.close("the wire is not used any more", wait=0.1)

    def _expect_headers(self) -> list[_Message]:
        return [self._receive(self._slots[1, peer], peer, _HEADERS) for peer in self._sources]

    def _send(self, row: Tensor, peer: int, tag: int) -> _Message:
        return _Message(self._group.send, row, peer, tag, self.timeout)

    def _receive(self, row: Tensor, peer: int, tag: int) -> _Message:
        return _Message(self._group.recv, row, peer, tag, self.timeout)


class _Message:
    """A message on its way; one of no bytes is not sent.

    gloo does not wake the wait for a receive that was half-way through when its connection broke: it signals those that
    had not begun. So a long message has a tail, one byte that follows it on the same connection, and that is what is
    waited for: it has not begun before the message is through.
    """

    def __init__(self, start: Any, row: Tensor, peer: int, tag: int, timeout: timedelta) -> None:
        long = tag >= _ROWS and row.numel() >= LONG
        self.peer = peer
        self.nbytes = row.numel()
        self.timeout = timeout
        # A profiler would open a range that the end of the message closes. Headers are received ahead of their call,
        # maybe after the profile was taken, and torch then crashes on the range.
        _enable_record_function(False)
        try:
            self._works = [start([row], peer, tag)] if row.numel() else []
            if long:
                self._works.insert(0, start([torch.empty(1, dtype=torch.uint8)], peer, tag))
        except RuntimeError as error:
            raise self._failed(error) from error
        finally:
            _enable_record_function(True)

    def wait(self, timeout: timedelta | None = None) -> None:
        try:
            for work in self._works:
                work.wait(timeout or self.timeout)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> WireError:
        reason = brief(error)
        return WireError(self.peer, reason, "late" if "imed out" in reason or "timeout" in reason else "gone")


def brief(error: RuntimeError) -> str:
    """What gloo says, without where in its source it says it, and without advice."""
    return str(error).split("] ", 1)[-1].split("\n")[0].split(". This is typically")[0]
