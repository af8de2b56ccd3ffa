"""A collective on its way: what `async_op=True` returns, with the methods of torch's own `Work`.

On CUDA a collective runs on the lane's side stream, after what the caller's stream had been given before the call.
`wait()` then makes the caller's stream, not only its thread, wait for the result.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.stats import span
from narrowcast.errors import CollectiveError

Job = Callable[[], list[Tensor]]

_current = threading.local()


class Carrier(Protocol):
    """What gives a stream its rows: it knows later whether they are lost."""

    def lost(self, op: str) -> BaseException | None:
        """What to raise in a call of that name, if what the stream was given is lost."""


def carried_by(carrier: Carrier) -> None:
    """Note who gave the stream rows, for the work that runs in this thread."""
    carriers = getattr(_current, "carriers", None)
    if carriers is not None and carrier not in carriers:
        carriers.append(carrier)


@contextlib.contextmanager
def noting(carriers: list[Carrier]) -> Iterator[None]:
    """Note in `carriers` who gives the stream rows, while this thread is in here."""
    _current.carriers = carriers
    try:
        yield
    finally:
        _current.carriers = None


def raise_lost(op: str, carriers: Sequence[Carrier]) -> None:
    """Raise what a call of that name is to raise, if what a stream was given is lost."""
    for carrier in carriers:
        error = carrier.lost(op)
        if error is not None:
            raise error


class Turns:
    """Jobs on several streams, one at a time: each begins when the one before it has ended on its stream."""

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    @contextlib.contextmanager
    def take(self, stream: torch.cuda.Stream, after: torch.cuda.Event) -> Iterator[None]:
        """A job on this stream, which is made the current one. `after` is recorded when the stream has all of it."""
        with _on_stream(stream, stream.device):
            if self._last is not None and self._last[0] != stream:
                stream.wait_event(self._last[1])
            try:
                yield
            finally:
                after.record(stream)
                self._last = stream, after


class Work(dist.Work):
    """A collective on its way."""

    def __init__(self, op: str, job: Job) -> None:
        super().__init__()
        self.op = op
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
        with span(f"narrowcast::{self.op} wait"):
            done = self._done.wait(seconds or None)
        if not done:
            raise CollectiveError(f"{self.op}: not done after {seconds:g} s, the timeout given to wait().")
        if self._error is not None:
            raise self._error
        self._finish()
        return True

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
        """End with an error, without having run."""

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
        """What `wait` does for the caller besides waiting: nothing on a CPU."""


class StreamWork(Work):
    """A collective on a side stream."""

    def __init__(
        self, op: str, job: Job, side: torch.cuda.Stream, tensors: Sequence[Tensor], turns: Turns | None = None
    ) -> None:
        super().__init__(op, self._aside)
        self._turns = turns or Turns()
        self._carriers: list[Carrier] = []
        self._inner: Job | None = job
        self._tensors = list(tensors)
        self._device = tensors[0].device
        self._side = side
        self._before = torch.cuda.current_stream(self._device).record_event()
        self._after = torch.cuda.Event()

    def is_completed(self) -> bool:
        return super().is_completed() and (self._error is not None or self._after.query())

    def is_launched(self) -> bool:
        """Whether the stream was given all of it, or it failed before that."""
        return self._done.is_set()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def run_here(self) -> list[Tensor]:
        """Give the stream all of it here and now, without waiting for it."""
        self.run()
        self.raise_error()
        return self._outputs

    def _aside(self) -> list[Tensor]:
        inner, self._inner = self._inner, None
        assert inner is not None
        try:
            with self._turns.take(self._side, self._after):
                self._side.wait_event(self._before)
                for tensor in self._tensors:
                    tensor.record_stream(self._side)
                with noting(self._carriers):
                    return inner()
        finally:
            self._tensors.clear()

    def _new_future(self) -> torch.futures.Future[list[Tensor]]:
        return torch.futures.Future(devices=[self._device])

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        with torch.cuda.stream(self._side):  # the future waits for the streams that are current when it is settled
            super()._settle(future)

    def _finish(self) -> None:
        raise_lost(self.op, self._carriers)
        torch.cuda.current_stream(self._device).wait_event(self._after)


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """`torch.cuda.stream`, and its device; in a third of the time where the device is the current one."""
    with _NOTHING if torch.cuda.current_device() == device.index else torch.cuda.device(device):
        before = torch.cuda.current_stream(device)
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(before)


_NOTHING = contextlib.nullcontext()
