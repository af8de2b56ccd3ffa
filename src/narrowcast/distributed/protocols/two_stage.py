"""The two-stage reduction.

1. The tensor is split into one part per rank, its owner. Each rank encodes each part for its owner; its own stays
   exact.
2. Every owner gets the rows of its part, sums them in rank order in fp32, divides for an average, and encodes the
   sum: one fused pass.
3. The encoded sums go to all ranks. The owner too decodes its own bytes, so every rank ends with the same bits.

Each element is quantized twice whatever the number of ranks, and each rank sends 2(N-1)/N of the encoded tensor.
`reduce_scatter` ends with the sum, which is not quantized again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.protocols import together
from narrowcast.distributed.protocols.pipeline import Chunk, Segment, reduce

UNIT = 128
"""Parts start at multiples of so many elements: whole blocks of the usual codecs, and aligned rows."""

ROW_BYTES = 768 * 1024
"""A chunk is as large as makes its rows take about so many bytes. Smaller ones overlap better on a slow link, larger
ones cost fewer thread switches on a fast one (bench/wire.py). It decides who owns an element, and so the last bits
of a sum: it must not depend on anything that may differ between two runs."""


def split(numel: int, ranks: int) -> list[int]:
    """How many elements each rank owns: about the same, the last ones fewer or none."""
    each = -(-numel // (ranks * UNIT)) * UNIT
    return [max(0, min(each, numel - rank * each)) for rank in range(ranks)]


def cut(numel: int, ranks: int, codec: Codec, eager: int) -> list[int]:
    """How many elements the chunks have in which a tensor is reduced.

    The first one of a large tensor is small enough to go with the header, and keeps the link busy while ranks agree.
    """
    part = split(numel, ranks)[0]
    row_bytes = codec.row_bytes(part)
    if row_bytes <= ROW_BYTES or not eager:
        return [numel]
    unit = UNIT * ranks
    first = part * (eager - 256) // row_bytes // UNIT * unit  # less a little, for the padding of rows
    each = -(-(numel - first) // (-(-row_bytes // ROW_BYTES) * unit)) * unit
    return [first, *(min(each, numel - start) for start in range(first, numel, each))]


def all_reduce(collective: Collective, flat: Tensor, divisor: int) -> None:
    """Sum `flat` [numel] over all ranks, in place."""
    if collective.wire.together and together.goes_as_it_is(collective.call.codec, flat):
        together.add_up(collective, flat, divisor)
    else:
        all_reduce_rows(collective, flat, divisor)


def all_reduce_rows(collective: Collective, flat: Tensor, divisor: int) -> None:
    """The same, encoded however small `flat` is."""
    if collective.wire.together and not collective.call.codec.stochastic:  # there every row has a seed of its own
        together.all_reduce(collective, flat, split(len(flat), collective.size), divisor)
        return
    sizes = cut(len(flat), collective.size, collective.call.codec, collective.wire.eager)
    parts = [chunk.split(split(len(chunk), collective.size)) for chunk in flat.split(sizes)]
    segments = [Segment(collective.encoder, part, key=i) for i, part in enumerate(parts)]
    reduce(collective, [Chunk(collective, [segment], i, divisor) for i, segment in enumerate(segments)])


def reduce_scatter(collective: Collective, parts: Sequence[Tensor], output: Tensor, divisor: int) -> None:
    """Sum part `rank` of every rank's `parts` (flat, one per rank) into `output` (flat)."""
    segment = Segment(collective.encoder, parts, [output] * collective.size)
    reduce(collective, [Chunk(collective, [segment], 0, divisor, keep_sums=True)])
