"""The two-stage reduction over a wire whose rows all leave together: NCCL's.

Rows are encoded in one launch and decoded in one, however many ranks there are. Up to a few megabytes, what a call
takes on the host decides how long it is, so all that depends on sizes alone is prepared once for all calls alike:
memory, and the views of it that go to the kernels and to the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.transport.wire import TogetherWire
from narrowcast.kernels import operators

PREPARED = 256
"""So many kinds of calls are prepared at a time, in a group."""


def all_reduce(collective: Collective, flat: Tensor, lengths: Sequence[int], divisor: int) -> None:
    """Sum `flat` [numel] over all ranks, in place; rank r owns `lengths[r]` elements of it."""
    collective.agree()
    prepared = collective.group.prepared
    kind = collective.call.codec, len(flat)
    reduction = prepared.get(kind)
    if not isinstance(reduction, _Reduction) or reduction.version != collective.group.buffers.version:
        if len(prepared) >= PREPARED:
            prepared.clear()
        reduction = prepared[kind] = _Reduction(collective, lengths)
    reduction.run(collective, flat, divisor)


class _Reduction:
    """Memory and views for the reductions of tensors of one size, in one codec."""

    def __init__(self, collective: Collective, lengths: Sequence[int]) -> None:
        rank, ranks, codec = collective.rank, collective.size, collective.call.codec
        sizes = [codec.row_bytes(length) for length in lengths]
        self._recipe = codec.recipe(collective.group.device)
        self._columns = lengths[0]
        self._rows = sum(length == lengths[0] for length in lengths) if lengths[0] else 0
        self._end = self._rows * self._columns
        self._mine = slice(rank * self._columns, rank * self._columns + lengths[rank])
        nbytes, take = sum(sizes), collective.encoder.take
        outbox, sums = take("outbox", nbytes), take("sums 0", nbytes)
        self._inbox = take("inbox 0", ranks * sizes[rank]).view(ranks, sizes[rank])
        self._encoded, self._encoded_rest = self._matrix(outbox, sizes)
        self._summed, self._summed_rest = self._matrix(sums, sizes)
        parts, every_sum, wire = outbox.split(sizes), sums.split(sizes), _wire(collective)
        self._sum = every_sum[rank]
        self._parts_to_owners = wire.prepare(parts, self._inbox.unbind())
        self._sums_to_all = wire.prepare([self._sum] * ranks, every_sum)
        self._sent_bytes = nbytes - sizes[rank] + (ranks - 1) * sizes[rank]
        self.version = collective.group.buffers.version

    def run(self, collective: Collective, flat: Tensor, divisor: int) -> None:
        meter, wire = collective.encoder.meter, _wire(collective)
        rows, rest, mine = flat[: self._end].view(self._rows, self._columns), flat[self._end :], flat[self._mine]
        with meter.encode():
            if self._rows:
                operators.encode_(self._encoded, rows, self._recipe, 0)
            if len(rest):
                operators.encode_(self._encoded_rest, rest[None], self._recipe, 0)
        wire.exchange(self._parts_to_owners)
        if len(mine):
            summed = self._inbox, len(mine), self._recipe, mine, collective.rank, divisor, 0
            with meter.decode():
                operators.decode_sum_encode_(self._sum, *summed)
        wire.exchange(self._sums_to_all)
        with meter.decode():
            if self._rows:
                operators.decode_(rows, self._summed, self._recipe)
            if len(rest):
                operators.decode_(rest[None], self._summed_rest, self._recipe)
        meter.sent_bytes += self._sent_bytes

    def _matrix(self, data: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The rows that are as long as the first one, and the one after them, if it has elements."""
        end = self._rows * sizes[0]
        after = sizes[self._rows] if self._rows < len(sizes) else 0
        return data[:end].view(self._rows, sizes[0]), data[end : end + after][None]


def _wire(collective: Collective) -> TogetherWire:
    return cast("TogetherWire", collective.wire)
