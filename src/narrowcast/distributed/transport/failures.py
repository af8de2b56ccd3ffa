"""Failures, and the store of a process group as the board on which its ranks write them down.

A store lives in one of the processes, which may be stopped or dead. So nothing here waits for it without a limit, and
what it does not answer is treated as not known.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from narrowcast.errors import CollectiveError, MismatchError

T = TypeVar("T")

RECORD_BYTES = 2048
"""A failure is written down in so many bytes at most."""

ASKING_SECONDS = 0.3
"""How long a rank that is suspected has to show that it waits for another. With a short timeout one that is late has
3% of it: what is raised at the timeout is to be raised within a tenth of it, and the store takes up to 5%."""

LOOK_SECONDS, LOOKS = 0.25, 100.0
"""The time between two looks of a rank that connects at whether others could not: for many ranks it is longer, so that
there are not more looks a second than this in all."""

RARE_LOOK_SECONDS = 0.5
"""The longest time between two looks at the store, while others do not come. (`wait` of a store would hold up whoever
else has something to say on the same connection, and torch warns when its time is over.)"""

_NEWS, _MET, _FAILED = "news", "met", "failed"
"""The key that is set once, when all ranks have come or when one has failed, and what it then says. Whichever is first
holds for all ranks: were each to look by itself, one could wait for the address of another that has left."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, as the first rank that noticed wrote it down."""

    kind: str
    """"raised", "mismatch" (in another phase of the call), "late", "gone", "unmet" (not all ranks came to connect) or
    "unconnected" (they came, and could not)."""
    rank: int
    seen_by: int
    number: int
    """The call, as its lane counts."""
    op: str
    reason: str
    tag: int = 0
    """Of the message, where it was one."""

    @classmethod
    def of(cls, error: BaseException, rank: int, number: int, op: str, tag: int = 0) -> Failure:
        """What `error` on a rank means for a call; one that another rank caused stays that rank's."""
        known = getattr(error, "failure", None)
        if isinstance(known, Failure):
            return replace(known, number=number, op=op, tag=tag)
        if isinstance(error, MismatchError):
            return cls("mismatch", rank, rank, number, op, str(error), tag)
        return cls("raised", rank, rank, number, op, f"{type(error).__name__}: {error}", tag)

    def to_bytes(self, most: int = RECORD_BYTES) -> bytes:
        """At most so many bytes, in which the reason is cut as needed."""
        fields, reason = asdict(self), self.reason
        while True:
            fields["reason"] = reason
            data = json.dumps(fields).encode()
            if len(data) <= most or not reason:
                return data
            reason = reason[: max(0, len(reason) - 1 - (len(data) - most) // 12)]  # a character takes 12 bytes at most

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        return cls(**json.loads(data))

    def covers(self, tag: int, number: int) -> bool:
        """Whether call `number` of a tag is the one that failed, or one before it, which was given up with it."""
        return tag == self.tag and number <= self.number

    def error(self, op: str, timeout: timedelta) -> CollectiveError:
        """What to raise in a call of that name."""
        kind, text = CollectiveError, self.message(op, timeout)
        if self.kind == "mismatch":
            kind, text = MismatchError, self.reason
        error = kind(text)
        error.failure = self
        return error

    def message(self, op: str, timeout: timedelta) -> str:
        where, limit = op if op == self.op else f"{op} (after {self.op})", f"{timeout.total_seconds():g} s"
        if self.kind == "raised":
            return f"{where}: rank {self.rank} failed in it: {self.reason}. The other ranks gave it up, too."
        if self.kind == "late":
            return (
                f"{where}: rank {self.rank} did not answer rank {self.seen_by} within {limit}, "
                f"the timeout of the group ({self.reason}). It is stopped, busy, or makes other calls. If it only "
                "needs longer, pass a longer timeout= to init_process_group()."
            )
        if self.kind == "unmet":
            return (
                f"{where}: no connection within {limit}, the timeout of the group, as rank {self.seen_by} saw: "
                f"{self.reason}. Every rank of a group must make the same calls in the same order."
            )
        if self.kind == "unconnected":
            return (
                f"{where}: no connections, though all ranks came to make them, as rank {self.seen_by} saw: "
                f"{self.reason}. If a rank is gone, its own output says why."
            )
        return (
            f"{where}: rank {self.rank} is gone, as rank {self.seen_by} saw ({self.reason}). Its own output says why. "
            "This group cannot go on: start the job again, or make a new group of the ranks that are left."
        )


def attempt() -> str:
    """Which start of its ranks this is, where torchrun starts them again: the store of before goes on.

    Known on one host. On several, torchrun counts the starts of each by itself.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"


class Board:
    """What the ranks of a group tell each other through their store."""

    def __init__(self, prefix: str, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self.prefix = prefix
        self.rank = rank
        self.ranks = ranks
        self.seconds = timeout.total_seconds()
        self.look_seconds = max(LOOK_SECONDS, len(ranks) / LOOKS)
        self._answering = min(4 * self.look_seconds, 0.05 * self.seconds)
        """How long ranks have to show that they are there, when one could not connect."""
        self._looking = threading.Lock()
        self._groups = weakref.ref(store)  # the group's own, whose end is the group's end
        self._store: dist.Store | None = None

    def page(self, generation: int) -> dist.PrefixStore:
        """Where one generation of connections is arranged. The first use opens a connection to the store."""
        if self._store is None:
            groups: Any = self._groups()
            if groups is None:
                raise RuntimeError("the process group was destroyed")
            self._store = dist.PrefixStore(self.prefix, groups.clone())
        return dist.PrefixStore(str(generation), self._store)

    def meet(self, generation: int, closing: threading.Event) -> str:
        """Wait until all ranks are here; otherwise say why not. What went wrong for others ends it early.

        Ranks are counted as they come, and the last one tells the others. So a rank makes a handful of requests to the
        store, however many ranks there are; more where it waits for long. Only when the time is almost over does it ask
        who is missing.
        """
        over = threading.Event()
        missing: list[int] = []
        verdicts: list[str] = []
        deadline = time.monotonic() + self.seconds
        late = deadline - min(1.0, 0.1 * self.seconds)

        def look() -> None:
            pause = 0.001
            with contextlib.suppress(RuntimeError):
                page = self.page(generation)
                if over.is_set():
                    return
                page.set(f"here/{self.ranks[self.rank]}", "1")
                if page.add("arrived", 1) == len(self.ranks):
                    page.compare_set(_NEWS, "", _MET)
                while not page.check([_NEWS]):
                    if time.monotonic() >= late:
                        missing[:] = _without(page, "here", self.ranks)
                    over.wait(pause)
                    if over.is_set():
                        return
                    pause = min(RARE_LOOK_SECONDS, 1.5 * pause, max(0.05, late - time.monotonic()))
                verdicts.append("" if page.get(_NEWS) == _MET.encode() else "the other ranks gave up")

        looking = threading.Thread(target=look, name="narrowcast store", daemon=True)
        looking.start()
        while looking.is_alive() and not closing.is_set() and time.monotonic() < deadline:
            looking.join(min(0.1, max(0.0, deadline - time.monotonic())))
        over.set()
        looking.join(0.1)
        if verdicts:
            return verdicts[0]
        if missing:
            if self._briefly(lambda: self.page(generation).compare_set(_NEWS, "", _FAILED), b"", 0.0) == _MET.encode():
                return ""  # the last one came in the last moment, and goes on
            return f"{_named(missing)} did not come"
        return "the store of the group does not answer"

    def given_up(self, generation: int) -> bool | None:
        """Whether another rank could not connect; this one shows that it is there. None: the store does not answer."""

        def look() -> bool | None:
            if not self._looking.acquire(blocking=False):
                return None  # the last look has no answer yet: another one would leave one more thread
            try:
                page = self.page(generation)
                if page.check(["unconnected"]):
                    here = self.ranks[self.rank]
                    page.set(f"saw/{here}", Failure("unconnected", here, here, 0, "", "").to_bytes().decode())
                return bool(page.check(["failure"]))
            finally:
                self._looking.release()

        return self._briefly(look, None, 0.0)

    def report(self, generation: int, failure: Failure) -> Failure:
        """Write a failure down; returns the first one that was. One that is only suspected is looked into first."""
        asking, longer = 0.0, 0.0
        if failure.seen_by == self.ranks[self.rank]:
            asking = {"late": min(ASKING_SECONDS, 0.03 * self.seconds), "gone": ASKING_SECONDS}.get(failure.kind, 0.0)
            late = min(self._answering, 0.05 * self.seconds - asking)
            longer = {"late": late, "gone": self._answering, "unconnected": self._answering}.get(failure.kind, 0.0)

        def write() -> bytes:
            page, believed = self.page(generation), failure
            if asking + longer and not page.check(["failure"]):
                believed = self._traced(page, failure, asking, longer)
            first = bytes(page.compare_set("failure", "", believed.to_bytes().decode()))
            page.compare_set(_NEWS, "", _FAILED)
            return first

        return Failure.from_bytes(self._briefly(write, failure.to_bytes(), asking + longer))

    def _traced(self, page: dist.PrefixStore, failure: Failure, asking: float, answering: float) -> Failure:
        """What the suspected rank suspects, and so on.

        Ranks that wait for each other run out of time together, and gloo closes the connections of one that did: to
        those that wait for it, it is late or gone, but it is not to blame.
        """
        page.set(f"saw/{failure.seen_by}", failure.to_bytes().decode())
        time.sleep(asking)
        chain = [failure]
        while chain[-1].kind != "unconnected" and page.check([f"saw/{chain[-1].rank}"]):
            chain.append(Failure.from_bytes(page.get(f"saw/{chain[-1].rank}")))
            if chain[-1].kind != "unconnected" and chain[-1].rank in [link.seen_by for link in chain]:
                return failure  # they suspect each other
        if chain[-1].kind != "unconnected":
            return chain[-1]
        return self._unheard(page, replace(failure, kind="unconnected", rank=failure.seen_by), answering)

    def _unheard(self, page: dist.PrefixStore, failure: Failure, answering: float) -> Failure:
        """A rank could not connect: who does not show that it is there, of those who came to do so?"""
        page.set("unconnected", "1")
        start, silent = time.monotonic(), self.ranks
        while (seconds := time.monotonic() - start) < answering and not page.check(["failure"]):
            time.sleep(self.look_seconds / 5)
            silent = _without(page, "saw", self.ranks)
            if len(silent) <= 1 and seconds > 2 * self.look_seconds:
                break
        if not silent or answering < 2 * self.look_seconds:
            return failure  # some may not have looked
        return replace(failure, reason=f"{failure.reason}, and nothing of {_named(silent)} since")

    def _briefly(self, action: Callable[[], T], otherwise: T, longer: float) -> T:
        results: list[T] = []

        def attempt() -> None:
            with contextlib.suppress(Exception):
                results.append(action())

        thread = threading.Thread(target=attempt, name="narrowcast store", daemon=True)
        thread.start()
        thread.join(longer + min(0.5, 0.05 * self.seconds))
        return results[0] if results else otherwise


def _without(page: dist.PrefixStore, key: str, ranks: Sequence[int]) -> Sequence[int]:
    """Who of these has not set a key: by halves, since most have."""
    if page.check([f"{key}/{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return ranks
    half = len(ranks) // 2
    return [*_without(page, key, ranks[:half]), *_without(page, key, ranks[half:])]


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
