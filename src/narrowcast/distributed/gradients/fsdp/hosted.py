"""FSDP2's reduce-scatter where several ranks share a host: out of a host goes no more than out of one rank.

A buffer of FSDP2 is a matrix with one row per rank.

1. The ranks of a host reduce-scatter, without loss. Each place ends with the host's sums of the rows that belong to its
   place on every host: a matrix with one row per host, in fp32.
2. Ranks in the same place on all hosts reduce-scatter that one, in the codec, as reduction.py does a buffer. So a rank
   has residuals of these rows alone.

Then the ranks of a host meet: what failed in one place is known to all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.gradients.layout import elements_at_once
from narrowcast.distributed.gradients.reduction import ShardedBucket
from narrowcast.distributed.protocols import pipeline
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.protocols.pipeline import Chunk, Segment
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group


def numel_of_place(numel: int, part: int, rows: Sequence[int]) -> int:
    """How many elements of a parameter lie in these rows of it, of `part` elements each: the first are full."""
    return sum(max(0, min(part, numel - row * part)) for row in rows)


@dataclass
class HostShardedBucket(ShardedBucket):
    """A buffer of FSDP2 on ranks that share hosts. Its layout is that of the rows of this rank's place."""

    mesh: Mesh

    def phases(self, group: Group | Mesh, call: Call, plain_bytes: int, seed: int) -> list[Collective]:
        mesh, words = self.mesh, f"{call.words}, codec={call.codec.spec}"
        within = Call(f"{call.op} within hosts", lossless(self.gradients.dtype), words)
        between = dataclasses.replace(call, op=f"{call.op} between hosts")
        told = dataclasses.replace(
            within, op=f"{call.op} between hosts, as told within", sizes=None
        )  # ranks always meet
        shape = mesh.between.size, self.gradients.shape[1]
        self._share = torch.empty(shape, dtype=torch.float32, device=self.gradients.device)
        return [
            Collective(mesh.within, within, self._reduce_within),
            Collective(mesh.between, between, self._reduce_between, plain_bytes=plain_bytes, seed=seed),
            Collective(mesh.within, told, lambda collective: collective.agree()),
        ]

    def _reduce_within(self, collective: Collective) -> None:
        columns = self.gradients.shape[1]
        rows = len(self.gradients)
        width = columns if collective.group.nccl else max(1, elements_at_once(rows) // rows)
        cuts = [slice(start, min(columns, start + width)) for start in range(0, columns, width)]
        pipeline.reduce(collective, [self._chunk_within(collective, cut, i) for i, cut in enumerate(cuts)])

    def _chunk_within(self, collective: Collective, cut: slice, index: int) -> Chunk:
        segments = []
        for host, ranks in enumerate(self.mesh.hosts):
            parts: list[Tensor] = [self.gradients[rank, cut] for rank in ranks]
            segments.append(Segment(collective.encoder, parts, [self._share[host, cut]] * len(ranks)))
        return Chunk(collective, segments, index, divisor=1, keep_sums=True)

    def _reduce_between(self, collective: Collective) -> None:
        given = self._share, self.layout, self.residuals, self.outcome, self.probe
        ShardedBucket(*given, self.output, self.divisor, self.factor).reduce(collective)
