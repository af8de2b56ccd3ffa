"""One bucket of gradients through a reduction: the engine of DDP and FSDP2.

The lane does this chunk by chunk. Gradients are added to their residuals, where there are some; parts go to their
owners; sums go to everyone (DDP) or stay with their owner (FSDP2). Exempt elements travel in the same messages, in a
codec that loses nothing of their dtype. A bucket is not changed before all ranks agree on the call.

- `FlatBucket`: gradients end to end, as DDP has them. A chunk gathers its gradients side by side, and writes the
  averages over them.
- `ShardedBucket`: a matrix with one row per rank, as FSDP2 has it. Its columns travel from where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.gradients.feedback import FeedbackSegment
from narrowcast.distributed.gradients.layout import ChunkLayout, Run, exempt_runs, runs_of
from narrowcast.distributed.gradients.outcome import Outcome
from narrowcast.distributed.gradients.residuals import Residuals, StepResiduals
from narrowcast.distributed.gradients.stats import BucketStats, Probe
from narrowcast.distributed.protocols import two_stage
from narrowcast.distributed.protocols.pipeline import Chunk, Segment, reduce


@dataclass(frozen=True)
class Reduction:
    """How one bucket travels in one step."""

    codec: Codec
    layout: list[ChunkLayout]
    stats: BucketStats
    probe: Probe | None
    step: int


@dataclass
class Bucket:
    """Gradients that are reduced together. `gradients` is where they are."""

    gradients: Tensor
    layout: Sequence[ChunkLayout]
    residuals: Residuals | None
    outcome: Outcome
    """Of the step that it belongs to."""
    probe: Probe | None

    @property
    def words(self) -> str:
        """What else ranks must agree on."""
        return ""

    def reduce(self, collective: Collective) -> None:
        """The protocol: reduce it over all ranks."""
        if self.residuals is not None:
            self.residuals.enter(self.outcome)
        reduce(collective, [self.chunk(collective, layout, index) for index, layout in enumerate(self.layout)])
        if self.residuals is not None:
            self.residuals.reduced(self.layout)

    def chunk(self, collective: Collective, layout: ChunkLayout, index: int) -> GradientChunk:
        raise NotImplementedError

    def residuals_of(self, layout: ChunkLayout) -> StepResiduals:
        if self.residuals is None or not layout.sections:
            return StepResiduals()
        return self.residuals.step_of(layout, self.gradients.device)

    def note(self, *results: Tensor) -> None:
        """Note whether all results are finite, on which residuals depend."""
        if self.residuals is not None:
            for result in results:
                self.outcome.note(result)


class GradientChunk(Chunk):
    """A chunk of a bucket, with its residuals in the step under way."""

    layout: ChunkLayout
    step: StepResiduals

    def add_residuals(self, residuals: Sequence[Tensor], gradients: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        for residual, gradient, target in zip(residuals, gradients, out, strict=True):
            torch.add(residual, gradient, out=target)

    def clear_padding(self) -> None:
        """Not every codec gives zeros back for zeros. Residuals of padding are not saved: a run that is resumed would
        differ from one that was not stopped."""
        if self.step.next_sender is not None:
            _zero(self.layout.padding(self.step.next_sender))
        if self.step.next_owner is not None:
            for section, _, span in self.layout.spans():
                self.step.next_owner[span][section.owned(self.rank) :].zero_()

    def segment(self, run: Run, parts: Tensor, sums: Sequence[Tensor], probe: Probe | None) -> Segment:
        """The segment of one run; `parts` [ranks, columns] are what is encoded."""
        owner, owner_next = self.step.owner, self.step.next_owner
        return FeedbackSegment(
            self.collective.encoder,
            parts.unbind(),
            sums,
            run.key,
            keeps=self.step.sender is not None,
            owner=None if owner is None else owner[run.places],
            owner_next=None if owner_next is None else owner_next[run.places],
            probe=probe,
        )


# -- DDP: gradients end to end, averages to everyone ------------------------------------------------------------------


@dataclass
class FlatBucket(Bucket):
    """A bucket of DDP: averaged in place."""

    def chunk(self, collective: Collective, layout: ChunkLayout, index: int) -> GradientChunk:
        return _FlatChunk(self, collective, layout, index)


class _FlatChunk(GradientChunk):
    def __init__(self, bucket: FlatBucket, collective: Collective, layout: ChunkLayout, index: int) -> None:
        self.collective, self.layout, self.step = collective, layout, bucket.residuals_of(layout)
        self._bucket = bucket
        self._slot = index % collective.wire.chunks
        ranks, columns, dtype = collective.size, layout.columns, bucket.gradients.dtype
        self._exempt = self._memory("exempt", layout.exempt_numel)
        self._averages = self._memory("gradients", ranks * columns).view(ranks, columns)
        segments = []
        if layout.exempt:
            parts = self._exempt.split(two_stage.split(layout.exempt_numel, ranks))
            segments.append(Segment(collective.encoder.using(lossless(dtype)), parts))
        meant = self._averages if self.step.next_sender is None else self.step.next_sender
        for run in runs_of(layout, collective.call.codec, sharded=False) if layout.sections else ():
            averages = self._averages[:, run.places].unbind()
            segments.append(self.segment(run, meant[:, run.places], averages, bucket.probe))
        super().__init__(collective, segments, index, divisor=ranks, eager=False)

    def prepare(self) -> None:
        """Put the gradients side by side, added to the residuals where there are some."""
        _copy(self._exempt_gradients(), self._exempt_places())
        if self.step.sender is not None and self.step.next_sender is not None:
            places = self._places(self.step.next_sender)
            self.add_residuals(self._places(self.step.sender), self._gradients(), places)
        else:
            _copy(self._gradients(), self._places(self._averages))
            _zero(self.layout.padding(self._averages))

    def finish(self) -> None:
        """Write the averages over the gradients."""
        super().finish()
        _copy(self._exempt_places(), self._exempt_gradients())
        _copy(self._places(self._averages), self._gradients())
        self._bucket.note(self._exempt, self._averages)
        self.clear_padding()

    def _gradients(self) -> list[Tensor]:
        flat = self._bucket.gradients
        return [
            view
            for section, offset, _ in self.layout.spans()
            for view in section.elements(flat[offset : offset + section.numel])
        ]

    def _places(self, matrix: Tensor) -> list[Tensor]:
        return [place for section, _, span in self.layout.spans() for place in section.places(matrix[:, span])]

    def _exempt_gradients(self) -> list[Tensor]:
        return [self._bucket.gradients[offset : offset + numel] for offset, numel in self.layout.exempt]

    def _exempt_places(self) -> list[Tensor]:
        return list(self._exempt.split([numel for _, numel in self.layout.exempt])) if self.layout.exempt else []

    def _memory(self, name: str, numel: int) -> Tensor:
        """Memory for so many gradients, used again by a later chunk."""
        dtype = self._bucket.gradients.dtype
        return self.collective.encoder.take(f"{name} {self._slot}", numel * dtype.itemsize).view(dtype)


# -- FSDP2: one row per rank, sums to their owners --------------------------------------------------------------------


@dataclass
class ShardedBucket(Bucket):
    """A buffer of FSDP2: this rank's row of every rank's matrix is summed into `output`."""

    output: Tensor
    divisor: int
    factor: float
    """What the sum is multiplied with after it was divided."""

    @property
    def words(self) -> str:
        return f", divisor={self.divisor}, factor={self.factor:g}"

    def reduce(self, collective: Collective) -> None:
        super().reduce(collective)
        if self.factor != 1:
            self.output.mul_(self.factor)
        self.note(self.output)

    def chunk(self, collective: Collective, layout: ChunkLayout, index: int) -> GradientChunk:
        return _ShardedChunk(self, collective, layout, index)


class _ShardedChunk(GradientChunk):
    def __init__(self, bucket: ShardedBucket, collective: Collective, layout: ChunkLayout, index: int) -> None:
        self.collective, self.layout, self.step = collective, layout, bucket.residuals_of(layout)
        self._matrix = bucket.gradients
        self._runs = runs_of(layout, collective.call.codec, sharded=True)
        exact, ranks = collective.encoder.using(lossless(self._matrix.dtype)), collective.size
        segments = [
            Segment(exact, self._matrix[:, columns].unbind(), [bucket.output[columns]] * ranks)
            for columns in exempt_runs(layout)
        ]
        for run in self._runs:
            meant = self._matrix[:, run.columns]
            if self.step.next_sender is not None:
                meant = self.step.next_sender[:, run.places]
            segments.append(self.segment(run, meant, [bucket.output[run.columns]] * ranks, bucket.probe))
        super().__init__(collective, segments, index, bucket.divisor, keep_sums=True)

    def prepare(self) -> None:
        """Add the gradients to the residuals, where there are some."""
        sender, out = self.step.sender, self.step.next_sender
        if sender is not None and out is not None:
            places = [run.places for run in self._runs]
            gradients = [self._matrix[:, run.columns] for run in self._runs]
            self.add_residuals([sender[:, p] for p in places], gradients, [out[:, p] for p in places])

    def finish(self) -> None:
        super().finish()
        self.clear_padding()


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


def _zero(tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(tensors)
