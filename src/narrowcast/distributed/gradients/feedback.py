"""Error feedback: what a quantization lost is kept, and added to what is sent next.

Each of a reduction's two quantizations has its own residual, in fp32. The sender's is as large as the gradients; the
owner's, of the sums, is 1/ranks of that. After each, *sent + residual == meant*: exactly so where rounding to nearest
leaves a difference that fp32 holds, which it does for the integer codecs.

What the sender means to send is gradient + residual. It is put beside the residual, into the memory in which the next
residual is left. So a step changes nothing by itself: what it leaves counts from the next step on, if the step is
applied (`outcome.py`). A step that is skipped, or fails, leaves residuals as they were, to the bit. That takes the
memory of the residuals twice.

Residuals are kept by parameter. `Residuals` lays them out as a piece needs them, and moves them when DDP rebuilds its
buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.distributed.gradients.columns import Chunk, PieceLayout, chunks
from narrowcast.distributed.gradients.options import Mode
from narrowcast.distributed.gradients.outcome import Outcome
from narrowcast.distributed.gradients.telemetry import Probe
from narrowcast.distributed.protocols.encoder import Coder
from narrowcast.distributed.protocols.pipeline import Strip


class FeedbackStrip(Strip):
    """A strip whose quantizations may have residuals, and may be probed.

    With `keeps`, the parts are a sender's residuals to which gradients have been added, and are turned into those that
    are left. `owner` is the residual of the part that this rank owns; what is left of it goes to `owner_next`, which
    may be the same.
    """

    def __init__(
        self,
        coder: Coder,
        parts: Sequence[Tensor],
        results: Sequence[Tensor],
        key: int,
        *,
        keeps: bool,
        owner: Tensor | None,
        owner_next: Tensor | None,
        probe: Probe | None,
    ) -> None:
        super().__init__(coder, parts, results, key)
        self._keeps = keeps
        self._owner = owner
        self._owner_next = owner_next
        self._probe = probe
        self._under_way: list[tuple[int, Tensor]] = []

    def encode(self, rank: int, peer: int, out: Tensor) -> None:
        super().encode(rank, peer, out)
        self._under_way.append((peer, out))

    def sent(self) -> None:
        under_way, self._under_way = self._under_way, []
        if not self._keeps and self._probe is None:
            return
        for peer, data in under_way:
            meant = self.parts[peer]
            if meant.numel():
                arrived = self._fp32("arrived", meant.numel())
                self.coder.decode(data, arrived[None])
                if self._probe is not None:
                    self._probe.sender(meant, arrived)
                if self._keeps:
                    leave_residual(meant, arrived)

    def add_up(self, inbox: Tensor, rank: int, divisor: int, out: Tensor) -> None:
        mine, result = self.parts[rank], self.results[rank]
        if self._owner is None and self._probe is None:
            super().add_up(inbox, rank, divisor, out)
        else:
            meant = self._fp32("sum", mine.numel())
            self.coder.sum(inbox, mine, rank, divisor, meant)
            if self._owner is not None:
                meant.add_(self._owner)
            self.coder.encode(meant[None], out, rank, len(self.parts), self.key)
            self.decode(rank, out)
            arrived = result
            if result.dtype != torch.float32:
                arrived = self._fp32("arrived", mine.numel())
                self.coder.decode(out, arrived[None])
            if self._probe is not None:
                self._probe.owner(meant, arrived)
            if self._owner_next is not None:
                leave_residual(self._owner_next.copy_(meant), arrived)
        if self._keeps:
            mine.zero_()  # the own part is not quantized: its residual is zero

    def add(self, inbox: Tensor, rank: int, divisor: int) -> None:
        super().add(inbox, rank, divisor)
        if self._keeps:
            self.parts[rank].zero_()  # the own part is not quantized: its residual is zero

    def _fp32(self, name: str, numel: int) -> Tensor:
        return self.coder.take(name, 4 * numel).view(torch.float32)


def leave_residual(meant: Tensor, sent: Tensor) -> None:
    """Turn what was meant into the residual. Where one is not finite a result is not, and the residual never counts."""
    meant.sub_(sent)


class Kept:
    """The residuals of a piece: the sender's [ranks, columns], the owner's [columns], and memory for the next ones."""

    def __init__(self, sender: Tensor | None, owner: Tensor | None) -> None:
        self.sender = sender
        self.owner = owner
        self._next: tuple[Tensor | None, Tensor | None] | None = None

    @property
    def next(self) -> tuple[Tensor | None, Tensor | None]:
        """Where a step leaves its residuals: outside of what it writes, zeros."""
        if self._next is None:
            self._next = _zeros_like(self.sender), _zeros_like(self.owner)
        return self._next

    def commit(self) -> None:
        """What the step has left are the residuals from now on."""
        before = self.sender, self.owner
        (self.sender, self.owner), self._next = self.next, before

    def roll_back(self) -> None:
        """Let go of what a step has left half-way."""
        self._next = None

    def tensors(self) -> list[Tensor]:
        """All memory that is taken."""
        return [t for t in (self.sender, self.owner, *(self._next or ())) if t is not None]


@dataclass(frozen=True)
class Step:
    """The residuals of a piece in the step under way: those that are added, and where those that are left go."""

    sender: Tensor | None
    owner: Tensor | None
    next_sender: Tensor | None
    next_owner: Tensor | None


class Residuals:
    """The residuals of one rank, by parameter. Without `owners`, sums are not quantized and have none."""

    def __init__(self, mode: Mode, ranks: int, rank: int, owners: bool = True) -> None:
        self.mode = mode
        self.owners = owners
        self.ranks = ranks
        self.rank = rank
        self._pieces: dict[PieceLayout, Kept] = {}
        self._places: dict[tuple[str, int], tuple[PieceLayout, Chunk, slice, Kept]] = {}
        self._loaded: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._outcome: Outcome | None = None
        self._reduced: set[Kept] = set()
        """Those of which the step under way has left the next ones."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def enter(self, outcome: Outcome) -> None:
        """A bucket of this step comes next. If it is another step than before, that one is settled."""
        if outcome is not self._outcome:
            self.settle()
            self._outcome = outcome

    def settle(self) -> None:
        """The step under way is over: what it has left counts if it is applied, and else what was before."""
        outcome, self._outcome = self._outcome, None
        reduced, self._reduced = self._reduced, set()
        if outcome is None:
            return
        if outcome.applies:
            for kept in reduced:
                kept.commit()
        elif outcome.error is not None or not outcome.complete:
            for kept in self._pieces.values():
                kept.roll_back()

    def settle_if_complete(self) -> None:
        """Settle the step under way, unless it is not over."""
        if self._outcome is not None and self._outcome.complete:
            self.settle()

    def step_of(self, piece: PieceLayout, device: torch.device) -> Step:
        """The residuals of a piece in the step under way."""
        kept = self._kept(piece, device)
        before = kept.next if kept in self._reduced else (kept.sender, kept.owner)  # a second time in one step
        return Step(*before, *kept.next)

    def reduced(self, pieces: Iterable[PieceLayout]) -> None:
        """The step under way has left the residuals of these pieces."""
        self._reduced.update(self._pieces[piece] for piece in pieces if piece.chunks)

    # -- by piece and by parameter ------------------------------------------------------------------------------------

    def of(self, piece: PieceLayout, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The sender's residuals of a piece [ranks, columns], and the owner's [columns]; None where there are none."""
        kept = self._kept(piece, device)
        return kept.sender, kept.owner

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """All there are: the sender's, and the owner's."""
        senders = [kept.sender[:, span] for _, _, span, kept in self._places.values() if kept.sender is not None]
        owners = [kept.owner[span] for _, _, span, kept in self._places.values() if kept.owner is not None]
        return senders, owners

    def nbytes(self) -> int:
        """The memory that is taken."""
        kept = {id(kept): kept for *_, kept in self._places.values()}
        return sum(4 * tensor.numel() for one in kept.values() for tensor in one.tensors())

    def by_name(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Each parameter's residuals, flat: the sender's, and the owner's of the elements that this rank owns."""
        named = dict(self._loaded)
        for (name, _), (_, chunk, _, _) in self._places.items():
            if name not in named:
                named[name] = self._gather(name, chunk)
        return named

    def load(self, named: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
        """Forget what there is, and start from these."""
        self._outcome = None
        self._reduced.clear()
        self._pieces.clear()
        self._places.clear()
        self._loaded = dict(named)

    def _kept(self, piece: PieceLayout, device: torch.device) -> Kept:
        found = self._pieces.get(piece)
        if found is None:
            columns = piece.columns
            found = self._pieces[piece] = Kept(
                _zeros((piece.ranks, columns), device) if self.mode is True else None,
                _zeros((columns,), device) if self.owners else None,
            )
            for chunk, _, span in piece.spans():
                self._move_in(piece, chunk, span, found)
        return found

    def _move_in(self, piece: PieceLayout, chunk: Chunk, span: slice, kept: Kept) -> None:
        key = chunk.name, chunk.start
        old = self._places.get(key)
        if old is not None:
            home, _, old_span, before = old
            if kept.sender is not None and before.sender is not None:
                kept.sender[:, span].copy_(before.sender[:, old_span])
            if kept.owner is not None and before.owner is not None:
                kept.owner[span].copy_(before.owner[old_span])
            if self._pieces.get(home) is before:  # were it used again, it would start from here
                del self._pieces[home]
        elif chunk.name in self._loaded:
            self._settle_loaded(chunk, span, kept)
        self._places[key] = piece, chunk, span, kept

    def _settle_loaded(self, chunk: Chunk, span: slice, kept: Kept) -> None:
        loaded_sender, loaded_owner = self._loaded[chunk.name]
        if kept.sender is not None and loaded_sender is not None:
            for place, values in zip(chunk.places(kept.sender[:, span]), chunk.elements(loaded_sender), strict=True):
                place.copy_(values)
        if kept.owner is not None and loaded_owner is not None:
            count = chunk.owned(self.rank)
            kept.owner[span][:count].copy_(loaded_owner[chunk.start : chunk.start + count])
        if all((chunk.name, c.start) in self._places for c in _others(chunk)):
            del self._loaded[chunk.name]

    def _gather(self, name: str, like: Chunk) -> tuple[Tensor | None, Tensor | None]:
        sender = _zeros((like.numel,)) if self.mode is True else None
        owned = max(0, min(like.part, like.numel - self.rank * like.part))
        owner = _zeros((owned,)) if self.owners else None
        for chunk in (like, *_others(like)):
            _, _, span, kept = self._places[name, chunk.start]
            if sender is not None and kept.sender is not None:
                for place, values in zip(chunk.places(kept.sender[:, span]), chunk.elements(sender), strict=True):
                    values.copy_(place)
            if owner is not None and kept.owner is not None:
                count = chunk.owned(self.rank)
                owner[chunk.start : chunk.start + count].copy_(kept.owner[span][:count])
        return sender, owner


def _zeros(shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)


def _zeros_like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)


def _others(chunk: Chunk) -> list[Chunk]:
    return [c for c in chunks(chunk.name, chunk.numel, chunk.ranks, chunk.part) if c.start != chunk.start]
