"""The gradients of a chunk, side by side: a matrix with one row per owner, and the exempt elements end to end.

A bucket of DDP holds gradients one after the other. They are brought into this form to be reduced, and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.gradients.layout import ChunkLayout


class SideBySide:
    """Memory of a collective for a chunk of `bucket` [numel], which a later chunk uses again."""

    def __init__(
        self, collective: Collective, bucket: Tensor, layout: ChunkLayout, index: int, exempt_numel: int | None = None
    ) -> None:
        self._bucket, self._layout = bucket, layout
        self._collective, self._slot = collective, index % collective.wire.chunks
        numel = layout.exempt_numel
        self.exempt = self._memory("exempt", numel if exempt_numel is None else exempt_numel)
        """[numel], or more: the rest is padding."""
        self._exempt_places = list(self.exempt[:numel].split([count for _, count in layout.exempt])) if numel else []
        rows = layout.ranks
        self.matrix = self._memory("gradients", rows * layout.columns).view(rows, layout.columns)
        """[ranks, columns]"""

    def gather_exempt(self) -> None:
        """Bring the exempt elements here."""
        _copy(self._exempt_gradients(), self._exempt_places)
        _zero([self.exempt[self._layout.exempt_numel :]])

    def gather(self) -> None:
        """Bring all other gradients here; zeros fill the rest."""
        _copy(self.gradients(), self.places(self.matrix))
        _zero(self._layout.padding(self.matrix))

    def scatter(self) -> None:
        """Write everything that is here over the gradients."""
        _copy(self._exempt_places, self._exempt_gradients())
        _copy(self.places(self.matrix), self.gradients())

    def gradients(self) -> list[Tensor]:
        """The gradients of the sections in the bucket."""
        return [
            view
            for section, offset, _ in self._layout.spans()
            for view in section.elements(self._bucket[offset : offset + section.numel])
        ]

    def places(self, matrix: Tensor) -> list[Tensor]:
        """Where they lie in a matrix of this shape."""
        return [place for section, _, span in self._layout.spans() for place in section.places(matrix[:, span])]

    def _exempt_gradients(self) -> list[Tensor]:
        return [self._bucket[offset : offset + numel] for offset, numel in self._layout.exempt]

    def _memory(self, name: str, numel: int) -> Tensor:
        dtype = self._bucket.dtype
        return self._collective.encoder.take(f"{name} {self._slot}", numel * dtype.itemsize).view(dtype)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(list(targets), list(sources))


def _zero(tensors: Sequence[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(list(tensors))
