"""The ranks of a process group, as narrowcast meets them: one lane, one private wire, and what to do when it breaks.

The wire is a copy of the group made from the group's own store, so the caller's collectives and narrowcast's never
race. It is made by the first collective, which therefore is a meeting of all ranks, as every collective is.

A failure is handled in one way, whatever it was. The rank that notices writes down in the store what it saw (the
first one to write is believed by all), breaks its connections, and raises; every peer that waits for it loses its
connection, reads the same record, and raises the same. Then:

- A rank that raised, or that was late, is there: the next collective makes a new wire, and goes on. A rank which had
  finished the failed call before the others notices in its next one, and repeats that one on the new wire.
- A rank that is gone stays gone: every later collective of the group raises at once. So it does when the
  new wire cannot be made within the group's timeout.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from narrowcast.distributed.arena import Arena
from narrowcast.distributed.lane import Lane
from narrowcast.distributed.wire import HostWire, Wire, WireError
from narrowcast.errors import CollectiveError, MismatchError

T = TypeVar("T")

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Peers]] = weakref.WeakKeyDictionary()
_counts: dict[str, int] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Failure:
    """What went wrong, as the first rank that noticed wrote it down."""

    kind: str
    """"raised", "late" or "gone"."""
    rank: int
    seen_by: int
    number: int
    op: str
    reason: str

    def message(self, op: str, timeout: timedelta) -> str:
        where = op if op == self.op else f"{op} (after {self.op})"
        if self.kind == "raised":
            return f"{where}: rank {self.rank} failed in it: {self.reason}. The other ranks gave it up, too."
        if self.kind == "late":
            return (
                f"{where}: rank {self.rank} did not answer rank {self.seen_by} within {timeout.total_seconds():g} s, "
                f"the timeout of the group ({self.reason}). It is stopped, busy, or makes other calls. If it only "
                "needs longer, pass a longer timeout= to init_process_group()."
            )
        return (
            f"{where}: rank {self.rank} is gone, as rank {self.seen_by} saw ({self.reason}). Its own output says why. "
            "This group cannot go on: start the job again, or make a new group of the ranks that are left."
        )


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
        self._store = dist.PrefixStore(f"narrowcast/{name}", store.clone())
        self._wire: Wire | None = None
        self._generation = 0
        self._calls = 0
        self._broken: str | None = None
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
        while True:
            if self._broken is not None:
                raise CollectiveError(f"{op}: {self._broken}")
            wire = self._wire or self._connect(op)
            try:
                return protocol(wire, self._calls)
            except MismatchError:
                raise  # every rank came to it, and every message was read: the wire is as good as before
            except WireError as error:
                cause: BaseException = error
                failure = self._fail("late" if error.late else "gone", self.ranks[error.peer], op, str(error))
            except BaseException as error:
                self._fail("raised", self.ranks[self.rank], op, f"{type(error).__name__}: {error}")
                raise
            if failure.kind == "gone":
                self._broken = failure.message(failure.op, self.timeout)
            elif failure.number < self._calls:
                continue  # the others gave up a call that went well here, and wait with this one on a new wire
            raise CollectiveError(failure.message(op, self.timeout)) from cause

    def close(self, reason: str) -> None:
        """Let go of the thread, the connections and the buffers."""
        if os.getpid() != self._pid:
            return
        self._broken = self._broken or reason
        wire, self._wire = self._wire, None
        if wire is not None and self.lane.busy:
            wire.close()
        self.lane.close(reason)
        self.arena.clear()

    def leak(self) -> None:
        """Forget the wire without closing it, in a forked child, where the threads that serve it do not exist."""
        if self._wire is not None:
            self._wire.leak()

    # -- making and breaking the wire -----------------------------------------------------------------------------

    def _connect(self, op: str) -> Wire:
        here = dist.PrefixStore(f"{self._generation}", self._store)
        try:
            here.set(f"here/{self.rank}", "1")
            self._wire = self._make_wire(here)
        except RuntimeError as error:
            missing = self._missing(here)
            who = f"rank(s) {', '.join(map(str, missing))} did not come" if missing else "the connection failed"
            self._broken = (
                f"{who} to make the connections of group {self.name!r} within {self.timeout.total_seconds():g} s. "
                "Every rank of the group must make the same calls in the same order."
            )
            raise CollectiveError(f"{op}: {self._broken} ({str(error).splitlines()[0]})") from error
        return self._wire

    def _make_wire(self, store: dist.Store) -> Wire:
        host = HostWire(store, self.rank, self.ranks, self.timeout)
        if self.device.type != "cuda":
            return host
        from narrowcast.distributed.device_wire import NcclWire, StagedWire

        return NcclWire(host, store) if self.nccl else StagedWire(host, self.device)

    def _missing(self, here: dist.Store) -> list[int]:
        def look() -> list[int]:
            return [rank for i, rank in enumerate(self.ranks) if not here.check([f"here/{i}"])]

        return self._briefly(look, [])

    def _fail(self, kind: str, rank: int, op: str, reason: str) -> Failure:
        """Write down a failure, break the wire, and return the failure that all ranks believe in."""
        mine = Failure(kind, rank, self.ranks[self.rank], self._calls, op, reason)
        key, text = f"{self._generation}/failure", json.dumps(asdict(mine))
        told = self._briefly(lambda: self._store.compare_set(key, "", text), text.encode())
        wire, self._wire = self._wire, None
        self._generation += 1
        if wire is not None:
            wire.close()
        return Failure(**json.loads(told))

    def _briefly(self, action: Callable[[], T], otherwise: T) -> T:
        """The result of an action on the store, whose own host may be stopped or dead: then it is not waited for."""
        results: list[T] = []

        def attempt() -> None:
            with contextlib.suppress(Exception):
                results.append(action())

        thread = threading.Thread(target=attempt, name="narrowcast store", daemon=True)
        thread.start()
        thread.join(min(0.5, 0.05 * self.timeout.total_seconds()))
        return results[0] if results else otherwise


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
    """New peers. The count keeps a group that is made again under an old name apart from the old one's keys."""
    name = f"{group.group_name} {purpose} {device.type}"
    _counts[name] = count = _counts.get(name, 0) + 1
    made = Peers(f"{name} {count}", group, device, rank, ranks)
    weakref.finalize(group, made.close, "the process group was destroyed")
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
    global _made, _lock
    for of_group in _made.values():
        for peers in of_group.values():
            peers.leak()
    _made, _lock = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
