"""One bucket of gradients through the two-stage reduction: averaged in place.

The lane does this, piece by piece: gradients are put side by side (added to their residuals, where there are some),
parts go to their owners, sums come back, and are written over the gradients. What is exempt travels in the same
messages, in a codec that loses nothing of its dtype. Nothing of the bucket moves before all ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.distributed.gradients.columns import PieceLayout, chunk_by_chunk
from narrowcast.distributed.gradients.feedback import FeedbackStrip, Residuals, Step
from narrowcast.distributed.gradients.outcome import Outcome
from narrowcast.distributed.gradients.telemetry import Probe
from narrowcast.distributed.protocols import two_stage
from narrowcast.distributed.protocols.encoder import Coder, lossless
from narrowcast.distributed.protocols.exchange import Exchange
from narrowcast.distributed.protocols.pipeline import Piece, Strip


@dataclass
class Bucket:
    """A bucket, and all that its reduction needs to know."""

    buffer: Tensor
    pieces: Sequence[PieceLayout]
    residuals: Residuals | None
    outcome: Outcome
    """Of the step that it belongs to."""
    probe: Probe | None

    def reduce(self, exchange: Exchange) -> None:
        """Average it over all ranks, in place."""
        exchange.agree()
        if self.residuals is not None:
            self.residuals.enter(self.outcome)
        pieces = [GradientPiece(exchange, self, layout, index) for index, layout in enumerate(self.pieces)]
        exchange.reserve(max(max(piece.sizes) for piece in pieces))
        two_stage.reduce(exchange, pieces, exchange.size)
        if self.residuals is not None:
            self.residuals.reduced(self.pieces)


class GradientPiece(Piece):
    """A piece that gathers its gradients when its turn comes, and puts the averages back."""

    def __init__(self, exchange: Exchange, bucket: Bucket, layout: PieceLayout, index: int) -> None:
        self._bucket = bucket
        self._layout = layout
        self._slot = index % exchange.wire.pieces
        self._take = exchange.coder.take
        self._scratch: Tensor | None = None
        self._step = Step(None, None, None, None)
        strips: list[Strip] = []
        if layout.exempt:
            self._exempt = self._memory("exempt", layout.exempt_numel)
            coder = exchange.coder.using(lossless(bucket.buffer.dtype))
            strips.append(Strip(coder, self._exempt.split(two_stage.split(layout.exempt_numel, exchange.size))))
        if layout.chunks:
            strips += self._compressed(exchange.coder, exchange.size)
        super().__init__(exchange, strips, index, eager=False)

    def send_parts(self) -> None:
        self._gather()
        super().send_parts()

    def collect(self) -> None:
        super().collect()
        self._scatter()

    def _compressed(self, coder: Coder, ranks: int) -> list[Strip]:
        layout, residuals, buffer = self._layout, self._bucket.residuals, self._bucket.buffer
        self._scratch = results = self._memory("gradients", ranks * layout.columns).view(ranks, layout.columns)
        if residuals is not None:
            self._step = residuals.step_of(layout, buffer.device)
        step = self._step
        source = results if step.next_sender is None else step.next_sender
        spans = [(chunk.key, span) for chunk, _, span in layout.spans()]
        if not chunk_by_chunk(coder.codec):
            spans = [(0, slice(0, layout.columns))]
        return [
            FeedbackStrip(
                coder,
                source[:, span].unbind(),
                results[:, span].unbind(),
                key,
                keeps=step.sender is not None,
                owner=None if step.owner is None else step.owner[span],
                owner_next=None if step.next_owner is None else step.next_owner[span],
                probe=self._bucket.probe,
            )
            for key, span in spans
        ]

    def _gather(self) -> None:
        """Put the gradients side by side, added to the residuals where there are some."""
        if self._layout.exempt:
            torch._foreach_copy_(self._exempt_places(), self._exempt_gradients())
        if self._scratch is None:
            return
        gradients = self._gradients()
        if self._step.sender is not None and self._step.next_sender is not None:
            before, places = self._places(self._step.sender), self._places(self._step.next_sender)
            for residual, gradient, place in zip(before, gradients, places, strict=True):
                torch.add(residual, gradient, out=place)
        else:
            torch._foreach_copy_(self._places(self._scratch), gradients)
            self._clear_padding(self._scratch)

    def _scatter(self) -> None:
        """Write the averages over the gradients."""
        if self._layout.exempt:
            torch._foreach_copy_(self._exempt_gradients(), self._exempt_places())
        if self._scratch is not None:
            torch._foreach_copy_(self._gradients(), self._places(self._scratch))
        self._look()
        # Not every codec gives zeros back for zeros. What is left of them is not saved, and would tell a run that was
        # resumed from one that was not stopped.
        if self._step.next_sender is not None:
            self._clear_padding(self._step.next_sender)
        if self._step.next_owner is not None:
            for chunk, _, span in self._layout.spans():
                self._step.next_owner[span][chunk.owned(self.rank) :].zero_()

    def _look(self) -> None:
        """Note whether all averages are finite, while they are in the cache."""
        if self._bucket.residuals is not None:
            if self._layout.exempt:
                self._bucket.outcome.note(self._exempt)
            if self._scratch is not None:
                self._bucket.outcome.note(self._scratch)

    def _gradients(self) -> list[Tensor]:
        buffer = self._bucket.buffer
        return [
            view
            for chunk, offset, _ in self._layout.spans()
            for view in chunk.elements(buffer[offset : offset + chunk.numel])
        ]

    def _places(self, matrix: Tensor) -> list[Tensor]:
        return [place for chunk, _, span in self._layout.spans() for place in chunk.places(matrix[:, span])]

    def _clear_padding(self, matrix: Tensor) -> None:
        padding = [p for chunk, _, span in self._layout.spans() for p in chunk.padding(matrix[:, span])]
        if padding:
            torch._foreach_zero_(padding)

    def _exempt_gradients(self) -> list[Tensor]:
        return [self._bucket.buffer[offset : offset + numel] for offset, numel in self._layout.exempt]

    def _exempt_places(self) -> list[Tensor]:
        return list(self._exempt.split([numel for _, numel in self._layout.exempt]))

    def _memory(self, name: str, numel: int) -> Tensor:
        """Memory for so many gradients, used again by a later piece."""
        dtype = self._bucket.buffer.dtype
        return self._take(f"{name} {self._slot}", numel * dtype.itemsize).view(dtype)
