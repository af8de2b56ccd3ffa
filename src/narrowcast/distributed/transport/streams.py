"""What CUDA adds to a lane: a side stream, and works that a stream waits for.

A collective on CUDA tensors runs on the lane's side stream, after what the caller's stream had been given before the
call; `Work.wait()` makes the caller's stream, not only its thread, wait for the result. Over NCCL nothing waits on
the host. Over gloo the lane's thread does, because the bytes pass through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.distributed.transport.lane import Job, Work


class StreamWork(Work):
    """A collective on a side stream."""

    def __init__(self, op: str, job: Job, side: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        super().__init__(op, self._aside)
        self._inner: Job | None = job
        self._tensors = list(tensors)
        self._device = tensors[0].device
        self._side = side
        self._before = torch.cuda.current_stream(self._device).record_event()
        self._after = torch.cuda.Event()

    def is_completed(self) -> bool:
        return super().is_completed() and (self._error is not None or self._after.query())

    def finish(self) -> list[Tensor]:
        """Run it here and now."""
        self.run()
        self.wait()
        return self._outputs

    def _aside(self) -> list[Tensor]:
        inner, self._inner = self._inner, None
        assert inner is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            self._side.wait_event(self._before)
            for tensor in self._tensors:
                tensor.record_stream(self._side)
            try:
                return inner()
            finally:
                self._after.record(self._side)
                self._tensors.clear()

    def _new_future(self) -> torch.futures.Future[list[Tensor]]:
        return torch.futures.Future(devices=[self._device])

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        with torch.cuda.stream(self._side):  # the future waits for the streams that are current when it is settled
            super()._settle(future)

    def _finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._after)
