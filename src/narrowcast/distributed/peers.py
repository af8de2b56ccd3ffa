"""The ranks of a process group, as narrowcast meets them: one lane, one private wire, and what to do when it breaks.

The wire is a copy of the group made from the group's own store, so the caller's collectives and narrowcast's never
race. It is made by the first collective, which therefore is a meeting of all ranks, as every collective is.

A failure is handled in one way, whatever it was. The rank that notices writes down in the store what it saw (the
first one to write is believed by all; one that seems late or gone gets a moment to say that it waits for another),
breaks its connections, and raises; every peer that waits for it loses its connection, reads the same record, and raises
the same. Then:

- A rank that raised, or that was late, may be there: the next collective makes a new wire, and goes on. A rank which
  had finished the failed call before the others notices in its next one, and repeats that one on the new wire.
- A rank that is gone stays gone: every later collective of the group raises at once.

The store may be out of reach, with the process that hosts it. So what a rank saw also goes to all peers over the wire,
as its last words before it breaks the connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from narrowcast.distributed.arena import Arena
from narrowcast.distributed.board import Board, Failure
from narrowcast.distributed.lane import Lane
from narrowcast.distributed.message import WireError, brief
from narrowcast.distributed.wire import HostWire, Wire
from narrowcast.errors import CollectiveError, MismatchError

T = TypeVar("T")

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Peers]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Peers:
    """What this process shares with the other ranks of a group, for one purpose."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, rank: int, ranks: list[int]) -> None:
        backend = _backend(group, device)
        self.name = name
        self.device = device
        self.nccl = backend.name() == "nccl"
        self.rank = rank
        self.ranks = ranks
        self.timeout = _timeout(backend)
        self.lane = Lane(f"narrowcast {name}")
        self.arena = Arena()
        store: Any = c10d._get_process_group_store(group)
        self._board = Board(f"narrowcast/{name}", store, rank, ranks, self.timeout)
        self._closing = threading.Event()
        self._wire: Wire | None = None
        self._generation = 0
        self._calls = 0
        self._failure: Failure | None = None
        """The last one."""
        self._closed: str | None = None
        self._pid = os.getpid()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """The side stream of the lane, for CUDA tensors."""
        return torch.cuda.Stream(self.device)

    def perform(self, op: str, protocol: Callable[[Wire, int], T]) -> T:
        """Run `protocol(wire, number of the call)`, and turn what goes wrong into an error that says so on every
        rank."""
        self._calls += 1
        cause: BaseException | None = None
        while True:
            if self._closed is not None:
                raise CollectiveError(f"{op}: {self._closed}") from cause
            failure = self._failure
            # Otherwise the others gave up a call that went well here, and wait for this one on a new wire.
            if failure is not None and (failure.kind == "gone" or self._calls <= failure.number):
                raise CollectiveError(failure.message(op, self.timeout)) from cause
            try:
                return protocol(self._wire or self._connect(), self._calls)
            except MismatchError:
                raise  # every rank came to it, and every message was read: the wire is as good as before
            except WireError as error:
                cause = error
                if not self._closing.is_set():
                    self._fail(error.kind, error.peer, op, str(error))
            except BaseException as error:
                self._fail("raised", self.rank, op, f"{type(error).__name__}: {error}")
                raise

    def close(self, reason: str) -> None:
        """Let go of the thread, the connections and the buffers."""
        if os.getpid() != self._pid:
            return
        self._closed = reason
        self._closing.set()
        wire, self._wire = self._wire, None
        if wire is not None and self.lane.busy:
            here = self.ranks[self.rank]
            wire.close(Failure("gone", here, here, self._calls, "a collective", reason).to_bytes())
        self.lane.close(reason)
        if wire is not None:
            wire.retire()
        self.arena.clear()

    # -- making and breaking the wire -----------------------------------------------------------------------------

    def _connect(self) -> Wire:
        deadline = time.monotonic() + self.timeout.total_seconds()
        trouble = self._board.meet(self._generation, self._closing)
        if trouble:
            raise WireError(self.rank, trouble, "unmet")
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            self._wire = self._make_wire(self._board.page(self._generation), left)
        except RuntimeError as error:
            raise WireError(self.rank, brief(error), "unmet") from error
        return self._wire

    def _make_wire(self, store: dist.Store, within: timedelta) -> Wire:
        host = HostWire(store, self.rank, self.ranks, self.timeout, within)
        if self.device.type != "cuda":
            return host
        from narrowcast.distributed.device_wire import NcclWire, StagedWire

        return NcclWire(host, store) if self.nccl else StagedWire(host, self.device)

    def _fail(self, kind: str, peer: int, op: str, reason: str) -> None:
        """Write down a failure, or learn of the one that all ranks believe in, and break the wire."""
        wire, self._wire = self._wire, None
        failure = Failure(kind, self.ranks[peer], self.ranks[self.rank], self._calls, op, reason[:300])
        if wire is not None and kind == "gone":
            with contextlib.suppress(ValueError):  # it gave no reason
                failure = Failure.from_bytes(wire.last_words(peer))
        self._failure = self._board.report(self._generation, failure)
        self._generation += 1
        if wire is not None:
            wire.close(self._failure.to_bytes())
            wire.retire()


def peers_of(group: dist.ProcessGroup, device: torch.device, purpose: object = "collectives") -> Peers:
    """The peers in `group`, for tensors on `device`. Each purpose has its own wire, and so its own order of calls."""
    with _lock:
        of_group = _made.setdefault(group, {})
        key = (purpose, device.type)
        if key not in of_group:
            ranks = dist.get_process_group_ranks(group)
            of_group[key] = _make(group, device, str(purpose), group.rank(), ranks)
        return of_group[key]


def pair_with(group: dist.ProcessGroup, device: torch.device, peer: int, way: tuple[int, int, int]) -> Peers:
    """This rank and `peer` (by its number in the group), for messages from way[0] to way[1] with the tag way[2]."""
    with _lock:
        of_group = _made.setdefault(group, {})
        key = (way, device.type)
        if key not in of_group:
            everyone = dist.get_process_group_ranks(group)
            low, high = sorted((group.rank(), peer))
            purpose = f"{way[0]} to {way[1]} tag {way[2]}"
            of_group[key] = _make(group, device, purpose, int(group.rank() == high), [everyone[low], everyone[high]])
        return of_group[key]


def _make(group: dist.ProcessGroup, device: torch.device, purpose: str, rank: int, ranks: list[int]) -> Peers:
    made = Peers(f"{group.group_name} {purpose} {device.type}", group, device, rank, ranks)
    # torch lets go of a group's store when the group is destroyed, even while the caller still holds the group.
    weakref.finalize(c10d._get_process_group_store(group), made.close, "the process group was destroyed")
    return made


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


def _forget_in_child() -> None:
    """Leave all that a parent has as it is: the threads that would have to close it do not exist in a forked child."""
    global _made, _lock
    for group in list(_made):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_made))
    _made, _lock = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
