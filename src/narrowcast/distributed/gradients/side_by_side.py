"""The gradients of a chunk, side by side: a matrix with one row per owner, and the exempt elements end to end.

A bucket of DDP holds gradients one after the other. They are brought into this form to be reduced, and back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.distributed.collective import Collective
from narrowcast.distributed.gradients.layout import ChunkLayout


class SideBySide:
    """Memory of a collective for a chunk of `buffers`, each flat, which the chunk after `slots` others uses again."""

    def __init__(
        self,
        collective: Collective,
        buffers: Sequence[Tensor],
        layout: ChunkLayout,
        index: int,
        exempt_numel: int | None = None,
        slots: int = 0,
    ) -> None:
        self._buffers, self._layout = buffers, layout
        self._collective, self._slot = collective, index % (slots or collective.wire.chunks)
        numel = layout.exempt_numel
        self.exempt = self._memory("exempt", numel if exempt_numel is None else exempt_numel)
        """[numel], or more: the rest is padding."""
        self._exempt_gradients = self._runs(layout.exempt)
        lengths = [gradients.numel() for gradients in self._exempt_gradients]
        self._exempt_places = list(self.exempt[:numel].split(lengths)) if numel else []
        rows = layout.ranks
        self.matrix = self._memory("gradients", rows * layout.columns).view(rows, layout.columns)
        """[ranks, columns]"""

    def gather_exempt(self) -> None:
        """Bring the exempt elements here."""
        _copy(self._exempt_gradients, self._exempt_places)
        _zero([self.exempt[self._layout.exempt_numel :]])

    def gather(self) -> None:
        """Bring all other gradients here; zeros fill the rest."""
        _copy(self.gradients, self.places(self.matrix))
        _zero(self._layout.padding(self.matrix))

    def scatter(self) -> None:
        """Write everything that is here over the gradients."""
        _copy(self._exempt_places, self._exempt_gradients)
        _copy(self.places(self.matrix), self.gradients)

    @functools.cached_property
    def gradients(self) -> list[Tensor]:
        """The gradients of the sections in the buffers."""
        gradients = []
        for shape, offset, strides, _, _ in self._layout.places:
            buffer, at = self._at(offset)
            gradients.append(buffer.as_strided(shape, strides, buffer.storage_offset() + at))
        return gradients

    def places(self, matrix: Tensor) -> list[Tensor]:
        """Where they lie in a matrix of this shape."""
        stride, first = matrix.stride(0), matrix.storage_offset()
        return [
            matrix.as_strided(shape, (1,) if len(shape) == 1 else (stride, 1), first + row * stride + column)
            for shape, _, _, row, column in self._layout.places
        ]

    def _runs(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Spans (offset, numel) of the buffers, neighbours of one buffer as one."""
        runs: list[tuple[Tensor, int, int]] = []
        for offset, numel in spans:
            buffer, start = self._at(offset)
            stop = start + numel
            if runs and runs[-1][0] is buffer and runs[-1][2] == start:
                _, start, _ = runs.pop()
            runs.append((buffer, start, stop))
        return [buffer[start:stop] for buffer, start, stop in runs]

    def _at(self, offset: int) -> tuple[Tensor, int]:
        """The buffer in which an element lies, and its place there: buffers are counted end to end."""
        for buffer in self._buffers[:-1]:
            if offset < buffer.numel():
                return buffer, offset
            offset -= buffer.numel()
        return self._buffers[-1], offset

    def _memory(self, name: str, numel: int) -> Tensor:
        dtype = self._buffers[0].dtype
        return self._collective.encoder.take(f"{name} {self._slot}", numel * dtype.itemsize).view(dtype)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(list(targets), list(sources))


def _zero(tensors: Sequence[Tensor]) -> None:
    if tensors:
        torch._foreach_zero_(list(tensors))
