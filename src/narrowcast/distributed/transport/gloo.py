"""Rows in host memory, over gloo.

Receives have room for a header and an eager row, or for a statement (agreement.py), which takes the place of the next
header: gloo lets a message be shorter than its receive, and aborts the process on one that is longer, which is why
ranks agree on sizes first. Rows that leave before they do have receives with room for the longest of any call. If ranks
disagree, each knows by the headers who sent such rows and waits for some: those who did neither take rows that nobody
wants, and answer receives that nobody has rows for. So nothing stays behind that a later call could meet.

A rank sends to rank+1 first, then to rank+2 and so on, so that at any time ranks send to different ones. At most
`ROUNDS` rows to each peer are under way before one is waited for: a link stays busy while its rank encodes, sums
or decodes. bench/wire.py compares it with gloo's own collectives.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrowcast.distributed.transport import agreement
from narrowcast.distributed.transport.agreement import Header
from narrowcast.distributed.transport.gloo_connections import Gloo
from narrowcast.distributed.transport.gloo_messages import Message, Watch
from narrowcast.distributed.transport.wire import IN_ADVANCE, Overtaken, WireError

EAGER = 128 * 1024
"""Rows of up to so many bytes travel with the header. Of 64, 128 and 256 KB, tried on 32 MB at 1 Gbit/s with
bench/wire.py, 128 was best by 1 to 4%, which is hardly more than the noise."""

SHORT = 14_000
"""Messages of up to so many bytes, ten packets, leave at once on a connection that is idle: such a message has come
whole, or has not begun. Longer rows have a tail (gloo_messages.py). A thread that waits for them instead took eight
ranks on two cores a fifth of the time of an all_reduce."""

IN_ADVANCE_BYTES = 1 << 20
"""Rows of up to so many bytes may leave while ranks agree: those of two_stage.py's chunks."""

ROUNDS = 3
"""To each peer, so many rows may be on their way."""

_HEADERS, _ROWS = 0, 1
_EARLY_ROWS = _ROWS + IN_ADVANCE
"""Kinds of messages: headers have a wire's first tag of gloo's, rows of stage s its `_ROWS + s`th after that."""

_FIRST_TAG = 8
"""Those before it belong to the connections. A tag of gloo's is a 31-bit number."""


def tags_of_purpose(purpose: str) -> int:
    """The first tag of gloo's for a wire with this purpose: the same on all ranks, whichever they make first."""
    number = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=4).digest(), "little")
    return _FIRST_TAG + 4 * (number % (1 << 28))


def tags_of_messages(tag: int) -> int:
    """The first tag of gloo's for messages with this tag (below arguments.MOST_TAG), which have no second stage."""
    return _FIRST_TAG + 2 * tag


