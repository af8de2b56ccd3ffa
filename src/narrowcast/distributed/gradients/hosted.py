"""One bucket of gradients through a reduction where several ranks share a host: three phases.

1. The ranks of a host reduce-scatter, without loss. Each place on the host ends with its share of the host's sums, in
   fp32: of every chunk a matrix with one row per host, and a part of the exempt elements (layout.py).
2. Ranks in the same place on all hosts reduce that share, as reduction.py reduces a bucket: in the codec, with
   residuals. So a rank keeps residuals of its share alone.
3. The ranks of a host all-gather the averages, in the dtype of the gradients.

The bucket is not changed before the third phase. On a CPU each phase follows the one before it chunk by chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.gradients.gather import GatheredChunk
from narrowcast.distributed.gradients.layout import ChunkLayout
from narrowcast.distributed.gradients.reduction import Bucket, GradientChunk, round_to
from narrowcast.distributed.gradients.side_by_side import SideBySide
from narrowcast.distributed.protocols import pipeline
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.protocols.phases import Progress
from narrowcast.distributed.protocols.pipeline import Chunk, Segment
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group


@dataclass(frozen=True)
class Share:
    """What a place on a host has of a chunk, in fp32: the host's sums, then the averages of all ranks."""

    exempt: Tensor
    matrix: Tensor
    """[hosts, columns]"""

    @classmethod
    def of(cls, layout: ChunkLayout, device: torch.device) -> Share:
        exempt, shape = layout.exempt_numel, (layout.ranks, layout.columns)
        memory = torch.empty(exempt + shape[0] * shape[1], dtype=torch.float32, device=device)
        return cls(memory[:exempt], memory[exempt:].view(shape))


@dataclass
class HostBucket(Bucket):
    """A bucket of DDP on ranks that share hosts: averaged in place."""

    mesh: Mesh
    _shares: list[Share] = field(default_factory=list, init=False)
    summed: Progress = field(init=False)
    averaged: Progress = field(init=False)

    def phases(self, group: Group | Mesh, call: Call, plain_bytes: int, seed: int) -> list[Collective]:
        mesh, near = self.mesh, lossless(self.gradients.dtype)
        words = f"{call.words}, codec={call.codec.spec}"
        within = Call(f"{call.op} within hosts", near, words)
        between = dataclasses.replace(call, op=f"{call.op} between hosts")
        here, chunks = mesh.everyone.ranks[mesh.everyone.rank], len(self.layout)
        self.summed, self.averaged = Progress(chunks, here), Progress(chunks, here)
        with mesh.giving_up(call.op):
            self._shares = [Share.of(_share(layout), self.gradients.device) for layout in self.layout]
        return [
            Collective(mesh.within, within, self._reduce_within),
            Collective(mesh.between, between, self._reduce_between, plain_bytes=plain_bytes, seed=seed),
            Collective(mesh.within, within, self._gather_within),
        ]

    @property
    def progress(self) -> Sequence[Progress]:
        return self.summed, self.averaged

    def _reduce_within(self, collective: Collective) -> None:
        both = zip(self.layout, self._shares, strict=True)
        pipeline.reduce(collective, [_SummedChunk(self, collective, *pair, i) for i, pair in enumerate(both)])

    def _reduce_between(self, collective: Collective) -> None:
        layouts = [_share(layout) for layout in self.layout]
        both = zip(layouts, self._shares, strict=True)
        with self.residuals_of_step(layouts):
            pipeline.reduce(collective, [_SharedChunk(self, collective, *pair, i) for i, pair in enumerate(both)])

    def _gather_within(self, collective: Collective) -> None:
        both = zip(self.layout, self._shares, strict=True)
        pipeline.run([_AveragedChunk(self, collective, *pair, i) for i, pair in enumerate(both)])
        self._shares = []


def _share(layout: ChunkLayout) -> ChunkLayout:
    assert layout.share is not None
    return layout.share


class _SummedChunk(Chunk):
    """The gradients of a host's ranks on their way to the places that sum them."""

    def __init__(
        self, bucket: HostBucket, collective: Collective, layout: ChunkLayout, share: Share, index: int
    ) -> None:
        self._summed, self._count = bucket.summed, index + 1
        places, slots = collective.size, collective.wire.chunks + 1
        self._here = here = SideBySide(collective, bucket.buffers, layout, index, places * len(share.exempt), slots)
        regions = (here.exempt, share.exempt), (here.matrix, share.matrix)
        segments = [
            Segment(collective.encoder, gradients.view(places, -1).unbind(), [sums.view(-1)] * places)
            for gradients, sums in regions
            if sums.numel()
        ]
        left = collective.wire.chunks * (places - 1) >= collective.wire.turns  # all rows, when the memory is used again
        super().__init__(collective, segments, index, divisor=1, keep_sums=True, from_memory=left)

    def prepare(self) -> None:
        self._here.gather_exempt()
        self._here.gather()

    def receive(self) -> None:
        super().receive()
        self._summed.reach(self._count)


class _SharedChunk(GradientChunk):
    """A host's sums, on their way to the owners among all hosts, and averages on their way back."""

    def __init__(
        self, bucket: HostBucket, collective: Collective, layout: ChunkLayout, share: Share, index: int
    ) -> None:
        self._summed, self._averaged, self._count = bucket.summed, bucket.averaged, index + 1
        self.collective, self.layout, self.step = collective, layout, bucket.residuals_of(layout, collective, index)
        self._share = share
        self._exempt_in = bucket.exempt_in
        exact = lossless(bucket.exempt_in or torch.float32)
        segments = self.averaged(exact, share.exempt, share.matrix, bucket.probe)
        super().__init__(collective, segments, index, divisor=bucket.mesh.size)

    def prepare(self) -> None:
        """Wait for the sums, and add the residuals, where there are some."""
        self._summed.wait(self._count)
        self.step.begin()
        round_to(self._exempt_in, self._share.exempt)
        if self.step.sender is not None and self.step.next_sender is not None:
            self.add_residuals([self.step.sender], [self._share.matrix], [self.step.next_sender])

    def finish(self) -> None:
        super().finish()
        self.keep_residuals()
        self._averaged.reach(self._count)


class _AveragedChunk(GatheredChunk):
    """Averages, on their way from the places of a host to all its ranks."""

    def __init__(
        self, bucket: HostBucket, collective: Collective, layout: ChunkLayout, share: Share, index: int
    ) -> None:
        self._averaged, self._count = bucket.averaged, index + 1
        places = collective.size
        self._bucket = bucket
        self._here = here = SideBySide(collective, bucket.buffers, layout, index, places * len(share.exempt))
        regions = (share.exempt, here.exempt), (share.matrix, here.matrix)
        runs = [
            (collective.encoder, averages.view(-1), everyones.view(places, -1).unbind())
            for averages, everyones in regions
            if averages.numel()
        ]
        super().__init__(collective, runs, index)

    def _encode(self) -> None:
        self._averaged.wait(self._count)
        super()._encode()

    def finish(self) -> None:
        """Write the averages over the gradients."""
        self._here.scatter()
        self._bucket.note(self._here.exempt, self._here.matrix)
