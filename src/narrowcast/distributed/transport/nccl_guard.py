"""What NCCL has under way, looked after: a peer that is gone, refuses a call or does not come ends the wait for it.

A kernel of NCCL waits on the GPU for rows that may never come, and no host thread notices. Each call leaves a number in
host memory when the stream is through with it. While one is missing for long, a thread looks at the connections over
which headers are compared: a peer that is gone, or that gave a call up, has broken them. Then NCCL is told to give up,
the stream goes on, and the next call, or `work.wait()`, raises.

The number comes by a copy on the stream, and is read as memory: a call of CUDA from another thread would break a graph
that the caller captures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from narrowcast.distributed.transport.wire import WireError

FIRST_LOOK_SECONDS = 0.25
RARE_LOOK_SECONDS = 2.0
"""The shortest and the longest time between two looks: each leaves a few bytes with gloo."""
IDLE_SECONDS = 2.0
NUMBERS = 4096
"""Numbers of calls are counted round and round."""


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
        self._peers, self._timeout, self._look, self._give_up = peers, timeout, look, give_up
        with torch.inference_mode(False):  # they outlive the call
            self._numbers = torch.arange(NUMBERS, dtype=torch.int32, device=device)
            self._arrived = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self._seen = self._arrived.numpy()
        self._given = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether the stream is through with every call."""
        return int(self._seen[0]) == self._given

    def given(self) -> None:
        """The current stream was given all of a call."""
        number = (self._given + 1) % NUMBERS
        self._arrived.copy_(self._numbers[number : number + 1], non_blocking=True)
        with self._lock:
            self._given = number
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._serve, name="narrowcast guard", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until the stream is through, for so long at most; whether it is."""
        deadline = time.monotonic() + seconds
        while not self.done and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.done

    def close(self) -> None:
        self._closed.set()

    def _serve(self) -> None:
        last, since, pause = -1, time.monotonic(), FIRST_LOOK_SECONDS
        while not self._closed.wait(pause):
            now = time.monotonic()
            if int(self._seen[0]) != last:
                last, since, pause = int(self._seen[0]), now, FIRST_LOOK_SECONDS
            with self._lock:
                if self.done and now - since >= IDLE_SECONDS:
                    self._thread = None
                    return
            if not self.done and now - since >= FIRST_LOOK_SECONDS:
                error = self._trouble(now - since)
                if error is not None:
                    self._give_up(error)
                    return
                pause = min(1.5 * pause, RARE_LOOK_SECONDS, max(FIRST_LOOK_SECONDS, since + self._timeout - now))

    def _trouble(self, waited: float) -> WireError | None:
        """Why a call cannot end, if it cannot."""
        for peer in self._peers:
            try:
                self._look(peer)
            except WireError as error:
                return error
        if waited >= self._timeout:
            reason = "NCCL made no progress. A rank does not come, is stopped, or makes another call"
            return WireError(self._peers[0], reason, "unmet")
        return None
