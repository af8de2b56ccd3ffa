"""A rank that cannot make a call takes part in it by failing it, so that no other rank waits for it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from narrowcast.distributed.transport.lane import Lane, accepted
from narrowcast.distributed.transport.work import Work


class Refusing(ABC):
    """What makes calls in a lane, and can refuse one: a group, or a mesh of groups."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @property
    @abstractmethod
    def lane(self) -> Lane:
        """The lane in which calls have their turn."""

    @abstractmethod
    def give_up(self, op: str, error: BaseException) -> None:
        """`refuse`, here and now, from a job of the lane."""

    @contextlib.contextmanager
    def refusing(self, op: str) -> Iterator[None]:
        """An error in here, before the lane has taken a job, means that this rank refuses the call."""
        before = accepted()
        try:
            yield
        except BaseException as error:
            if accepted() == before:
                self.refuse(op, error)
            raise

    @contextlib.contextmanager
    def giving_up(self, op: str) -> Iterator[None]:
        """An error in here, in a job of the lane that has not counted the call yet, means the same."""
        try:
            yield
        except BaseException as error:
            self.give_up(op, error)
            raise

    def refuse(self, op: str, error: BaseException) -> None:
        """Take part in a call by failing it: this rank cannot make it, and the others are told why.

        The call is counted like any other. Nobody is waited for: where the lane is busy, its turn comes later.
        """
        if self.size == 1:
            return

        def job() -> list[Tensor]:
            self.give_up(op, error)
            return []

        self.lane.run_or_queue(Work(op, job))
