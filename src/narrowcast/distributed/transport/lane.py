"""What runs in order, off the caller's thread.

gloo matches messages by the order in which they are posted, so the collectives of a group run one after the other in
a `Lane`, in the order of the calls. An asynchronous call is queued for the lane's thread and returns a `Work`. A
synchronous one runs on the caller's own thread when the lane is idle, which saves two thread switches, and waits for
its turn otherwise. The thread starts with the first asynchronous call, ends when it has had nothing to do for a
second, and never keeps the interpreter alive.

Callbacks on a `Work`'s future run on the lane's thread, as they do in torch. From there further collectives may be
started with `async_op=True`; a synchronous one would wait for itself, and raises.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.stats import span
from narrowcast.errors import CollectiveError

Job = Callable[[], list[Tensor]]
IDLE_SECONDS = 1.0

_accepted = threading.local()


def accepted() -> int:
    """How many jobs lanes have taken from this thread so far."""
    return getattr(_accepted, "count", 0)


def _note_accepted() -> None:
    _accepted.count = accepted() + 1


class Work(dist.Work):
    """A collective on its way: what `async_op=True` returns, with the methods of torch's own."""

    def __init__(self, op: str, job: Job) -> None:
        super().__init__()
        self._op = op
        self._job: Job | None = job
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._outputs: list[Tensor] = []
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._inference = torch.is_inference_mode_enabled()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done, and raise what went wrong."""
        seconds = timeout.total_seconds() if timeout else None
        with span(f"narrowcast::{self._op} wait"):
            done = self._done.wait(seconds or None)
        if not done:
            raise CollectiveError(f"{self._op}: not done after {seconds:g} s, the timeout given to wait().")
        if self._error is not None:
            raise self._error
        self._finish()
        return True

    def done_within(self, seconds: float) -> bool:
        """Wait for its end, well or not, for so long at most; whether it came."""
        return self._done.wait(seconds)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that were written, once done."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the tensors that were written."""
        with self._lock:
            if self._future is None:
                self._future = self._new_future()
                if self._done.is_set():
                    self._settle(self._future)
            return self._future

    def run(self) -> None:
        """Do the work, on the thread of the lane."""
        job, self._job = self._job, None
        assert job is not None
        try:
            with torch.inference_mode(self._inference):  # which is the caller's, and known to its thread alone
                self._outputs = job()
        except BaseException as error:
            self._error = error
        del job  # with it go the references to the caller's tensors
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def fail(self, error: BaseException) -> None:
        """Give up work that never ran."""

        def job() -> list[Tensor]:
            raise error

        self._job = job
        self.run()

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            error = self._error
            told = error if isinstance(error, Exception) else CollectiveError(repr(error))
            future.set_exception(told)  # type: ignore[arg-type]

    def _new_future(self) -> torch.futures.Future[list[Tensor]]:
        return torch.futures.Future()

    def _finish(self) -> None:
        """What `wait` owes to the caller besides waiting: nothing on a CPU."""


class Lane:
    """Runs jobs one at a time, in the order in which they came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._busy = False
        self._closed: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._busy

    def run(self, op: str, job: Job) -> list[Tensor]:
        """Do `job` in its turn and return when it is done."""
        with self._changed:
            self._check_open(op)
            idle = not self._busy and not self._queue
            self._busy = self._busy or idle
        if idle:
            _note_accepted()
            try:
                return job()
            finally:
                self._rest()
        if threading.current_thread() is self._thread:
            raise CollectiveError(
                f"{op}: called from a callback that runs on the lane of the same group, where it would wait for "
                "itself. Pass async_op=True there, and wait() for the result outside of the callback."
            )
        return self.submit(Work(op, job)).result()

    def run_or_queue(self, work: Work) -> None:
        """Do `work` here and now where the lane is idle; otherwise queue it. What goes wrong stays with the work."""
        with self._changed:
            self._check_open(work._op)
            idle = not self._busy and not self._queue
            self._busy = self._busy or idle
        if not idle:
            self.submit(work)
            return
        _note_accepted()
        try:
            work.run()
        finally:
            self._rest()

    def submit(self, work: Work) -> Work:
        """Queue `work`."""
        with self._changed:
            self._check_open(work._op)
            _note_accepted()
            self._queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def close(self, reason: str, wait: float = 1.0) -> None:
        """Refuse further jobs, give up queued ones, and wait a moment for the one that runs."""
        with self._changed:
            self._closed = reason
            queued, thread = list(self._queue), self._thread
            self._queue.clear()
            self._changed.notify_all()
        for work in queued:
            work.fail(CollectiveError(f"{work._op}: {reason}"))
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait)

    def _check_open(self, op: str) -> None:
        if self._closed is not None:
            raise CollectiveError(f"{op}: {self._closed}")

    def _serve(self) -> None:
        while True:
            with self._changed:
                ready = self._changed.wait_for(self._ready, IDLE_SECONDS)
                if self._closed is not None or not (ready or self._queue):
                    self._thread = None
                    return
                if not ready:
                    continue
                work = self._queue.popleft()
                self._busy = True
            try:
                work.run()
            finally:
                del work
                self._rest()

    def _ready(self) -> bool:
        return self._closed is not None or (bool(self._queue) and not self._busy)

    def _rest(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
