"""One message over gloo, and how to wait for it.

This file and gloo_connections.py are the only ones that call gloo. They lean on these behaviours of torch's gloo;
tests/distributed/transport/test_gloo.py has a test for each, by its number:

1. A message may be shorter than its receive. (One that is longer aborts the process.)
2. Messages of one pair and tag match receives in order; messages of other tags do not wait for them.
3. A send ends no sooner than its receive is posted: who waits for one waits for the peer's program.
4. A wait that runs into its time limit raises, says "timed out" or "timeout", and breaks all connections of the group.
5. When a connection breaks, a receive that has not begun raises at once, and does not speak of a timeout.
6. On a broken connection, no new receive can be started.
7. A receive that has begun is forgotten when its connection breaks: its wait ends with the time limit only. So is a
   send that was being written, and a short one where gloo's thread has not noticed the break yet.

Because of 7, a long row has a tail: one more byte on the same connection, whose receive has not begun before the row is
through. Sends have no tail, so no thread of a collective waits for one in gloo: a `Watch` does, in a thread of its own,
while the collective's thread looks now and then whether the connection is still there (6).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _enable_record_function  # type: ignore[attr-defined]

from narrowcast.distributed.transport.wire import WireError

IDLE_SECONDS = 1.0
GLANCE_SECONDS = 0.2
RARE_GLANCE_SECONDS = 1.0
"""The longest time between two looks at a connection: each leaves a few bytes with gloo."""
GRACE_SECONDS = 0.5
"""A message that came just before its connection closed is noticed within this time: a peer that is done may leave."""

_TAIL = torch.zeros(1, dtype=torch.uint8, device="cpu")
"""The byte of every tail, sent or received: nobody reads it."""


class Message:
    """A message on its way: `start` is the group's send or recv. A message of no bytes is not sent.

    With a `tail`, one byte follows on the same connection, and is waited for first.
    """

    def __init__(self, start: Any, row: Tensor, peer: int, tag: int, timeout: timedelta, tail: bool = False) -> None:
        self.peer = peer
        self.timeout = timeout
        # A profiler would open a range that the end of the message closes. Headers are received ahead of their call,
        # maybe after the profile was taken, and torch then crashes on the range.
        _enable_record_function(False)
        try:
            self._works = [start([row], peer, tag)] if row.numel() else []
            if tail:
                self._works.insert(0, start([_TAIL], peer, tag))
        except RuntimeError as error:
            raise self._failed(error) from error
        finally:
            _enable_record_function(True)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait in gloo. When the time is over, gloo breaks all connections of the group (4)."""
        try:
            for work in self._works:
                work.wait(timeout or self.timeout)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> WireError:
        reason = brief(error)
        return WireError(self.peer, reason, "late" if "imed out" in reason or "timeout" in reason else "gone")


class Watch:
    """Waits for messages, in the order in which they were added. `look(peer)` raises where its connection is gone."""

    def __init__(self, name: str, look: Callable[[int], object]) -> None:
        self._name = name
        self._look = look
        self._changed = threading.Condition()
        self._messages: deque[Message] = deque()
        self._error: WireError | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, message: Message) -> None:
        """Take a message. It is waited for from the next `begin` or `wait` on."""
        self._messages.append(message)

    def begin(self) -> None:
        """Wait for messages from now on, while the caller does something else."""
        if not self._messages:
            return
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            else:
                self._changed.notify_all()

    def wait(self, left: int = 0) -> None:
        """Return when at most `left` messages are on their way; raise what went wrong with one of them."""
        if len(self._messages) <= left and self._error is None:
            return
        self.begin()
        pause = GLANCE_SECONDS
        while not self._wait_for(lambda: len(self._messages) <= left, pause):
            pause = min(1.5 * pause, RARE_GLANCE_SECONDS)
            self._check_first()
        if self._error is not None:
            raise self._error

    def give_up(self, error: WireError) -> None:
        """Let `wait` raise, in whatever thread it is."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self, wait: float = 0.1) -> None:
        """Let the thread go, and wait a moment for it: a message that gloo has forgotten may hold it (7)."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait)

    def _check_first(self) -> None:
        """Raise where the first message cannot come any more."""
        with self._changed:
            first = self._messages[0] if self._messages else None
        if first is None:
            return
        try:
            self._look(first.peer)
        except WireError:
            # It may have come just before its peer left. And if gloo raises, its error says more.
            if not self._wait_for(lambda: not self._messages or self._messages[0] is not first, GRACE_SECONDS):
                raise

    def _wait_for(self, state: Callable[[], bool], seconds: float) -> bool:
        """Wait for a state, or for an error; whether one of them came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None or state(), seconds)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._closed, IDLE_SECONDS)
                if self._closed or not self._messages:
                    self._thread = None
                    return
                message = self._messages[0]
            try:
                message.wait()
            except WireError as error:
                self.give_up(error)
            with self._changed:
                self._messages.popleft()
                self._changed.notify_all()
            del message


def brief(error: RuntimeError) -> str:
    """What gloo says, without where in its source it says it, and without advice."""
    return str(error).split("] ", 1)[-1].split("\n")[0].split(". This is typically")[0]
