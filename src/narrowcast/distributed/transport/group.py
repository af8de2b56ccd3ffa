"""The ranks of a process group and their private connections: calls in one order, in a lane, over a wire.

The connections (connections.py) are private, so that the caller's collectives and narrowcast's never race. Every
purpose (collectives, gradients, a mesh) has its own order of calls, lane and wire; all of them share the connections of
their group and device, where a tag tells them apart. Messages between two ranks have one order for each tag, and share
the connections of their direction. NCCL knows no tags: there, every purpose has connections and a communicator of its
own, and messages of all tags are in one order.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.buffers import Buffers
from narrowcast.distributed.transport.connections import Connections, nccl_carries
from narrowcast.distributed.transport.failures import Failure
from narrowcast.distributed.transport.gloo import GlooWire, tags_of_messages, tags_of_purpose
from narrowcast.distributed.transport.lane import Lane
from narrowcast.distributed.transport.nccl import NcclWire
from narrowcast.distributed.transport.refusal import Refusing
from narrowcast.distributed.transport.staged import StagedWire
from narrowcast.distributed.transport.wire import Overtaken, Wire, WireError
from narrowcast.errors import MismatchError

T = TypeVar("T")

RECENT_TAGS = 8
"""So many orders of messages keep their wire and buffers while nothing is on its way in them."""

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, Group | Pair]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Group(Refusing):
    """The ranks of a group, for calls in one order.

    `tag` tells the order from others on the same connections, and its wire takes gloo's tags from `first` on.
    """

    def __init__(self, connections: Connections, tag: int, first: int, *, pair: bool = False) -> None:
        self.connections = connections
        self.name = connections.name
        self.device = connections.device
        self.nccl = connections.nccl
        self.rank = connections.rank
        self.ranks = connections.ranks
        self.buffers = Buffers()
        self._lane = Lane(f"narrowcast {self.name}", self.device)
        self.prepared: dict[object, object] = {}
        """What protocols keep for calls alike, made of the memory of one version of the buffers."""
        self.prepared_version = 0
        self._tag, self._first, self._pair = tag, first, pair
        self._wire: Wire | None = None
        self._generation = 0
        self._under_way = False
        """Whether a call is: maybe in the lane of another group."""
        connections.used_by(self)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def lane(self) -> Lane:
        return self._lane

    def carry(self, op: str, attempt: Callable[[Wire, int], T]) -> T:
        """Count a call and make it: `attempt(wire, number of the call)`. A failure raises the same error on every rank.

        An attempt is repeated on new connections, with the number negative, where the failure was another call's.
        """
        number = self._next_number()
        self._under_way = True
        try:
            return self._carry(op, attempt, number)
        finally:
            self._under_way = False

    def _carry(self, op: str, attempt: Callable[[Wire, int], T], number: int) -> T:
        cause: BaseException | None = None
        while True:
            self.connections.check(op, self._tag, number, cause)
            try:
                return attempt(self._connected(), number if cause is None else -number)
            except MismatchError:
                raise  # every rank came to it, and every message was read: the wire is as good as before
            except Overtaken:
                raise self.connections.failed_elsewhere(op) from cause
            except WireError as error:
                wire, cause = self._wire, error
                agreed = wire is not None and wire.agreed
                here, there = self.ranks[self.rank], self.ranks[error.peer]
                self._fail(Failure(error.kind, there, here, number, op, str(error), self._tag))
                self.connections.check(op, self._tag, number, cause)
                if agreed and not self.nccl:
                    raise self.connections.failed_elsewhere(op) from cause
                if isinstance(wire, NcclWire) and wire.trouble is not None:
                    self._tell_of_lost_calls(op, number, wire.told)
            except BaseException as error:
                self._fail(Failure.of(error, self.ranks[self.rank], number, op, self._tag))
                raise

    def _tell_of_lost_calls(self, op: str, number: int, told: bool) -> None:
        """Raise where calls before this one are lost on the stream: this one fails with them, on every rank.

        Not where it was the last one alone, and its `wait` has said so: then this call is repeated.
        """
        error = self.connections.failed_elsewhere(op)
        if not (told and isinstance(error.failure, Failure) and error.failure.number == number - 1):
            self._forget_old_wire()
            self._fail(Failure.of(error, self.ranks[self.rank], number, op, self._tag))
            raise error

    def agreed_before(self, call: Call) -> bool:
        """Whether ranks need not meet on the host for a call: over NCCL, where they have agreed on one alike."""
        wire = self._wire
        return isinstance(wire, NcclWire) and self._generation == self.connections.generation and wire.knows(call)

    def give_up(self, op: str, error: BaseException) -> None:
        """`refuse`, here and now, from a job of the lane."""
        number = self._next_number()
        self._forget_old_wire()
        self._fail(Failure.of(error, self.ranks[self.rank], number, op, self._tag))

    def break_off(self, op: str, error: BaseException) -> None:
        """Let the call that is under way in another thread, if one is, fail with this error, wherever it waits."""
        if self._under_way:
            number = self.connections.calls[self._tag]
            failure = Failure.of(error, self.ranks[self.rank], number, op, self._tag)
            self.connections.fail(self._generation, self._wire, failure)

    def close(self, reason: str, last_words: bytes) -> None:
        """Let go of the thread, the wire and the buffers."""
        wire, self._wire = self._wire, None
        if wire is not None and self._under_way:
            wire.close(last_words)
        self.lane.close(reason)
        if wire is not None:
            wire.retire()
        self.prepared.clear()
        self.buffers.clear()

    def _next_number(self) -> int:
        calls = self.connections.calls
        calls[self._tag] = calls.get(self._tag, 0) + 1
        return calls[self._tag]

    def _connected(self) -> Wire:
        """The wire, made anew where there is none on the connections of now."""
        self._forget_old_wire()
        if self._wire is None:
            gloo = self.connections.connected(self._generation)
            self._wire = self._on_device(GlooWire(gloo, self._first, ahead=not self._pair))
        return self._wire

    def _forget_old_wire(self) -> None:
        if self._generation != self.connections.generation:
            self._wire, self._generation = None, self.connections.generation

    def _on_device(self, host: GlooWire) -> Wire:
        if self.device.type != "cuda":
            return host
        if self.nccl:
            return NcclWire(host, self.connections.page(self._generation), self.device, pair=self._pair)
        return StagedWire(host)

    def _fail(self, failure: Failure) -> None:
        wire, self._wire = self._wire, None
        self.connections.fail(self._generation, wire, failure)
        if wire is not None:
            wire.retire()


class Pair:
    """Messages from one rank to another, with any number of tags."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self._alive: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[int, Group] = OrderedDict()

    def order_of(self, tag: int) -> Group:
        """The messages with this tag; over NCCL, those of all tags."""
        key = 0 if self.connections.nccl else tag
        with _lock:
            order = self._alive.get(key)
            if order is None:
                order = self._alive[key] = Group(self.connections, key, tags_of_messages(key), pair=True)
            self._recent[key] = order
            self._recent.move_to_end(key)
            if len(self._recent) > RECENT_TAGS:
                self._recent.popitem(last=False)
            return order


