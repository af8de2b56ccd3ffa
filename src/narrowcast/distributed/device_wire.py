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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.arena import Arena
from narrowcast.distributed.wire import HostWire


class StagedWire:
    """A host wire for rows on a CUDA device."""

    def __init__(self, host: HostWire, device: torch.device) -> None:
        self.host = host
        self.rank, self.size = host.rank, host.size
        self.turns, self.eager = host.turns, host.eager
        self._device = device
        self._arena = Arena()
        self._expected: deque[tuple[Sequence[Tensor], Sequence[Tensor]]] = deque()

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], None],
    ) -> None:
        def fetched(peer: int) -> Tensor | None:
            row = eager(peer)
            return None if row is None else row.cpu()

        self.host.agree(header, fetched, incoming, meanwhile)

    def expect(self, incoming: Sequence[Tensor]) -> None:
        sizes = [len(row) for row in incoming]
        twins = self._pinned(f"inbox {len(self._expected)}", sum(sizes)).split(sizes)
        self._expected.append((incoming, twins))
        self.host.expect(twins)

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], arrived: Callable[[int], None], at_once: bool = False
    ) -> None:
        incoming, twins = self._expected.popleft()

        def fetched(peer: int, turn: int) -> Tensor:
            row = outgoing(peer, turn)
            twin = self._pinned(f"outbox {turn if at_once else turn % self.turns}", len(row))
            return twin.copy_(row)  # blocks until the row is here

        def delivered(peer: int) -> None:
            if peer != self.rank:
                incoming[peer].copy_(twins[peer], non_blocking=True)
            arrived(peer)

        self.host.rounds(fetched, delivered, at_once)
        torch.cuda.current_stream(self._device).synchronize()  # the pinned memory is used again by the next call

    def close(self, last_words: bytes = b"") -> None:
        self.host.close(last_words)

    def last_words(self, peer: int) -> bytes:
        return self.host.last_words(peer)

    def retire(self) -> None:
        self.host.retire()

    def leak(self) -> None:
        self.host.leak()

    def _pinned(self, name: str, nbytes: int) -> Tensor:
        return self._arena.take(name, nbytes, torch.device("cpu"), pinned=True)


class NcclWire:
    """NCCL for rows, gloo for agreement."""

    eager = 0

    def __init__(self, control: HostWire, store: dist.Store) -> None:
        self.control = control
        self.rank, self.size = control.rank, control.size
        self.turns = self.size
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = control.timeout
        self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), self.rank, self.size, options)
        self._agreed: set[bytes] = set()
        self._expected: deque[Sequence[Tensor]] = deque()
        self._always = os.environ.get("NARROWCAST_DEBUG", "0") not in ("", "0")

    def agree(
        self,
        header: Tensor,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], None],
    ) -> None:
        meanwhile()
        unnumbered = bytes(header[8:].numpy())
        if self._always or unnumbered not in self._agreed:
            self.control.agree(header, lambda peer: None, [header[:0]] * self.size, lambda: None)
            self._agreed.add(unnumbered)

    def expect(self, incoming: Sequence[Tensor]) -> None:
        self._expected.append(incoming)

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], arrived: Callable[[int], None], at_once: bool = False
    ) -> None:
        incoming = self._expected.popleft()
        order = [(self.rank + i) % self.size for i in range(1, self.size)]
        rows = [incoming[self.rank][:0]] * self.size
        for turn, peer in enumerate(order):
            rows[peer] = outgoing(peer, turn)
        into = [row if peer != self.rank else row[:0] for peer, row in enumerate(incoming)]
        self._group.alltoall(into, rows).wait()  # makes the stream wait, not the host
        for peer in (self.rank, *order):
            arrived(peer)

    def close(self, last_words: bytes = b"") -> None:
        self.control.close(last_words)
        self._group.abort()

    def last_words(self, peer: int) -> bytes:
        return self.control.last_words(peer)

    def retire(self) -> None:
        self.control.retire()

    def leak(self) -> None:
        self.control.leak()