class GlooWire:
    """`Wire` for rows in host memory.

    Its tags of gloo's, from `first` on, set its messages apart from those of other wires on the same connections. One
    that comes and goes posts no receives `ahead`, for the headers of a next call.
    """

    chunks = 4
    eager = EAGER
    together = False

    def __init__(self, gloo: Gloo, first: int = _FIRST_TAG, *, ahead: bool = True) -> None:
        self.gloo = gloo
        self.rank = gloo.rank
        self.size = gloo.size
        self.agreed = False
        self._first, self._ahead = first, ahead
        room = max(agreement.HEADER_BYTES + EAGER, agreement.statement_bytes(self.size))
        with torch.inference_mode(False):  # it outlives the call
            self._slots = torch.empty(2, self.size, room, dtype=torch.uint8, device="cpu")
        self._headers: list[Message] = []
        self._early: list[Message] = []
        """Receives of rows in advance, from `expect` to the end of `agree`."""
        self._has_agreed = False
        self._window = ROUNDS * (self.size - 1)
        self.turns = self._window + 1
        self._going = Watch("narrowcast going", gloo.look)
        self._coming = Watch("narrowcast coming", gloo.look)
        gloo.used_by(self)

    def agree(
        self,
        header: Header,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
        *,
        in_advance: bool = False,
    ) -> None:
        self.agreed = False
        headers = self._trade(header.data_in_advance if in_advance else header.data, eager, incoming, meanwhile)
        early, self._early = self._early, []
        while overtaken := agreement.overtaken(headers):
            if self.rank in overtaken:
                self.flush()
                raise Overtaken
            headers = self._trade(header.data, eager, incoming)  # they raise, and make the call that is made here
        if not agreement.fit(headers):
            self._clear_early_rows(early, agreement.in_advance(headers))
            statements = self._trade(header.statement(), lambda peer: None, [header.data[:0]] * self.size)
            self.flush()  # the others are to read the same, even if this process ends with it
            raise agreement.mismatch(statements, self.gloo.ranks)
        self.agreed = self._has_agreed = True

    @property
    def in_advance(self) -> int:
        """Not before ranks have agreed once: until then one may repeat a call, and be overtaken. All know it alike."""
        return IN_ADVANCE_BYTES if self._ahead and self._has_agreed else 0

    def _clear_early_rows(self, early: Sequence[Message], senders: Sequence[int]) -> None:
        """Take all rows in advance off the connections: those of `senders`, which wait for one from every rank."""
        messages = list(early)
        if not early:
            unread = torch.empty(IN_ADVANCE_BYTES, dtype=torch.uint8, device="cpu")
            for peer in senders:
                self._going.add(self._send(unread[:1], peer, _EARLY_ROWS))
                messages.append(self._receive(unread, peer, _EARLY_ROWS))
        for message in messages:
            message.wait()
        self.flush()

    def _trade(
        self,
        data: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> npt.NDArray[np.uint8]:
        """Send `data` to every rank, with small rows along; returns what all ranks sent, as large as `data` is."""
        self._going.wait()  # the headers of the last call lie where those of this one are to be
        length, (outgoing, came) = len(data), self._slots
        receives, self._headers = self._headers or self._expect_headers(), []
        outgoing[:, :length] = data
        for peer in self.gloo.targets:
            row = eager(peer)
            total = length
            if row is not None:
                total += len(row)
                outgoing[peer, length:total] = row
            self._going.add(self._send(outgoing[peer, :total], peer, _HEADERS))
        meanwhile()
        for message in receives:
            along = len(incoming[message.peer])
            if length + (along if along <= EAGER else 0) <= SHORT:
                message.wait()
            else:
                self._coming.add(message)
                self._coming.wait()
        came[self.rank, :length] = data
        everyone: npt.NDArray[np.uint8] = came[:, :length].numpy().copy()
        for peer in self.gloo.sources:
            row = incoming[peer]
            if 0 < len(row) <= EAGER:
                row.copy_(came[peer, length : length + len(row)])
        # Those of the next call: a peer that is early need not ask first. One that has all it needs may have left; if
        # there is a next call, that one says so.
        if self._ahead:
            with contextlib.suppress(WireError):
                self._headers = self._expect_headers()
        return everyone

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        receives = [self._receive(incoming[peer], peer, _ROWS + stage) for peer in self.gloo.sources]
        if stage == IN_ADVANCE:
            self._early = receives

        def arrivals() -> Iterator[int]:
            if any(len(row) for row in incoming):
                self._going.begin()
            for receive in receives:
                receive.wait()
                yield receive.peer

        return arrivals

    def send(self, row: Tensor, peers: Sequence[int], stage: int = 0) -> None:
        for peer in peers:
            self._going.wait(self._window - 1)
            self._going.add(self._send(row, peer, _ROWS + stage))

    def flush(self) -> None:
        self._going.wait()

    def trim(self) -> None:
        pass

    def close(self, last_words: bytes = b"") -> None:
        self.gloo.close(last_words)

    def last_words(self, peer: int) -> bytes:
        return self.gloo.last_words(peer)

    def give_up(self, error: WireError) -> None:
        """Let whoever waits for a message raise, in whatever thread it is."""
        for watch in (self._going, self._coming):
            watch.give_up(error)

    def retire(self) -> None:
        for watch in (self._going, self._coming):
            watch.close()

    def _expect_headers(self) -> list[Message]:
        return [self._receive(self._slots[1, peer], peer, _HEADERS) for peer in self.gloo.sources]

    def _send(self, row: Tensor, peer: int, kind: int) -> Message:
        return self.gloo.send(row, peer, self._first + kind, _has_tail(row, kind))

    def _receive(self, row: Tensor, peer: int, kind: int) -> Message:
        return self.gloo.receive(row, peer, self._first + kind, _has_tail(row, kind))


def _has_tail(row: Tensor, kind: int) -> bool:
    return kind == _EARLY_ROWS or (kind >= _ROWS and row.numel() > SHORT)
