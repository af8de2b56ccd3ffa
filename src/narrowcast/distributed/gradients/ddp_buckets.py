"""Buckets as DDP hands them over, and the first one, which waits for the second where it is small.

DDP makes its first bucket small, 1 MB unless told otherwise, so that something travels early in a backward. In few bits
that is little: a collective of its own costs more than it hides. So it waits, and both travel in one. The average of a
parameter does not depend on its bucket (layout.py), so the bits are the same. One who says how large buckets are
(`bucket_cap_mb=`) gets these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import Codec
from narrowcast.errors import SpecError

MOST_HELD_BYTES = 1 << 17
"""Encoded bytes of a first bucket that waits, at most: 262,144 elements, 1 MB of fp32, have 41 KB in sign."""


@dataclass
class DdpBucket:
    """The gradients of some parameters, which start at these offsets of the buffer, in elements."""

    buffer: Tensor
    parameters: Sequence[Tensor]
    offsets: Sequence[int]
    index: int
    last: bool
    averaged: torch.futures.Future[Tensor] = field(default_factory=torch.futures.Future)
    """Of a bucket that waits: the buffer, once it holds the averages."""

    def waits(self, ddp: object, codec: Codec | None, ranks: int) -> bool:
        """Whether it waits for the next bucket, where it is to travel in this codec. All ranks find the same."""
        if self.index or self.last or codec is None or ranks <= 1 or self.buffer.device.type != "cpu":
            return False
        by_default = isinstance(ddp, DistributedDataParallel) and getattr(ddp, "bucket_bytes_cap_default", False)
        return by_default and codec.row_bytes(self.buffer.numel()) <= MOST_HELD_BYTES

    def joins(self, other: DdpBucket) -> bool:
        """Whether both can travel in one collective."""
        return self.buffer.dtype == other.buffer.dtype and self.buffer.device == other.buffer.device

    def settle(self, done: torch.futures.Future[Any]) -> None:
        """Settle `averaged` as the collective in which the bucket travelled, `done`, has ended."""
        try:
            done.value()
        except Exception as error:
            self.averaged.set_exception(error)  # type: ignore[arg-type]
        else:
            self.averaged.set_result(self.buffer)


class Order:
    """The buckets of a backward, as they come."""

    def __init__(self) -> None:
        self.waiting: DdpBucket | None = None
        self.tensors = 0
        """How many parameters all buckets have together; 0 where DDP says which bucket is the last one."""
        self._index = self._came = 0
        self._task = -1
        """The backward whose first bucket came last: a number of autograd's."""

    def count_for(self, ddp: DistributedDataParallel) -> None:
        """Count buckets for a DDP that does not: with `static_graph` it hands over all buckets of its first backward at
        the end, each as the first one of several."""
        self.tensors = ddp._get_ddp_logging_data()["num_parameter_tensors"] if ddp.static_graph else 0

    def place(self, bucket: dist.GradBucket) -> tuple[int, bool]:
        """The number of a bucket that comes, and whether it is the last one."""
        index, task = bucket.index(), torch._C._current_graph_task_id()
        if not index:
            if not self.tensors and task == self._task != -1:
                raise SpecError(_FIRST_TWICE)
            self._task = task
        if not index and 0 < self._came < self.tensors:
            index = self._index + 1
        elif not index:
            self._came = 0
        self._index, self._came = index, self._came + len(bucket.parameters())
        return index, bucket.is_last() or self._came == self.tensors


_FIRST_TWICE = (
    "static_graph: DistributedDataParallel hands over the buckets of several dtypes as the first one each, and a hook "
    "that was registered by hand cannot tell which is the last. Call compress_gradients(ddp, ...), which counts them, "
    "instead of register_comm_hook. (Two models in one backward need a GradientCompression each.)"
)


class JoinedBuckets:
    """Buckets that travel together, their buffers counted end to end."""

    def __init__(self, buckets: Sequence[DdpBucket]) -> None:
        self.buckets = buckets
        self.index, self.last = buckets[0].index, buckets[-1].last
        self.buffers = [bucket.buffer for bucket in buckets]
        self.parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        self.numel, self.offsets = 0, list[int]()
        for bucket in buckets:
            self.offsets += [self.numel + offset for offset in bucket.offsets]
            self.numel += bucket.buffer.numel()


def last_result(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    """The last tensor of a work's result, for DDP, which wants it alone."""
    return done.value()[-1]
