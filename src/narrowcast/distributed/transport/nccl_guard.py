"""What NCCL has under way, looked after: a peer that is gone, refuses a call or does not come ends the wait for it.

A kernel of NCCL waits on the GPU for rows that may never come, and no host thread notices. So each call leaves an event
on its stream, and while there are calls, a thread picks the last one's now and then. While that does not come, the
thread looks at the connections over which headers are compared: a peer that is gone, or that gave a call up, has broken
them. Then NCCL is told to give up, the stream goes on, and the next call, or `work.wait()`, raises.

Calls record their events themselves: by the time the thread would do it, the stream may have been given other work of
the caller's, or be capturing a graph.

(A number that the stream copies into host memory would do as well, but copies of other streams would wait behind it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence

import torch

from narrowcast.distributed.transport.watched import watched
from narrowcast.distributed.transport.wire import WireError

FIRST_LOOK_SECONDS = 0.25
RARE_LOOK_SECONDS = 2.0
"""The shortest and the longest time between two looks: each leaves a few bytes with gloo."""
IDLE_SECONDS = 2.0

_NO_PROGRESS = "NCCL made no progress. A rank does not come, is stopped, or makes another call"
_NOT_MET = (
    "NCCL made no connections, though gloo did. A rank is stopped, or NCCL's network is not the one of gloo: "
    "NCCL_DEBUG=INFO says where it tries, NCCL_SOCKET_IFNAME chooses another interface"
)

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Guard:
    """Looks after the calls of one wire. `look(peer)` raises where a peer is gone; `give_up` ends what waits for it."""

    def __init__(
        self,
        device: torch.device,
        peers: Sequence[int],
        timeout: float,
        look: Callable[[int], None],
        give_up: Callable[[WireError], None],
    ) -> None:
        self._device, self._peers, self._timeout = device, peers, timeout
        self._look, self._give_up = look, give_up
        self._calls = self._asked = 0
        """How many calls were made, and how many of them come before the event that is waited for."""
        self._newest: torch.cuda.Event | None = None
        self._event: torch.cuda.Event | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def given(self) -> None:
        """The current stream was given all of a call."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        newest = torch.cuda.current_stream(self._device).record_event()
        with self._lock:
            self._newest = newest
            self._calls += 1
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._serve, name="narrowcast guard", daemon=True)
                self._thread.start()

    def watch(self, meeting: Callable[[], None]) -> None:
        """Let ranks meet in NCCL: that holds the thread, without a time limit. Raise where one of them cannot come."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        pause = FIRST_LOOK_SECONDS

        def meet() -> None:
            with torch.cuda.stream(stream):  # and its device; None is none
                meeting()

        def look(waited: float) -> float:
            nonlocal pause
            error = self._trouble(waited, _NOT_MET)
            if error is not None:
                raise error
            pause = self._next_pause(pause, waited)
            return pause

        try:
            watched("narrowcast meeting", meet, pause, look)
        except RuntimeError as error:
            time.sleep(FIRST_LOOK_SECONDS)  # NCCL may see that a peer is gone before gloo does
            trouble = self._trouble(0.0, "")
            if trouble is None:
                raise
            raise trouble from error

    def wait(self, seconds: float) -> bool:
        """Wait until the stream is through with every call, for so long at most; whether it is."""
        deadline = time.monotonic() + seconds
        self._ask()
        while not self._came() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._came()

    def unfinished(self) -> bool:
        """Whether the stream was given a call that it is not through with, or cannot say."""
        with self._lock:
            newest = self._newest
        try:
            return newest is not None and not newest.query()
        except RuntimeError:
            return True

    def close(self) -> None:
        self._closed.set()

    def _ask(self) -> None:
        """Wait for the newest event from now on."""
        with self._lock:
            self._asked, self._event = self._calls, self._newest

    def _came(self) -> bool:
        """Whether the stream has come to the last event."""
        return self._event is None or self._event.query()

    def _serve(self) -> None:
        try:
            self._look_on()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _look_on(self) -> None:
        _allow_captures()
        idle = waiting = 0.0
        pause = FIRST_LOOK_SECONDS
        while not self._closed.wait(pause):
            if self._came():
                idle = idle + pause if self._asked == self._calls else 0.0
                waiting, pause = 0.0, FIRST_LOOK_SECONDS
                with self._lock:
                    if idle >= IDLE_SECONDS and self._asked == self._calls:
                        self._thread = None  # here, so that the next call starts another
                        return
                self._ask()
                continue
            waiting += pause
            error = self._trouble(waiting, _NO_PROGRESS)
            if error is not None:
                self._give_up(error)
                return
            pause = self._next_pause(pause, waiting)

    def _next_pause(self, last: float, waited: float) -> float:
        return min(1.5 * last, RARE_LOOK_SECONDS, max(FIRST_LOOK_SECONDS, self._timeout - waited))

    def _trouble(self, waited: float, reason: str) -> WireError | None:
        """Why a call cannot end, if it cannot."""
        for peer in self._peers:
            try:
                self._look(peer)
            except WireError as error:
                return error
        if waited >= self._timeout and self._peers:
            return WireError(self._peers[0], reason, "unmet")
        return None


def _allow_captures() -> None:
    """Let other threads capture CUDA graphs while this one asks for its events, as torch's own watchdog does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
