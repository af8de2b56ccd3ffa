"""A collective that is made of several, its phases: one after the other, or side by side, chunk by chunk.

A rank on which one phase fails gives up the later ones: so every rank of a mesh learns of the failure, and every rank
has made the same number of calls in each of its groups.

Three phases run side by side where each says how far it has come (`Progress`), and the next one waits for its chunks.
The first and the third share a group and a thread, one after the other; the second has a thread of its own, that of its
group's lane. The third begins when the second has a chunk: ranks that disagree have noticed by then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.transport.failures import Failure
from narrowcast.distributed.transport.work import Work
from narrowcast.errors import CollectiveError


class Progress:
    """How far a phase of `rank` has come, of `total` chunks."""

    def __init__(self, total: int, rank: int) -> None:
        self.total, self._rank = total, rank
        self._reached = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def reach(self, count: int) -> None:
        """So much is done. The end is reached by `complete` alone, when the phase cannot fail any more."""
        self._set(min(count, self.total - 1))

    def complete(self) -> None:
        self._set(self.total)

    def fail(self, error: BaseException) -> None:
        """No more is going to be done."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until so much is done; where it failed, the phase that waits fails for the same reason."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached >= count or self._error is not None)
            if self._reached < count and self._error is not None:
                # Not the error itself: ranks of the phase that waits do agree where those of the other one did not.
                error = CollectiveError(str(self._error))
                error.failure = Failure.of(self._error, self._rank, 0, "")
                raise error from self._error

    def begins(self) -> bool:
        """Wait until something is done; whether it was, or the phase failed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached > 0 or self._error is not None)
            return self._reached > 0

    def _set(self, count: int) -> None:
        with self._changed:
            self._reached = max(count, self._reached)
            self._changed.notify_all()


def run(phases: Sequence[Collective], op: str, progress: Sequence[Progress] = ()) -> None:
    """Make the phases of one collective. Where one fails, so do those after it, on all ranks.

    `progress` is that of the first and the second of three, where the next one follows it. On a CPU they run side by
    side, if there is more than a chunk.
    """
    if progress and progress[0].total > 1 and all(_meets_on_cpu(phase) for phase in phases):
        _run_side_by_side(phases, op, *progress)
        return
    for i, phase in enumerate(phases):
        try:
            phase.run()
        except BaseException as error:
            _give_up(phases[i + 1 :], op, error)
            raise
        for done in progress[i : i + 1]:
            done.complete()


class _Beside(Work):
    """The second phase, in its own lane. However it ends, also where it never runs, the third one is told."""

    def __init__(self, op: str, phase: Collective, progress: Progress) -> None:
        def job() -> list[Tensor]:
            phase.run()
            progress.complete()
            return []

        super().__init__(op, job)
        self._phase, self._progress = phase, progress

    def run(self) -> None:
        super().run()
        error = self.exception()
        if error is not None:
            self._progress.fail(error)

    def break_off(self, error: BaseException) -> None:
        """The phase beside it failed: end it, wherever it waits."""
        self._phase.group.break_off(self.op, error)
        with contextlib.suppress(BaseException):
            self.wait()


def _run_side_by_side(phases: Sequence[Collective], op: str, of_first: Progress, of_second: Progress) -> None:
    first, second, third = phases
    beside = _Beside(op, second, of_second)
    try:
        second.group.lane.submit(beside)
    except BaseException as error:
        _give_up(phases, op, error)
        raise
    try:
        first.run()
        of_first.complete()
        if not of_second.begins():
            beside.wait()  # raises
    except BaseException as error:
        of_first.fail(error)
        beside.break_off(error)
        third.group.give_up(op, error)
        raise
    try:
        third.run()
    except BaseException as error:
        if beside.is_completed():
            beside.wait()  # raises what the third failed with, where the second failed first
        beside.break_off(error)
        raise
    beside.wait()


def _meets_on_cpu(phase: Collective) -> bool:
    return phase.size > 1 and phase.group.device.type == "cpu"


def _give_up(phases: Sequence[Collective], op: str, error: BaseException) -> None:
    for phase in phases:
        phase.group.give_up(op, error)
