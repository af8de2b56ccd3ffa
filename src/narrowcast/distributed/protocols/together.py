"""Reductions over a wire whose rows all leave together: NCCL's.

Up to a few megabytes, what a call takes on the host decides how long it is. So all that depends on sizes alone is
prepared once for all calls alike: memory, and the views of it that go to the kernels and to the wire. There are three
forms, and which one is taken depends on the dtype, the codec, the size and the number of ranks alone:

- as they are, in no less than fp32, by the wire's own sum: small tensors, whatever the codec, and all in `raw`;
- in two stages, as everywhere (two_stage.py): rows are encoded in one launch and decoded in one;
- in one: every rank sends its whole tensor to all others, and adds up all of them, itself as the others see it. Each
  element is quantized once. Two ranks send as many bytes that way as in two stages; more ranks send more, so they do
  it with small tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.transport.wire import TogetherWire
from narrowcast.kernels import operators
from narrowcast.kernels.reference.casts import cast_output

PREPARED = 256
"""So many kinds of calls are prepared at a time, in a group."""

PLAIN_BYTES = 1 << 16
"""Tensors of up to so many bytes (of fp32, or of fp64) go as they are. In the half millisecond by which encoding them
held the host up longer than NCCL's own sum (bench/results/nccl.md of commit b327314), a link of 1 Gbit/s carries
64 KB."""

PLAIN_RAW_BYTES = math.inf
"""The same in `raw`: all of them, since as many bytes travel either way, and a sum takes less of a busy GPU. 64 MB with
four ranks, beside matmuls: NCCL's sum in two halves takes 20 ms alone, and 88 to 100% are hidden; rows take 26 ms,
and 53 to 60% are hidden (bench/results/nccl.md). fp64 travels as fp32 in `raw`, so in rows."""

SPARE_BYTES = 1 << 16
"""So many more bytes may a rank send to save the second exchange, which takes as long as these on a fast network."""


def all_reduce(collective: Collective, flat: Tensor, lengths: Sequence[int], divisor: int) -> None:
    """Sum `flat` [numel] over all ranks, in place; rank r owns `lengths[r]` elements of it."""
    collective.agree()
    prepared = collective.group.prepared
    kind = collective.call.codec, len(flat)
    reduction = prepared.get(kind)
    if not isinstance(reduction, _Prepared) or reduction.version != collective.group.buffers.version:
        reduction = None
        if len(prepared) >= PREPARED or collective.group.buffers.version != collective.group.prepared_version:
            prepared.clear()  # what was made of other memory would keep it
        reduction = prepared[kind] = _prepare(collective, len(flat), lengths)
        collective.group.prepared_version = collective.group.buffers.version
    reduction.run(collective, flat, divisor)


def goes_as_it_is(codec: Codec, tensor: Tensor) -> bool:
    """Whether a tensor is summed without a codec. It needs none of the group's memory then."""
    raw = codec == lossless(torch.float32) and tensor.dtype != torch.float64
    limit = PLAIN_RAW_BYTES if raw else PLAIN_BYTES
    return tensor.numel() * max(4, tensor.element_size()) <= limit


def add_up(collective: Collective, flat: Tensor, divisor: int) -> None:
    """Sum `flat` over all ranks as it is, in place. Halves add up in fp32, as they do in every codec."""
    collective.agree()
    if not len(flat):
        return
    total = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    _wire(collective).add_up(total)
    if divisor > 1 or total is not flat:
        with torch.inference_mode():  # where any tensor may be written to, those of inference mode, too
            total.div_(divisor)
            if total is not flat:
                flat.copy_(cast_output(total, flat.dtype))
    collective.encoder.meter.sent_bytes += 2 * (collective.size - 1) * total.nbytes // collective.size


def in_one_stage(nbytes: int, ranks: int) -> bool:
    """Whether a tensor of so many encoded bytes is sent whole."""
    return (ranks - 1) * nbytes - 2 * (ranks - 1) * nbytes // ranks <= SPARE_BYTES


def _prepare(collective: Collective, numel: int, lengths: Sequence[int]) -> _Prepared:
    nbytes = collective.call.codec.row_bytes(numel)
    if in_one_stage(nbytes, collective.size):
        return _OneStage(collective, nbytes)
    return _TwoStages(collective, lengths)


class _Prepared:
    """Memory and views for the reductions of tensors of one size, in one codec."""

    def __init__(self, collective: Collective) -> None:
        self._recipe = collective.call.codec.recipe(collective.group.device)
        self.version = -1

    def run(self, collective: Collective, flat: Tensor, divisor: int) -> None:
        raise NotImplementedError


class _OneStage(_Prepared):
    def __init__(self, collective: Collective, nbytes: int) -> None:
        super().__init__(collective)
        self._inbox = collective.encoder.take("inbox 0", collective.size * nbytes).view(collective.size, nbytes)
        self._mine = self._inbox[collective.rank][None]
        everyone = self._inbox.unbind()
        self._to_all = _wire(collective).prepare([everyone[collective.rank]] * collective.size, everyone)
        self._sent_bytes = (collective.size - 1) * nbytes
        self.version = collective.group.buffers.version

    def run(self, collective: Collective, flat: Tensor, divisor: int) -> None:
        if not len(flat):
            return
        meter = collective.encoder.meter
        with meter.encode():
            operators.encode_(self._mine, flat[None], self._recipe, 0)
        _wire(collective).exchange(self._to_all)
        with meter.decode():
            operators.decode_sum_(flat, self._inbox, self._recipe, None, 0, divisor)
        meter.sent_bytes += self._sent_bytes


class _TwoStages(_Prepared):
    def __init__(self, collective: Collective, lengths: Sequence[int]) -> None:
        super().__init__(collective)
        rank, ranks, codec = collective.rank, collective.size, collective.call.codec
        sizes = [codec.row_bytes(length) for length in lengths]
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
