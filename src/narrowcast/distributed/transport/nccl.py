"""Rows on CUDA devices, over NCCL: from device to device, in one grouped send and receive on the lane's stream.

A header over gloo would make every call wait for the host. So ranks agree on a call's arguments the first time each set
of them is used; with NARROWCAST_DEBUG=1, every time. An all_to_all whose counts each rank knows only its own of is
agreed on every time: one rank cannot see that the counts of two others have changed, and these would wait for it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.transport.agreement import Header
from narrowcast.distributed.transport.gloo import GlooWire

REMEMBERED = 1024
"""So many sets of arguments, the last ones, are known to be agreed on."""


class NcclWire:
    """`Wire` for rows on CUDA devices: NCCL moves rows, gloo compares headers."""

    eager = 0
    chunks = 1

    def __init__(self, control: GlooWire, store: dist.Store) -> None:
        self.control = control
        self.rank, self.size = control.rank, control.size
        self.turns = self.size
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = control.gloo.timeout
        self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), self.rank, self.size, options)
        self._agreed: OrderedDict[bytes, None] = OrderedDict()
        self._outgoing: dict[int, Tensor] = {}
        self._always = os.environ.get("NARROWCAST_DEBUG", "0") not in ("", "0")

    def agree(
        self,
        header: Header,
        eager: Callable[[int], Tensor | None],
        incoming: Sequence[Tensor],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        meanwhile()
        key = header.key
        if self._always or key not in self._agreed:
            self.control.agree(header, lambda peer: None, [header.data[:0]] * self.size)
        self.control.agreed = True
        if key is not None:  # all ranks make the same calls: what one has forgotten, all have
            self._agreed[key] = None
            self._agreed.move_to_end(key)
            if len(self._agreed) > REMEMBERED:
                self._agreed.popitem(last=False)

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
