"""Bytes between ranks: a private gloo copy of a process group.

A `Wire` belongs to one lane and is used by one thread at a time. It does three things:

- `agree`: a header to and from every peer, all at once, and the verdict on them. A row of up to `EAGER` bytes rides
  along with it, so that a small tensor needs one trip where a large one needs two. Receives have room for both; gloo
  lets a message be shorter than its receive, and aborts the process on one that is longer, which is why sizes are
  agreed on first.
- `rounds`: a row to and from every peer, one peer at a time: in round i a rank sends to rank+i and receives from
  rank-i, so every link carries one stream each way. bench/wire.py holds this against gloo's own all_to_all, where all
  streams collide at the receivers. What comes next is encoded while a round is on the wire, and what came is decoded
  while the next one is.
- `close`: breaks the connections, so that every peer that waits for this rank learns of a failure at once; and says
  why first, in a message for which every rank has been listening since the wire was made (`last_words`).

Every wait is bounded by the group's timeout. What goes wrong is a `WireError` that names the peer.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _enable_record_function  # type: ignore[attr-defined]

from narrowcast.distributed import agreement
from narrowcast.distributed.lane import Lane, Work

EAGER = int(__import__("os").environ.get("NCE", 32)) * 1024
"""Rows of up to so many bytes travel with the header (bench/wire.py, table of small tensors)."""

LONG = 256 * 1024
"""Rows from so many bytes on are watched while they travel: a thread switch of about 0.1 ms, where they take more."""

_HEADERS, _ROWS, _LAST_WORDS, _NEVER_SENT = 0, 1, 2, 3
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
    """How many outgoing rows must be kept apart."""
    eager: int
    """Rows of up to so many bytes travel with the header."""

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], None],
    ) -> None:
        """Compare headers with every rank, and raise `MismatchError` where they do not fit together.

        `eager(peer)` is the row that rides along to that peer, or None; `meanwhile` is called while headers are on
        their way. Rows of `incoming` that are small enough to have come along are filled.
        """

    def expect(self, incoming: Sequence[Tensor]) -> None:
        """Say early where the rows of the next `rounds` (or of the ones after it, in order) will go, by peer."""

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], arrived: Callable[[int], None], at_once: bool = False
    ) -> None:
        """Exchange rows with every peer; rows of no bytes are not sent.

        `outgoing(peer, turn)` is called once per peer; what it returned for a turn may be overwritten `turns` later.
        `arrived(peer)` is called once a peer's row is where it was expected, and for this rank itself while the first
        round is on the wire. `at_once` sends to all peers in one round: for small rows, which keep no link busy.
        """

    def close(self, last_words: bytes = b"") -> None:
        """Break every connection, so that peers which wait for this rank learn of it, and of the reason."""

    def last_words(self, peer: int) -> bytes:
        """The reason that a peer gave when it broke the connections; nothing from one that gave none."""

    def retire(self) -> None:
        """Let go of its thread, once nothing is on its way any more."""

    def leak(self) -> None:
        """Make sure that nothing is ever closed: in a forked child, the threads that would do it do not exist."""


class HostWire:
    """A wire for rows in host memory."""

    turns = 2  # one row on the wire, one being encoded
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
        self._expected: deque[list[_Message]] = deque()
        self._waits = Lane("narrowcast wire")
        self._scrap = torch.empty(1, dtype=torch.uint8)
        self._heard = torch.zeros(self.size, _WORDS_BYTES, dtype=torch.uint8)
        self._listening = [self._receive(self._heard[peer], peer, _LAST_WORDS) for peer in self._sources]

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], None],
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
        self._headers = self._expect_headers()  # those of the next call: a peer that is early need not ask first
        agreement.check(headers, self._ranks)

    def expect(self, incoming: Sequence[Tensor]) -> None:
        self._expected.append([self._receive(incoming[peer], peer, _ROWS) for peer in self._sources])

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], arrived: Callable[[int], None], at_once: bool = False
    ) -> None:
        receives = self._expected.popleft()
        if at_once:
            sends = [self._send(outgoing(peer, turn), peer, _ROWS) for turn, peer in enumerate(self._targets)]
            arrived(self.rank)
            for receive in receives:
                receive.wait()
                arrived(receive.peer)
            for send in sends:
                send.wait()
            return
        came = self.rank
        row = outgoing(self._targets[0], 0)
        for turn, (peer, receive) in enumerate(zip(self._targets, receives, strict=True), 1):
            send = self._send(row, peer, _ROWS)
            if turn < len(self._targets):
                row = outgoing(self._targets[turn], turn)
            arrived(came)
            self._wait(receive, send)
            came = receive.peer
        arrived(came)

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
        self._waits.close("the wire is not used any more", wait=0.1)

    def leak(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def _wait(self, *messages: _Message) -> None:
        """Wait for the rows of a round.

        gloo does not wake the wait for a message that was half-way through when its connection broke: it signals those
        that had not begun. So rows that are half-way for long are waited for aside, while this thread looks now and
        then whether the connections are still there: gloo refuses to start a receive on one that is not.
        """

        def wait() -> list[Tensor]:
            for message in messages:
                message.wait()
            return []

        if max(message.nbytes for message in messages) < LONG:
            wait()
            return
        aside = self._waits.submit(Work("a round", wait))
        while not aside.done_within(_GLANCE_SECONDS):
            for message in messages:
                self._receive(self._scrap, message.peer, _NEVER_SENT)
        aside.wait()

    def _expect_headers(self) -> list[_Message]:
        return [self._receive(self._slots[1, peer], peer, _HEADERS) for peer in self._sources]

    def _send(self, row: Tensor, peer: int, tag: int) -> _Message:
        return _Message(self._group.send, row, peer, tag, self.timeout)

    def _receive(self, row: Tensor, peer: int, tag: int) -> _Message:
        return _Message(self._group.recv, row, peer, tag, self.timeout)


class _Message:
    """A message on its way; one of no bytes is not sent."""

    def __init__(self, start: Any, row: Tensor, peer: int, tag: int, timeout: timedelta) -> None:
        self.peer = peer
        self.nbytes = row.numel()
        self.timeout = timeout
        # A profiler would open a range that the end of the message closes. Headers are received ahead of their call,
        # maybe after the profile was taken, and torch then crashes on the range.
        _enable_record_function(False)
        try:
            self._work = start([row], peer, tag) if self.nbytes else None
        except RuntimeError as error:
            raise self._failed(error) from error
        finally:
            _enable_record_function(True)

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(timeout or self.timeout)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> WireError:
        reason = brief(error)
        return WireError(self.peer, reason, "late" if "Timed out" in reason else "gone")


def brief(error: RuntimeError) -> str:
    """What gloo says, without where in its source it says it, and without advice."""
    return str(error).split("] ", 1)[-1].split("\n")[0].split(". This is typically")[0]
