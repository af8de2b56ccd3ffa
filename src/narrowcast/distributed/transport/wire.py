"""The contract by which rows move between the ranks of a group, in order.

A `Wire` connects every rank of a group with every other. One lane owns it, and one thread at a time uses it:

    open ----agree----> agreed ----expect, send----> agreed ----flush----> open
      |                   |                                                 (the next call)
      |                   +--MismatchError: nothing was delivered; the wire stays open
      +--WireError at any point: broken. `close` tells the peers why; `last_words` has what a peer told.

- `agree` compares headers with every rank. A row of up to `eager` bytes rides along with the header, so that a small
  tensor takes one trip. No row is delivered before all ranks agree.
- A row of up to `in_advance` bytes may leave for each peer while headers are on their way: in the `meanwhile` of an
  `agree` that is told so come `expect` of stage `IN_ADVANCE`, with room for so many bytes whatever the call is, and
  `send` of that stage, once to every peer. Where ranks do not agree, the wire takes such rows off the connections.
- `send` and `expect` move rows. Rows of one stage to one peer arrive in the order in which they were sent, each with
  the size that was expected. A row of no bytes is neither sent nor awaited.
- `flush` ends every collective: all rows of this rank have left it, and their memory may be used again.
- `close` breaks every connection, so that peers that wait for this rank learn of a failure at once.

Every wait ends: with the row, or with a `WireError` that names the peer, within the timeout of the group.
tests/distributed/transport/test_wire_contract.py is the conformance suite that every implementation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from narrowcast.distributed.transport.agreement import Header

IN_ADVANCE = 2
"""The stage of rows that leave while ranks agree."""


class WireError(Exception):
    """A message did not go through. It never leaves this package: `Group` says what it means for the collective."""

    def __init__(self, peer: int, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.peer = peer
        self.kind = kind
        """What it says of the peer: "late" or "gone"; where no connection was made, "unmet" or "unconnected"."""


class Overtaken(Exception):
    """This rank repeats a call, after a failure elsewhere, that another rank has done with: it is over here, too."""


class Wire(Protocol):
    """A connection of every rank of a group with every other."""

    rank: int
    size: int
    turns: int
    """A row that is sent may change again after so many more rows, counted by peer."""
    chunks: int
    """How many chunks of a tensor may be under way at a time."""
    eager: int
    """Rows of up to so many bytes travel with the header."""
    together: bool
    """Whether all rows leave at the same time, so that they may as well be made together: a `TogetherWire`."""

    @property
    def in_advance(self) -> int:
        """Rows of up to so many bytes may leave while ranks agree on the next call; 0: none may."""

    @property
    def agreed(self) -> bool:
        """Whether ranks have agreed on the call that is under way, so that rows may be."""

    def agree(
        self,
        header: Header,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
        *,
        in_advance: bool = False,
    ) -> None:
        """Compare headers with every rank; raise `MismatchError` where they do not fit together, or `Overtaken`.

        `eager(peer)` is the row that rides along to that peer, or None. `meanwhile` is called while headers are on
        their way: with `in_advance`, it sends rows. Rows of `incoming` that are small enough to have come along are
        filled.
        """

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        """Say where the next row of each peer goes. The earlier this is said, the better.

        Calling what is returned gives the peers one by one, as their rows arrive.
        """

    def send(self, row: Tensor, peers: Sequence[int], stage: int = 0) -> None:
        """Start sending a row to some peers. It must not change until `turns` more rows have been sent."""

    def flush(self) -> None:
        """Wait until all headers and rows have left this rank."""

    def trim(self) -> None:
        """Give back large buffers, once a collective is over."""

    def close(self, last_words: bytes = b"") -> None:
        """Break every connection; `last_words` is the reason that peers read."""

    def last_words(self, peer: int) -> bytes:
        """The reason that a peer gave when it broke the connections; empty from one that gave none."""

    def retire(self) -> None:
        """Let go of threads and buffers, once nothing is on its way any more."""


Exchange = Sequence[tuple[int, list[Tensor], list[Tensor]]]
"""An exchange as it was prepared: which communicator takes what from whom, and gives what to whom."""


class TogetherWire(Wire, Protocol):
    """A wire whose rows all leave together."""

    def prepare(self, rows: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        """An exchange that may be made many times: `rows[peer]` for that of every peer, which goes `into[peer]`."""

    def exchange(self, prepared: Exchange) -> None:
        """Make it. The current stream waits for it, not the host."""

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place, as this network does it: all get the same bits. Waits as above."""