def group_for(group: dist.ProcessGroup, device: torch.device, purpose: object = "collectives") -> Group:
    """The ranks of a process group, for tensors on `device`. Each purpose has its own wire and order of calls."""
    with _lock:
        of_group = _known.setdefault(group, {})
        key = (purpose, device.type)
        if key not in of_group:
            first = tags_of_purpose(str(purpose))
            of_group[key] = Group(_shared(group, device) or _own(group, device, str(purpose)), first, first)
        return of_group[key]  # type: ignore[return-value]


def _shared(group: dist.ProcessGroup, device: torch.device) -> Connections | None:
    """The connections of other purposes, where this one may use them, too."""
    for key, known in _known[group].items():
        of_everyone = isinstance(key, tuple) and key[1:] == (device.type,)
        if isinstance(known, Group) and of_everyone and not known.nccl:
            return known.connections
    return None


def _own(group: dist.ProcessGroup, device: torch.device, purpose: str) -> Connections:
    """Connections for a purpose, and for those that come after it where they share them."""
    shared = not nccl_carries(group, device)
    return _connections(group, device, "" if shared else purpose, group.rank(), dist.get_process_group_ranks(group))


def pair_for(group: dist.ProcessGroup, device: torch.device, source: int, target: int, tag: int) -> Group:
    """The two ranks (by their numbers in the group) of messages from `source` to `target` with this tag."""
    with _lock:
        of_group = _known.setdefault(group, {})
        key = (source, target, device.type)
        if key not in of_group:
            everyone = dist.get_process_group_ranks(group)
            low, high = sorted((source, target))
            ranks, mine = [everyone[low], everyone[high]], int(group.rank() == high)
            of_group[key] = Pair(_connections(group, device, f"{source} to {target}", mine, ranks))
        pair = of_group[key]
    assert isinstance(pair, Pair)
    return pair.order_of(tag)


def subset_for(group: dist.ProcessGroup, device: torch.device, purpose: str, numbers: Sequence[int]) -> Group:
    """Some ranks of a process group, by their numbers in it, this one among them."""
    with _lock:
        of_group = _known.setdefault(group, {})
        key = (purpose, device.type, *numbers)
        if key not in of_group:
            everyone = dist.get_process_group_ranks(group)
            ranks, mine = [everyone[number] for number in numbers], numbers.index(group.rank())
            which = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()  # other ranks, another name
            first = tags_of_purpose(purpose)
            of_group[key] = Group(_connections(group, device, f"{purpose} {which}", mine, ranks), first, first)
        return of_group[key]  # type: ignore[return-value]


def last_device(group: dist.ProcessGroup) -> torch.device:
    """The device of the collectives of a group so far; of a new one, that of its backend."""
    with _lock:
        for known in reversed(_known.get(group, {}).values()):
            if isinstance(known, Group):
                return known.device
    return torch.device("cuda" if "cuda" in map(str, group._device_types) else "cpu")


def _connections(
    group: dist.ProcessGroup, device: torch.device, purpose: str, rank: int, ranks: list[int]
) -> Connections:
    return Connections(f"{group.group_name} {purpose or 'all'} {device.type}", group, device, rank, ranks)


def _forget_in_child() -> None:
    """A forked child has none of the threads that would close the parent's connections: leave all of it alone."""
    global _known, _lock
    for group in list(_known):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_known))
    _known, _lock = weakref.WeakKeyDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
