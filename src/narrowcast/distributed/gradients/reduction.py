"""One bucket of gradients through a reduction: the engine of DDP and FSDP2.

The lane does this chunk by chunk. Gradients are added to their residuals, where there are some; parts go to their
owners; sums go to everyone (DDP) or stay with their owner (FSDP2). Exempt elements travel in the same messages, in a
codec that loses nothing of their dtype; beside a momentum they are rounded first, to `exempt_in`, by every rank, its
own part too: so their sums do not depend on who owns them. A bucket is not changed before all ranks agree on the call.

- `FlatBucket`: gradients end to end, as DDP has them. A chunk gathers its gradients side by side, and writes the
  averages over them.
- `HostBucket` (hosted.py): the same where ranks share hosts.
- `ShardedBucket`: a matrix with one row per rank, as FSDP2 has it. Its columns travel from where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import lossless
from narrowcast.distributed.gradients.error_feedback.held import StepResiduals
from narrowcast.distributed.gradients.error_feedback.outcome import Outcome
from narrowcast.distributed.gradients.error_feedback.residuals import Residuals
from narrowcast.distributed.gradients.error_feedback.segment import FeedbackSegment
from narrowcast.distributed.gradients.layout import ChunkLayout
from narrowcast.distributed.gradients.runs import Run, exempt_runs, runs_of
from narrowcast.distributed.gradients.side_by_side import SideBySide
from narrowcast.distributed.gradients.stats import BucketStats, Probe
from narrowcast.distributed.protocols import pipeline, two_stage
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.protocols.phases import Progress
from narrowcast.distributed.protocols.pipeline import Chunk, Segment
from narrowcast.distributed.transport.agreement import Call
from narrowcast.distributed.transport.group import Group


@dataclass(frozen=True)
class Reduction:
    """How one bucket travels in one step."""

    codec: Codec
    layout: list[ChunkLayout]
    stats: BucketStats
    probe: Probe | None
    step: int
    momentum: bool = False
    """Whether the momentum travels, not gradients."""
    exempt_in: torch.dtype | None = None
    """What exempt gradients are rounded to before they travel; None: they are not."""


@dataclass
class Bucket:
    """Gradients that are reduced together. `gradients` is where they are."""

    gradients: Tensor
    layout: Sequence[ChunkLayout]
    residuals: Residuals | None
    outcome: Outcome
    """Of the step that it belongs to."""
    probe: Probe | None
    exempt_in: torch.dtype | None = field(default=None, kw_only=True)
    """What exempt gradients are rounded to; None: they travel without loss."""
    also: Sequence[Tensor] = field(default=(), kw_only=True)
    """Flat buffers that follow `gradients`: the layout counts on through them."""

    @property
    def words(self) -> str:
        """What else ranks must agree on."""
        return ""

    @property
    def buffers(self) -> list[Tensor]:
        """All of its gradients."""
        return [self.gradients, *self.also]

    def phases(self, group: Group | Mesh, call: Call, plain_bytes: int, seed: int) -> list[Collective]:
        """The collectives that reduce it, one after the other: here, one of all ranks."""
        assert isinstance(group, Group)
        return [Collective(group, call, self.reduce, name="gradients", plain_bytes=plain_bytes, seed=seed)]

    @property
    def progress(self) -> Sequence[Progress]:
        """Of its phases but the last, where they follow each other chunk by chunk."""
        return ()

    def reduce(self, collective: Collective) -> None:
        """The protocol: reduce it over all ranks."""
        with self.residuals_of_step(self.layout):
            chunks = [self.chunk(collective, layout, index) for index, layout in enumerate(self.layout)]
            pipeline.reduce(collective, chunks)

    @contextlib.contextmanager
    def residuals_of_step(self, layout: Sequence[ChunkLayout]) -> Iterator[None]:
        """In here, the next residuals of these chunks are written."""
        if self.residuals is not None:
            self.residuals.enter(self.outcome)
        yield
        if self.residuals is not None:
            self.residuals.reduced(layout)

    def chunk(self, collective: Collective, layout: ChunkLayout, index: int) -> GradientChunk:
        raise NotImplementedError

    def residuals_of(self, layout: ChunkLayout, collective: Collective, index: int) -> StepResiduals:
        if self.residuals is None or not layout.sections:
            return StepResiduals()
        slot = index % collective.wire.chunks

        def memory(name: str, numel: int) -> Tensor:
            return collective.encoder.take(f"{name} residuals {slot}", 4 * numel).view(torch.float32)

        return self.residuals.step_of(layout, self.gradients.device, memory)

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

    def keep_residuals(self) -> None:
        """The last step of a chunk, when its next residuals are written: clear those of padding, and keep the rest.

        Not every codec decodes zeros to zeros, and state dicts do not hold residuals of padding: a run that is resumed
        would differ from one that was not stopped."""
        if self.step.next_sender is not None:
            for view in self.layout.padding(self.step.next_sender):
                view.zero_()
        if self.step.next_owner is not None:
            for view in self.layout.padding_of(self.rank, self.step.next_owner):
                view.zero_()
        self.step.end()

    def averaged(self, exact: Codec, exempt: Tensor, matrix: Tensor, probe: Probe | None) -> list[Segment]:
        """The segments of elements whose averages take their places: exempt ones in `exact`, others in the codec."""
        layout, segments = self.layout, []
        if layout.exempt:
            parts = exempt.split(two_stage.split(layout.exempt_numel, self.collective.size))
            segments.append(Segment(self.collective.encoder.using(exact), parts))
        meant = matrix if self.step.next_sender is None else self.step.next_sender
        for run in runs_of(layout, self.collective.call.codec, sharded=False) if layout.sections else ():
            segments.append(self.segment(run, meant[:, run.places], matrix[:, run.places].unbind(), probe))
        return segments

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


def round_to(dtype: torch.dtype | None, values: Tensor) -> None:
    """Round values to a dtype, in place; None leaves them."""
    if dtype is not None:
        values.copy_(values.to(dtype))


# -- DDP: gradients end to end, averages to everyone ------------------------------------------------------------------


@dataclass
class FlatBucket(Bucket):
    """A bucket of DDP, or a shard of HSDP: averaged in place, or divided by something else."""

    divisor: int = 0
    """Zero: by the number of ranks."""

    @property
    def words(self) -> str:
        return f", divisor={self.divisor}" if self.divisor else ""

    def chunk(self, collective: Collective, layout: ChunkLayout, index: int) -> GradientChunk:
        return _FlatChunk(self, collective, layout, index)


class _FlatChunk(GradientChunk):
    def __init__(self, bucket: FlatBucket, collective: Collective, layout: ChunkLayout, index: int) -> None:
        self.collective, self.layout, self.step = collective, layout, bucket.residuals_of(layout, collective, index)
        self._bucket = bucket
        self._here = here = SideBySide(collective, bucket.buffers, layout, index)
        exact = lossless(bucket.exempt_in or bucket.gradients.dtype)
        segments = self.averaged(exact, here.exempt, here.matrix, bucket.probe)
        super().__init__(collective, segments, index, bucket.divisor or collective.size, eager=False)

    def prepare(self) -> None:
        """Put the gradients side by side, added to the residuals where there are some."""
        self.step.begin()
        self._here.gather_exempt()
        round_to(self._bucket.exempt_in, self._here.exempt)
        if self.step.sender is not None and self.step.next_sender is not None:
            places = self._here.places(self.step.next_sender)
            self.add_residuals(self._here.places(self.step.sender), self._here.gradients, places)
        else:
            self._here.gather()

    def finish(self) -> None:
        """Write the averages over the gradients."""
        super().finish()
        self._here.scatter()
        self._bucket.note(self._here.exempt, self._here.matrix)
        self.keep_residuals()


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
        self.collective, self.layout, self.step = collective, layout, bucket.residuals_of(layout, collective, index)
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
        self.step.begin()
        sender, out = self.step.sender, self.step.next_sender
        if sender is not None and out is not None:
            places = [run.places for run in self._runs]
            gradients = [self._matrix[:, run.columns] for run in self._runs]
            self.add_residuals([sender[:, p] for p in places], gradients, [out[:, p] for p in places])

    def finish(self) -> None:
        super().finish()
        self.keep_residuals()
