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

    def agree(
        self, header: Tensor, eager: Callable[[int], Tensor | None], meanwhile: Callable[[], None]
    ) -> Sequence[Tensor]:
        def fetched(peer: int) -> Tensor | None:
            row = eager(peer)
            return None if row is None else row.cpu()

        return self.host.agree(header, fetched, meanwhile)

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], incoming: Sequence[Tensor], arrived: Callable[[int], None]
    ) -> None:
        sizes = [len(row) for row in incoming]
        inbox = self._pinned("inbox", sum(sizes)).split(sizes)

        def fetched(peer: int, turn: int) -> Tensor:
            row = outgoing(peer, turn)
            twin = self._pinned(f"outbox {turn % self.turns}", len(row))
            return twin.copy_(row)  # blocks until the row is here

        def delivered(peer: int) -> None:
            incoming[peer].copy_(inbox[peer], non_blocking=True)
            arrived(peer)

        self.host.rounds(fetched, inbox, delivered)
        torch.cuda.current_stream(self._device).synchronize()  # the pinned memory is used again by the next call

    def close(self) -> None:
        self.host.close()

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
        self._always = os.environ.get("NARROWCAST_DEBUG", "0") not in ("", "0")

    def agree(
        self, header: Tensor, eager: Callable[[int], Tensor | None], meanwhile: Callable[[], None]
    ) -> Sequence[Tensor]:
        meanwhile()
        unnumbered = bytes(header[8:].numpy())
        if self._always or unnumbered not in self._agreed:
            self.control.agree(header, lambda peer: None, lambda: None)
            self._agreed.add(unnumbered)
        return [header[:0]] * self.size

    def rounds(
        self, outgoing: Callable[[int, int], Tensor], incoming: Sequence[Tensor], arrived: Callable[[int], None]
    ) -> None:
        order = [(self.rank + i) % self.size for i in range(1, self.size)]
        rows = [incoming[self.rank][:0]] * self.size
        for turn, peer in enumerate(order):
            rows[peer] = outgoing(peer, turn)
        self._group.alltoall(list(incoming), rows).wait()  # makes the stream wait, not the host
        for peer in (self.rank, *order):
            arrived(peer)

    def close(self) -> None:
        self.control.close()
        self._group.abort()

    def leak(self) -> None:
        self.control.leak()
