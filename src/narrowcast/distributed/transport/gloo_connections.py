"""One generation of gloo connections between the ranks of a group: what the wires on them share.

They are a process group of narrowcast's own, made from the store of the caller's group. Several wires may use them at
once, each with tags of its own. A rank that gives them up says why in a last message, for which every rank has posted a
receive from the start, and then breaks them: every peer that waits for this rank learns of it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.transport import agreement
from narrowcast.distributed.transport.gloo_messages import Message
from narrowcast.distributed.transport.wire import WireError

LAST_WORDS_BYTES = 2048
_LAST_WORDS, _NEVER_SENT = 1, 2  # tags; 0 and those from 3 on belong to wires

LEAVING_SECONDS = 1.0
"""How long the end of the process waits for threads that look for addresses: they do so every quarter of a second."""

_waiting: set[threading.Thread] = set()
"""The threads that gloo looks for addresses in."""
_ending = threading.Event()


class _Addresses(dist.Store):
    """A store for gloo to find its peers in, that answers for all of them with one request.

    gloo writes this rank's address as "0/rank", and asks for each of the others in turn, twice. (With
    GLOO_ENABLE_STORE_V2_API=1 it would ask once; but a variable of the whole process is not narrowcast's to set.)
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        super().__init__()
        self._store = store
        self._size = size
        self._at_once = bool(store.has_extended_api())  # type: ignore[attr-defined]
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)  # type: ignore[arg-type]

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        """Ask now and then: a store's own `wait` holds up what another thread has to say on the same connection."""
        if all(key in self._known for key in keys):
            return
        every = [each for key in keys for each in self._like(key)]
        deadline, pause = time.monotonic() + timeout.total_seconds(), 0.002
        _waiting.add(threading.current_thread())
        try:
            while not self._store.check(every):
                if time.monotonic() >= deadline:
                    raise RuntimeError("timed out: an address is missing")
                if _ending.is_set():
                    raise RuntimeError("the process ends")
                time.sleep(pause)
                pause = min(0.25, 2 * pause)
        finally:
            _waiting.discard(threading.current_thread())

    def get(self, key: str) -> bytes:
        if key not in self._known:
            keys = self._like(key)
            values = self._store.multi_get(keys) if self._at_once else [self._store.get(key)]
            self._known.update(zip(keys, values, strict=True))
        return self._known[key]

    def forget(self) -> None:
        """Let go of what was read: each of the addresses has some bytes for every rank."""
        self._known.clear()

    def has_extended_api(self) -> bool:
        return False

    def _like(self, key: str) -> list[str]:
        """The keys of all ranks, with which this one of a rank belongs."""
        prefix, _, rank = key.rpartition("/")
        if not self._at_once or not rank.isdigit():
            return [key]
        return [f"{prefix}/{each}" for each in range(self._size)]


class _User(Protocol):
    def give_up(self, error: WireError) -> None: ...


class Gloo:
    """The connections of one rank with all others of its group."""

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, connect_within: timedelta
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.timeout = timeout
        self.targets = [(rank + i) % self.size for i in range(1, self.size)]
        self.sources = [(rank - i) % self.size for i in range(1, self.size)]
        self._addresses = _Addresses(store, self.size)  # gloo does not keep it alive
        self._group: Any = dist.ProcessGroupGloo(self._addresses, rank, self.size, connect_within)
        self._addresses.forget()
        self._users: weakref.WeakSet[_User] = weakref.WeakSet()
        with torch.inference_mode(False):  # it outlives the call
            self._heard = torch.zeros(self.size, LAST_WORDS_BYTES, dtype=torch.uint8, device="cpu")
        self._listening = [self.receive(self._heard[peer], peer, _LAST_WORDS) for peer in self.sources]

    def send(self, row: Tensor, peer: int, tag: int, tail: bool = False) -> Message:
        return Message(self._group.send, row, peer, tag, self.timeout, tail)

    def receive(self, row: Tensor, peer: int, tag: int, tail: bool = False) -> Message:
        return Message(self._group.recv, row, peer, tag, self.timeout, tail)

    def look(self, peer: int) -> None:
        """Raise where the connection to a peer is broken (6)."""
        self.receive(torch.empty(1, dtype=torch.uint8, device="cpu"), peer, _NEVER_SENT)

    def used_by(self, user: _User) -> None:
        """Note a wire, whose waits are to end when the connections are given up."""
        self._users.add(user)

    def close(self, last_words: bytes = b"") -> None:
        """Say why, and break every connection."""
        words = torch.zeros(LAST_WORDS_BYTES, dtype=torch.uint8, device="cpu")
        if last_words:
            words[: len(last_words)] = agreement.as_tensor(last_words)
        for peer in self.targets:
            with contextlib.suppress(WireError):  # it may be the one that is gone
                self.send(words, peer, _LAST_WORDS)
        for peer in self.sources:  # a wait that runs into its time limit breaks all of them (4)
            with contextlib.suppress(WireError):
                self.receive(words[:1], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        for user in list(self._users):
            user.give_up(WireError(self.rank, "the connections were closed", "gone"))

    def last_words(self, peer: int) -> bytes:
        """The reason that a peer gave when it broke the connections; nothing from one that gave none."""
        return self._heard[peer].numpy().tobytes().rstrip(b"\0")


@atexit.register
def _end_waits() -> None:
    """Let threads out of gloo before the interpreter ends, which ends them where they are next in Python: below the
    C++ of gloo that aborts the process."""
    threads = _waiting - {threading.current_thread()}
    _ending.set()
    deadline = time.monotonic() + LEAVING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
