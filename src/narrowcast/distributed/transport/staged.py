"""Rows on a CUDA device, over gloo: they cross to pinned host memory and travel from there.

The codec runs on the GPU, so only encoded bytes cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from narrowcast.distributed.transport.agreement import Header
from narrowcast.distributed.transport.buffers import Buffers
from narrowcast.distributed.transport.gloo import GlooWire


class StagedWire:
    """`Wire` for rows on a CUDA device, on top of one for host memory."""

    in_advance = 0
    together = False

    def __init__(self, host: GlooWire) -> None:
        self.host = host
        self.rank, self.size = host.rank, host.size
        self.turns, self.eager, self.chunks = host.turns, host.eager, host.chunks
        self._buffers = Buffers()
        self._sent = self._expected = 0

    def agree(
        self,
        header: Header,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
        *,
        in_advance: bool = False,
    ) -> None:
        def fetched(peer: int) -> Tensor | None:
            row = eager(peer)
            return None if row is None else row.cpu()

        self.host.agree(header, fetched, incoming, meanwhile)

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        sizes = [len(row) for row in incoming]
        self._expected += 1
        twins = self._pinned(f"inbox {self._expected % (2 * self.chunks)}", sum(sizes)).split(sizes)
        arrivals = self.host.expect(twins, stage)

        def delivered() -> Iterator[int]:
            for peer in arrivals():
                incoming[peer].copy_(twins[peer])
                yield peer

        return delivered

    def send(self, row: Tensor, peers: Sequence[int], stage: int = 0) -> None:
        self._sent += 1
        twin = self._pinned(f"outbox {self._sent % self.turns}", len(row))
        self.host.send(twin.copy_(row), peers, stage)

    def flush(self) -> None:
        self.host.flush()
        self._sent = self._expected = 0  # all have been sent: the next call starts with the same buffers

    def trim(self) -> None:
        if self._buffers.trim():
            release_pinned()

    @property
    def agreed(self) -> bool:
        return self.host.agreed

    def close(self, last_words: bytes = b"") -> None:
        self.host.close(last_words)

    def last_words(self, peer: int) -> bytes:
        return self.host.last_words(peer)

    def retire(self) -> None:
        self.host.retire()
        self._buffers.clear()

    def _pinned(self, name: str, nbytes: int) -> Tensor:
        return self._buffers.take(name, nbytes, torch.device("cpu"), pinned=True)


def release_pinned() -> None:
    """Give pinned memory that nobody uses back to the system: torch keeps it for later, and would never do so."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
