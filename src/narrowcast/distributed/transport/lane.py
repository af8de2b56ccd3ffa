"""What runs in order, off the caller's thread.

gloo matches messages by the order in which they are posted, so the collectives of a group run one after the other in
a `Lane`, in the order of the calls. An asynchronous call is queued for the lane's thread and returns a `Work`. A
synchronous one runs on the caller's own thread when the lane is idle, which saves two thread switches, and waits for
its turn otherwise. The thread starts with the first asynchronous call, ends when it has had nothing to do for a
second, and never keeps the interpreter alive.

On CUDA tensors jobs run on the lane's side stream. A job that waits for no other rank on the host may be done
`at_once`: then the caller's thread gives the stream all of it. Others are the lane's thread's: all jobs over gloo,
where bytes pass through host memory, and over NCCL those that ranks have yet to agree on. A synchronous job that is
done `at_once` and needs none of the group's memory may stay `here`, on the caller's own stream: that saves two events,
and the GPU the time to see them.

Callbacks on a `Work`'s future run on the lane's thread, as they do in torch. From there further collectives may be
started with `async_op=True`; a synchronous one would wait for itself, and raises.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.distributed.stats import span
from narrowcast.distributed.transport.work import Carrier, Job, StreamWork, Turns, Work, noting, raise_lost
from narrowcast.errors import CollectiveError

IDLE_SECONDS = 1.0

PRIORITY = -3
"""Of the side stream: torch's highest, which NCCL's own streams have, too (transport/nccl.py). At the usual priority a
kernel of ours waits until all blocks of the matmuls that were launched before it have begun. Of 64 MB reductions of
four ranks on an H200 25% were hidden so, and 77% with this and 16 hardware queues a rank (bench/results/nccl.md)."""

_accepted = threading.local()


def accepted() -> int:
    """How many jobs lanes have taken from this thread so far."""
    return getattr(_accepted, "count", 0)


def _note_accepted() -> None:
    _accepted.count = accepted() + 1


class Lane:
    """Runs jobs one at a time, in the order in which they came."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._busy = False
        self._closed: str | None = None
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._turns = Turns()

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def stream(self) -> torch.cuda.Stream:
        """The side stream, for CUDA tensors."""
        with self._changed:  # one for all threads
            self._stream = self._stream or torch.cuda.Stream(self._device, priority=PRIORITY)
            return self._stream

    def start(
        self,
        op: str,
        job: Job,
        tensors: Sequence[Tensor],
        async_op: bool,
        at_once: bool = False,
        *,
        here: bool = False,
    ) -> Work | None:
        """Do a job on these tensors in its turn. Asynchronous: returns a `Work` at once; else None, when it is done."""
        if self._device.type == "cuda":
            if here and at_once and not async_op:
                self._run_on_callers_stream(op, job)
                return None
            return self._start_on_stream(StreamWork(op, job, self.stream, tensors, self._turns), async_op, at_once)
        if not async_op:
            self.run(op, job)
            return None
        work = Work(op, job)
        with span(f"narrowcast::{op}"):  # a range that lasted until it is done might outlive the profile: torch crashes
            return self.submit(work)

    def _start_on_stream(self, work: StreamWork, async_op: bool, at_once: bool) -> Work | None:
        if async_op:
            if at_once:
                self.run_or_queue(work)
                if work.is_launched():
                    work.raise_error()
            else:
                self.submit(work)
            return work
        self.run(work.op, work.run_here)
        work.wait()
        return None

    def _run_on_callers_stream(self, op: str, job: Job) -> None:
        stream, carriers = torch.cuda.current_stream(self._device), list[Carrier]()

        def on_stream() -> list[Tensor]:  # maybe in the lane's thread, which has a current stream of its own
            with self._turns.take(stream, torch.cuda.Event()), noting(carriers):
                return job()

        self.run(op, on_stream)
        raise_lost(op, carriers)

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
        """Do `work` here and now where the lane is idle; otherwise queue it. Its error, if any, stays with it."""
        with self._changed:
            self._check_open(work.op)
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
            self._check_open(work.op)
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                thread.start()  # where no more threads can be started, the lane stays as it was
                self._thread = thread
            _note_accepted()
            self._queue.append(work)
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
            work.fail(CollectiveError(f"{work.op}: {reason}"))
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
