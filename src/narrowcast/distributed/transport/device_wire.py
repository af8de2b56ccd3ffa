"""Bytes between ranks that live on CUDA devices.

Two ways, both with the interface of `Wire`:

- `StagedWire`, over gloo: encoded rows cross to pinned host memory and travel from there. The codec runs on the GPU, so
  only encoded bytes cross.
- `NcclWire`, over NCCL: rows go from device to device in one grouped send and receive, on the lane's stream. A header
  over gloo would make every call wait for the host, so ranks agree on a call's arguments the first time each set of
  them is used; with NARROWCAST_DEBUG=1, every time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.transport.buffers import Arena
from narrowcast.distributed.transport.wire import HostWire


class StagedWire:
    """A host wire for rows on a CUDA device."""

    def __init__(self, host: HostWire, device: torch.device) -> None:
        self.host = host
        self.rank, self.size = host.rank, host.size
        self.turns, self.eager, self.pieces = host.turns, host.eager, host.pieces
        self._device = device
        self._arena = Arena()
        self._sent = self._expected = 0

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        def fetched(peer: int) -> Tensor | None:
            row = eager(peer)
            return None if row is None else row.cpu()

        self.host.agree(header, fetched, incoming, meanwhile)

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        sizes = [len(row) for row in incoming]
        self._expected += 1
        twins = self._pinned(f"inbox {self._expected % (2 * self.pieces)}", sum(sizes)).split(sizes)
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
        if self._arena.trim():
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
        self._arena.clear()

    def _pinned(self, name: str, nbytes: int) -> Tensor:
        return self._arena.take(name, nbytes, torch.device("cpu"), pinned=True)


class NcclWire:
    """NCCL for rows, gloo for agreement."""

    eager = 0
    pieces = 1

    def __init__(self, control: HostWire, store: dist.Store) -> None:
        self.control = control
        self.rank, self.size = control.rank, control.size
        self.turns = self.size
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = control.gloo.timeout
        self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), self.rank, self.size, options)
        self._agreed: set[bytes] = set()
        self._outgoing: dict[int, Tensor] = {}
        self._always = os.environ.get("NARROWCAST_DEBUG", "0") not in ("", "0")

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        meanwhile()
        unnumbered = bytes(header[8:].numpy())
        if self._always or unnumbered not in self._agreed:
            self.control.agree(header, lambda peer: None, [header[:0]] * self.size)
            self._agreed.add(unnumbered)

    def expect(self, incoming: Sequence[Tensor], stage: int = 0) -> Callable[[], Iterator[int]]:
        def arrivals() -> Iterator[int]:
            nothing = incoming[0][:0]
            into = [row if peer != self.rank else nothing for peer, row in enumerate(incoming)]
            rows = [self._outgoing.pop(peer, nothing) for peer in range(self.size)]
            self._group.alltoall(into, rows).wait()  # makes the stream wait, not the host
            yield from (peer for peer in range(self.size) if peer != self.rank)

        return arrivals

    def send(self, row: Tensor, peers: Sequence[int], stage: int = 0) -> None:
        self._outgoing.update(dict.fromkeys(peers, row))  # they all go when the rows of the others are asked for

    def flush(self) -> None:
        self.control.flush()

    def trim(self) -> None:
        pass

    @property
    def agreed(self) -> bool:
        return self.control.agreed

    def close(self, last_words: bytes = b"") -> None:
        self.control.close(last_words)
        self._group.abort()

    def last_words(self, peer: int) -> bytes:
        return self.control.last_words(peer)

    def retire(self) -> None:
        self.control.retire()


def release_pinned() -> None:
    """Give pinned memory that nobody uses back to the system: torch keeps it for later, and would never do so."""
    release = getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()
