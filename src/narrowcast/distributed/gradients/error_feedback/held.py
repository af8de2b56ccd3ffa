"""How the residuals of one chunk are held: in fp32, or in rows of a codec; and what a step has of them.

    HeldInFloats   a step adds them as they are, and writes the next ones beside them
    HeldInRows     a step decodes them into memory of its collective, and encodes what is left at its end

Either way a step changes nothing by itself: `commit` makes its residuals those that count. What
`int8` and `bf16` have decoded, they encode again without loss, and no block of a row reaches over two sections
(layout.py). So residuals in rows move to other chunks, and through state dicts, as fp32 numbers, and no bit changes.
What rounding a residual loses is not fed back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.codecs import Codec

Floats = tuple[Tensor | None, Tensor | None]
"""In fp32: the sender's residuals [ranks, columns], and the owner's [columns]; None where there are none."""
Memory = Callable[[str, int], Tensor]
"""`memory(name, numel)`: fp32 that the step under way may use."""


@dataclass(frozen=True)
class StepResiduals:
    """The residuals of a chunk in the step under way: those that are added, and where the next ones go."""

    sender: Tensor | None = None
    owner: Tensor | None = None
    next_sender: Tensor | None = None
    next_owner: Tensor | None = None

    def begin(self) -> None:
        """Bring the residuals to where they are added. Called once, before anything is sent."""

    def end(self) -> None:
        """Keep the next ones. Called once, when they are all there."""


class HeldInFloats:
    """The residuals of a chunk in fp32, and memory for the next ones."""

    def __init__(self, sender: Tensor | None, owner: Tensor | None) -> None:
        self._held: Floats = sender, owner
        self._next: Floats | None = None

    def floats(self, after: bool = False) -> Floats:
        """What they are; `after` the step under way: the next ones. Do not write it."""
        return self._next if after and self._next is not None else self._held

    def store(self, sender: Tensor | None, owner: Tensor | None) -> None:
        """From now on, these are the residuals: tensors in the shapes of the first ones."""
        self._held = sender, owner

    def step(self, again: bool, memory: Memory) -> StepResiduals:
        """For a step; `again` where the chunk is reduced a second time in it, and goes on from its next residuals."""
        if self._next is None:
            self._next = self._made_next()  # what a step does not write of it is zero
        return self._step(self._next if again else self._held, self._next, memory)

    def commit(self) -> None:
        """From now on, the next residuals are the residuals."""
        assert self._next is not None
        self._held, self._next = self._next, self._held

    def roll_back(self) -> None:
        """Drop the next residuals of a step that broke off."""
        self._next = None

    def tensors(self) -> list[Tensor]:
        """All of its memory."""
        return [tensor for tensor in (*self._held, *(self._next or ())) if tensor is not None]

    def _made_next(self) -> Floats:
        sender, owner = (None if tensor is None else torch.zeros_like(tensor) for tensor in self._held)
        return sender, owner

    def _step(self, before: Floats, after: Floats, memory: Memory) -> StepResiduals:
        return StepResiduals(*before, *after)


class Rows:
    """Residuals [n, columns] as bytes [n, nbytes]: each run of columns is a row of the codec, one after the other."""

    def __init__(self, codec: Codec, runs: Sequence[slice]) -> None:
        self._codec, self._runs = codec, runs
        self.columns = runs[-1].stop
        self.nbytes = sum(codec.row_bytes(run.stop - run.start) for run in runs)

    def encode(self, floats: Tensor, out: Tensor) -> None:
        for columns, row in self._places(floats, out):
            self._codec.encode(columns, 0, out=row)

    def decode(self, rows: Tensor, out: Tensor) -> None:
        for columns, row in self._places(out, rows):
            self._codec.decode(row, columns.shape[1], out=columns)

    def _places(self, floats: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for run in self._runs:
            end = start + self._codec.row_bytes(run.stop - run.start)
            yield floats[:, run], rows[:, start:end]
            start = end


class HeldInRows(HeldInFloats):
    """The residuals of a chunk as bytes: the sender's [ranks, nbytes], the owner's [1, nbytes]."""

    def __init__(self, rows: Rows, sender: Tensor | None, owner: Tensor | None) -> None:
        self._rows = rows
        super().__init__(self._encoded(sender), self._encoded(owner))

    def floats(self, after: bool = False) -> Floats:
        sender, owner = (None if data is None else self._decoded(data) for data in super().floats(after))
        return sender, None if owner is None else owner[0]

    def store(self, sender: Tensor | None, owner: Tensor | None) -> None:
        super().store(self._encoded(sender), self._encoded(owner))

    def _encoded(self, floats: Tensor | None) -> Tensor | None:
        if floats is None:
            return None
        floats = floats.view(-1, self._rows.columns)
        data = torch.empty(len(floats), self._rows.nbytes, dtype=torch.uint8, device=floats.device)
        self._rows.encode(floats, data)
        return data

    def _decoded(self, data: Tensor) -> Tensor:
        floats = torch.empty(len(data), self._rows.columns, dtype=torch.float32, device=data.device)
        self._rows.decode(data, floats)
        return floats

    def _step(self, before: Floats, after: Floats, memory: Memory) -> StepResiduals:
        sender, owner = (
            None if data is None else memory(name, len(data) * self._rows.columns).view(len(data), self._rows.columns)
            for name, data in zip(("sender", "owner"), before, strict=True)
        )
        flat = None if owner is None else owner[0]
        floats = zip((sender, owner), before, after, strict=True)
        each = [(a, b, c) for a, b, c in floats if a is not None and b is not None and c is not None]
        return _RowsInStep(sender, flat, sender, flat, self._rows, each)


@dataclass(frozen=True)
class _RowsInStep(StepResiduals):
    """Residuals in fp32 for the time of one step: the next ones take the place of those that are added."""

    rows: Rows | None = None
    each: Sequence[tuple[Tensor, Tensor, Tensor]] = ()
    """In fp32, the bytes before the step, those after it: of the sender, of the owner."""

    def begin(self) -> None:
        for floats, before, _ in self.each:
            assert self.rows is not None
            self.rows.decode(before, floats)

    def end(self) -> None:
        for floats, _, after in self.each:
            assert self.rows is not None
            self.rows.encode(floats, after)


def held(codec: Codec | None, runs: Sequence[slice], sender: Tensor | None, owner: Tensor | None) -> HeldInFloats:
    """These residuals in a codec, with a row for each run of columns; in fp32 where it is None."""
    if codec is None or not runs:
        return HeldInFloats(sender, owner)
    return HeldInRows(Rows(codec, runs), sender, owner)
