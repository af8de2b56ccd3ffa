"""The private connections of the ranks of a group, and what happens when they break.

They are made by the first collective, which therefore is a meeting of all ranks, as every collective is.

A failure is handled in one way, whatever it was. The rank that notices writes down in the store what it saw (the
first one to write is believed by all; one that seems late or gone gets a moment to say that it waits for another),
breaks its connections, and raises; every peer that waits for it loses its connection, reads the same record, and raises
the same. Then:

- A rank that raised, or that was late, may be there: the next call makes new connections, and goes on. A rank which had
  finished the failed call before the others notices in its next one, and repeats that one on the new connections.
- A rank that is gone stays gone: every later call raises at once.

The store may be out of reach, with the process that hosts it. So what a rank saw also goes to all peers over the
connections, as its last words before it breaks them.

Calls with different tags (purposes of a group, messages of two ranks) share connections, and run at the same time. When
one of them fails, the others start again on new connections, unless their rows may be on their way: those raise, too,
and so do those that start again where another rank has done with the call (`Overtaken`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from narrowcast.distributed.transport.failures import Board, Failure, attempt
from narrowcast.distributed.transport.gloo_connections import LAST_WORDS_BYTES, Gloo
from narrowcast.distributed.transport.gloo_messages import brief
from narrowcast.distributed.transport.watched import watched
from narrowcast.distributed.transport.wire import Wire, WireError
from narrowcast.errors import CollectiveError


class _User(Protocol):
    def close(self, reason: str, last_words: bytes) -> None: ...


class Connections:
    """What this process shares with the other ranks of a group; over NCCL, for one purpose."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, rank: int, ranks: list[int]) -> None:
        store: Any = c10d._get_process_group_store(group)
        self.name = name
        self.device = device
        self.nccl = nccl_carries(group, device)
        self.rank = rank
        self.ranks = ranks
        self.timeout = _timeout(_backend(group, device))
        self.calls: dict[int, int] = {}
        """How many calls have been made with each tag."""
        self.closing = threading.Event()
        self._board = Board(f"narrowcast/{attempt()}/{name}", store, rank, ranks, self.timeout)
        self._users: weakref.WeakSet[_User] = weakref.WeakSet()
        self._connecting, self._changing = threading.Lock(), threading.Lock()
        self._gloo: Gloo | None = None
        self.generation = 0
        """How often they have been given up."""
        self._failures: dict[int, Failure] = {}
        """The last one of each tag, in the order in which they came."""
        self._closed: str | None = None
        self._pid = os.getpid()
        # torch lets go of a group's store when the group is destroyed, even while the caller still holds the group.
        weakref.finalize(store, self.close, "the process group was destroyed")

    def check(self, op: str, tag: int, number: int, cause: BaseException | None) -> None:
        """Raise if call `number` of this tag cannot go on, or is known to have failed on another rank."""
        if self._closed is not None:
            raise CollectiveError(f"{op}: {self._closed}") from cause
        # Otherwise the others gave up a call that went well here, and wait for this one on new connections.
        for failure in list(self._failures.values()):
            if failure.kind == "gone" or failure.covers(tag, number):
                raise failure.error(op, self.timeout) from cause

    def failed_elsewhere(self, op: str) -> CollectiveError:
        """The error of a call that cannot be repeated after another one failed."""
        return list(self._failures.values())[-1].error(op, self.timeout)

    def connected(self, generation: int) -> Gloo:
        """The connections of a generation, made by the first who asks."""
        with self._connecting:
            if generation != self.generation:
                raise WireError(self.rank, "another call gave up", "unmet")
            return self._gloo or self._connect(generation)

    def page(self, generation: int) -> dist.PrefixStore:
        """A store for what belongs to one generation of connections."""
        return self._board.page(generation)

    def fail(self, generation: int, wire: Wire | None, failure: Failure) -> None:
        """Write down a failure, or learn of the one that all ranks believe in, and break the connections."""
        if self.closing.is_set() or generation != self.generation:
            return  # another call has given them up
        if wire is not None and failure.kind == "gone" and failure.rank in self.ranks:
            with contextlib.suppress(ValueError):  # it gave no reason
                failure = Failure.from_bytes(wire.last_words(self.ranks.index(failure.rank)))
        failure = self._board.report(generation, failure)
        with self._changing:
            if generation != self.generation:
                return
            self._failures.pop(failure.tag, None)
            self._failures[failure.tag] = failure
            self.generation += 1
            gloo, self._gloo = self._gloo, None
        words = failure.to_bytes(LAST_WORDS_BYTES)
        if wire is not None:
            wire.close(words)
        elif gloo is not None:
            gloo.close(words)

    def used_by(self, user: _User) -> None:
        """Note who is to be closed when the group is destroyed, if it is there then."""
        self._users.add(user)

    def close(self, reason: str) -> None:
        """Let go of threads, connections and buffers."""
        if os.getpid() != self._pid:
            return
        self._closed = reason
        self.closing.set()
        self._gloo = None
        here, number = self.ranks[self.rank], max(self.calls.values(), default=0)
        last_words = Failure("gone", here, here, number, "a collective", reason).to_bytes(LAST_WORDS_BYTES)
        for user in list(self._users):
            user.close(reason, last_words)

    def _connect(self, generation: int) -> Gloo:
        deadline = time.monotonic() + self.timeout.total_seconds()
        trouble = self._board.meet(generation, self.closing)
        if trouble:
            raise WireError(self.rank, trouble, "unmet")
        moment = min(1.0, 0.1 * self.timeout.total_seconds())  # where the last one came in the last moment
        left, often = max(moment, deadline - time.monotonic()), self._board.look_seconds

        def connect() -> Gloo:
            return Gloo(self._board.page(generation), self.rank, self.ranks, self.timeout, timedelta(seconds=left))

        def look(waited: float) -> float:
            if self.closing.is_set():
                raise WireError(self.rank, "the group was destroyed", "unconnected")
            if waited >= left:
                raise WireError(self.rank, f"not within {self.timeout.total_seconds():g} s, the timeout", "unconnected")
            if self._board.given_up(generation):
                raise WireError(self.rank, "the other ranks gave up", "unconnected")
            return min(often, left - waited)

        try:
            gloo = watched("narrowcast connecting", connect, min(often, left), look, Gloo.close)
        except RuntimeError as error:
            raise WireError(self.rank, brief(error), "unconnected") from error
        with self._changing:
            if generation == self.generation and not self.closing.is_set():
                self._gloo = gloo
                return gloo
        gloo.close()
        raise WireError(self.rank, "another call gave up", "unmet")


def nccl_carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL carries the rows of tensors on `device` in this group."""
    return bool(_backend(group, device).name() == "nccl")


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError as error:
        raise CollectiveError(
            f"group {group.group_name!r} has no backend for {device.type} tensors. Name one for each device: "
            'init_process_group("cpu:gloo,cuda:nccl").'
        ) from error


def _timeout(backend: Any) -> timedelta:
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else c10d.default_pg_timeout
