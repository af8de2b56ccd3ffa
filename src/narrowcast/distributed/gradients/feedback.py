"""Error feedback: what a quantization lost is kept, and added to what is sent next.

Each of a reduction's two quantizations has its own residual, in fp32. The sender's is as large as the gradients; the
owner's, of the sums, is 1/ranks of that. After each, *sent + residual == meant*: exactly so where rounding to nearest
leaves a difference that fp32 holds, which it does for the integer codecs.

What the sender means to send is gradient + residual, and lies in the residual's own memory until it is sent: besides
the residuals no memory is taken. Where something was not finite, nothing was lost that would be worth sending, and
the residual is zero: it stays finite whatever comes.

A step that fails when ranks have agreed leaves no residuals in its bucket: who knows what has arrived of them.

Residuals are kept by parameter. `Residuals` lays them out as a piece needs them, and moves them when DDP rebuilds its
buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowcast.distributed.coder import Coder
from narrowcast.distributed.gradients.columns import Chunk, PieceLayout, chunks
from narrowcast.distributed.gradients.options import Mode
from narrowcast.distributed.gradients.telemetry import Probe
from narrowcast.distributed.piece import Strip


class FeedbackStrip(Strip):
    """A strip whose quantizations may have residuals, and may be probed.

    With `keeps`, the parts are a sender's residuals to which gradients have been added. `owner` is the residual of the
    part that this rank owns.
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
        probe: Probe | None,
    ) -> None:
        super().__init__(coder, parts, results, key)
        self._keeps = keeps
        self._owner = owner
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
            if self._owner is not None:
                leave_residual(self._owner.copy_(meant), arrived)
        if self._keeps:
            mine.zero_()  # it went in whole

    def add(self, inbox: Tensor, rank: int, divisor: int) -> None:
        super().add(inbox, rank, divisor)
        if self._keeps:
            self.parts[rank].zero_()  # it went in whole

    def _fp32(self, name: str, numel: int) -> Tensor:
        return self.coder.take(name, 4 * numel).view(torch.float32)


def leave_residual(meant: Tensor, sent: Tensor) -> None:
    """Turn what was meant into what is still owed."""
    meant.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)


class Residuals:
    """The residuals of one rank, by parameter. Without `owners`, sums are not quantized and have none."""

    def __init__(self, mode: Mode, ranks: int, rank: int, owners: bool = True) -> None:
        self.mode = mode
        self.owners = owners
        self.ranks = ranks
        self.rank = rank
        self._matrices: dict[PieceLayout, tuple[Tensor | None, Tensor | None]] = {}
        self._places: dict[tuple[str, int], tuple[PieceLayout, Chunk, Tensor | None, Tensor | None]] = {}
        self._loaded: dict[str, tuple[Tensor | None, Tensor | None]] = {}

    def of(self, piece: PieceLayout, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The sender's residuals of a piece [ranks, columns], and the owner's [columns]; None where there are none."""
        found = self._matrices.get(piece)
        if found is None:
            columns = piece.columns
            sender = torch.zeros(piece.ranks, columns, device=device) if self.mode is True else None
            owner = torch.zeros(columns, device=device) if self.owners else None
            found = self._matrices[piece] = sender, owner
            for chunk, _, span in piece.spans():
                rows = None if sender is None else sender[:, span]
                self._move_in(piece, chunk, rows, None if owner is None else owner[span])
        return found

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """All there are: the sender's, and the owner's."""
        places = self._places.values()
        return [p[2] for p in places if p[2] is not None], [p[3] for p in places if p[3] is not None]

    def by_name(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Each parameter's residuals, flat: the sender's, and the owner's of the elements that this rank owns."""
        named = dict(self._loaded)
        for (name, _), (_, chunk, _, _) in self._places.items():
            if name not in named:
                named[name] = self._gather(name, chunk)
        return named

    def load(self, named: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
        """Forget what there is, and start from these."""
        self._matrices.clear()
        self._places.clear()
        self._loaded = dict(named)

    def forget(self, pieces: Sequence[PieceLayout]) -> None:
        """Owe nothing any more of what these pieces hold."""
        for piece in pieces:
            for residual in self._matrices.get(piece, ()):
                if residual is not None:
                    residual.zero_()

    def _move_in(self, piece: PieceLayout, chunk: Chunk, sender: Tensor | None, owner: Tensor | None) -> None:
        key = chunk.name, chunk.start
        old = self._places.get(key)
        if old is not None:
            home, _, old_sender, old_owner = old
            if sender is not None and old_sender is not None:
                sender.copy_(old_sender)
            if owner is not None and old_owner is not None:
                owner.copy_(old_owner)
            self._matrices.pop(home, None)  # were it used again, it would start from here
        elif chunk.name in self._loaded:
            self._settle(chunk, sender, owner)
        self._places[key] = piece, chunk, sender, owner

    def _settle(self, chunk: Chunk, sender: Tensor | None, owner: Tensor | None) -> None:
        loaded_sender, loaded_owner = self._loaded[chunk.name]
        if sender is not None and loaded_sender is not None:
            for place, values in zip(chunk.places(sender), chunk.elements(loaded_sender), strict=True):
                place.copy_(values)
        if owner is not None and loaded_owner is not None:
            count = chunk.owned(self.rank)
            owner[:count].copy_(loaded_owner[chunk.start : chunk.start + count])
        if all((chunk.name, c.start) in self._places for c in _others(chunk)):
            del self._loaded[chunk.name]

    def _gather(self, name: str, like: Chunk) -> tuple[Tensor | None, Tensor | None]:
        sender = torch.zeros(like.numel) if self.mode is True else None
        owned = max(0, min(like.part, like.numel - self.rank * like.part))
        owner = torch.zeros(owned) if self.owners else None
        for chunk in (like, *_others(like)):
            _, _, matrix, row = self._places[name, chunk.start]
            if sender is not None and matrix is not None:
                for place, values in zip(chunk.places(matrix), chunk.elements(sender), strict=True):
                    values.copy_(place)
            if owner is not None and row is not None:
                count = chunk.owned(self.rank)
                owner[chunk.start : chunk.start + count].copy_(row[:count])
        return sender, owner


def _others(chunk: Chunk) -> list[Chunk]:
    return [c for c in chunks(chunk.name, chunk.numel, chunk.ranks, chunk.part) if c.start != chunk.start]
