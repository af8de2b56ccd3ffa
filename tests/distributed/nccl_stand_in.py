"""A stand-in for NCCL's process group, so that the real NCCL wire runs where there is no GPU.

It moves rows as NCCL does: nothing tells the receiver how many bytes come, a rank whose rows nobody takes waits, and
calls are matched by their order alone. Ranks are connected by the first call, not when the group is made.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from narrowcast.distributed.transport.gloo import GlooWire
from narrowcast.distributed.transport.group import Group
from narrowcast.distributed.transport.nccl import NcclWire


class StandIn:
    """`dist.ProcessGroupNCCL`, as far as the wire uses it, for rows in host memory."""

    class Options(SimpleNamespace):
        _timeout = timedelta(seconds=20)

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self._arguments = store, rank, size, options._timeout
        self._connected: Any = None

    @property
    def _group(self) -> Any:
        self._connected = self._connected or dist.ProcessGroupGloo(*self._arguments)
        return self._connected

    def alltoall(self, into: list[Tensor], rows: list[Tensor], options: Any = None) -> Any:
        works = [self._group.recv([row], peer, 0) for peer, row in enumerate(into) if len(row)]
        works += [self._group.send([row], peer, 0) for peer, row in enumerate(rows) if len(row)]
        if options is not None and not options.asyncOp:
            return [work.wait() for work in works]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        work = self._group.allreduce(tensors)
        return work.wait() if options is not None and not options.asyncOp else work

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def use() -> None:
    """Let every group of this process move its rows by the NCCL wire, over the stand-in."""
    dist.ProcessGroupNCCL = StandIn  # type: ignore[assignment,misc]

    def wired(self: Group, host: GlooWire) -> NcclWire:
        return NcclWire(host, self.connections.page(self._generation), self.device, pair=self._pair)

    Group._on_device = wired  # type: ignore[method-assign]
