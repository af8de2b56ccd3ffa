"""The residuals of error feedback, from step to step.

They belong to parameters. Chunks ask for them in their own layout; when DDP rebuilds its buckets, or a state dict was
loaded, they move there. held.py holds those of a chunk. A step writes next residuals beside those that it adds. These
count from the next step on, if the step is applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.gradients.error_feedback.held import Floats, HeldInFloats, Memory, StepResiduals, held
from narrowcast.distributed.gradients.error_feedback.outcome import Outcome
from narrowcast.distributed.gradients.layout import ChunkLayout, Section
from narrowcast.distributed.gradients.options import Mode
from narrowcast.distributed.gradients.stats import GradientStats, norm
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.group import Group

Named = dict[str, tuple[Tensor | None, Tensor | None]]
"""By parameter: the sender's residual and the owner's."""
FloatsOf = Callable[[HeldInFloats], Floats]
"""`HeldInFloats.floats`, decoded once for each chunk."""


@dataclass(frozen=True)
class Holder:
    """Whose residuals they are: those of a rank of so many, where ranks share hosts in a place on one of `hosts`."""

    ranks: int
    rank: int
    hosts: int = 0
    """Zero where all ranks are equal."""
    host: int = 0
    place: int = 0
    sharded: bool = False
    """Whether a place has shards of parameters to begin with: a parameter is then what it has of it."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Holder:
        """Whose state it is. One from before hosts were known to narrowcast does not name any."""
        return cls(**{field.name: state.get(field.name, 0) for field in fields(cls)})

    @property
    def row(self) -> int:
        """Its number among those that reduce together."""
        return self.host if self.hosts else self.rank

    def __str__(self) -> str:
        where = f" (place {self.place} on host {self.host} of {self.hosts})" if self.hosts else ""
        return f"rank {self.rank} of {self.ranks}{where}"


def holder_among(ranks: Group | Mesh) -> Holder:
    """This rank, among those who reduce together."""
    if isinstance(ranks, Group):
        return Holder(ranks.size, ranks.rank)
    return Holder(ranks.size, ranks.everyone.rank, ranks.between.size, ranks.between.rank, ranks.within.rank)


class Residuals:
    """The residuals of one rank, by parameter; where ranks share hosts, of its share of the parameter.

    Without `owners`, sums are not quantized and have no residuals.
    """

    def __init__(self, mode: Mode, holder: Holder, owners: bool = True) -> None:
        self.mode = mode
        self.owners = owners
        self.holder = holder
        self.codec: Codec | None = None
        """What they are held in; None: fp32. Set before the first one."""
        self._row = holder.row
        self._chunks: dict[ChunkLayout, HeldInFloats] = {}
        self._places: dict[tuple[str, int], tuple[ChunkLayout, Section, slice, HeldInFloats]] = {}
        """Where the residuals of each section are, by the name of its parameter and its first column."""
        self._loaded: Named = {}
        """Residuals from a state dict that no chunk has asked for yet."""
        self._outcome: Outcome | None = None
        self._reduced: set[HeldInFloats] = set()
        """Those whose next residuals the step under way has written."""

    # -- steps --------------------------------------------------------------------------------------------------------

    def enter(self, outcome: Outcome) -> None:
        """A bucket of this step comes next. If it is another step than before, that one is settled."""
        if outcome is not self._outcome:
            self.settle()
            self._outcome = outcome

    def settle(self) -> None:
        """The step under way is over: if it is applied, its residuals count; if not, those before it do."""
        outcome, self._outcome = self._outcome, None
        reduced, self._reduced = self._reduced, set()
        if outcome is None:
            return
        if outcome.applies:
            for residuals in reduced:
                residuals.commit()
        elif outcome.error is not None or not outcome.complete:
            for residuals in self._chunks.values():
                residuals.roll_back()

    def _is_applied(self) -> bool:
        """Whether the step under way is applied, as far as anyone can tell: no bucket is to come, and no optimizer is
        still to use them. It is not settled: under FSDP2 a pass of another root may go on with it, and fail."""
        outcome = self._outcome
        return outcome is not None and outcome.complete and not outcome.pending() and outcome.applies

    def step_of(self, chunk: ChunkLayout, device: torch.device, memory: Memory) -> StepResiduals:
        """The residuals of a chunk in the step under way."""
        residuals = self._of(chunk, device)
        return residuals.step(residuals in self._reduced, memory)

    def reduced(self, chunks: Iterable[ChunkLayout]) -> None:
        """The step under way has written the next residuals of these chunks."""
        self._reduced.update(self._chunks[chunk] for chunk in chunks if chunk.sections)

    # -- by chunk and by parameter ------------------------------------------------------------------------------------

    def of(self, chunk: ChunkLayout, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The sender's residuals of a chunk [ranks, columns], and the owner's [columns]; None where there are none."""
        return self._of(chunk, device).floats()

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """All residuals: the sender's, and the owner's."""
        floats_of = self._floats_now()
        places = [(span, *floats_of(residuals)) for _, _, span, residuals in self._places.values()]
        senders = [sender[:, span] for span, sender, _ in places if sender is not None]
        owners = [owner[span] for span, _, owner in places if owner is not None]
        return senders, owners

    def measure(self, stats: GradientStats) -> None:
        """Write down how large they are."""
        sender, owner = self.tensors()
        stats.residual_norm, stats.owner_residual_norm = norm(sender), norm(owner)
        stats.residual_bytes = self.nbytes()

    def nbytes(self) -> int:
        """The memory that they take."""
        chunks = {id(residuals): residuals for *_, residuals in self._places.values()}
        return sum(tensor.nbytes for residuals in chunks.values() for tensor in residuals.tensors())

    def by_name(self) -> Named:
        """Each parameter's residuals, flat: the sender's, of what it sends, and the owner's, of what it owns."""
        named, floats_of = dict(self._loaded), self._floats_now()
        for (name, _), (_, section, _, _) in self._places.items():
            if name not in named:
                named[name] = self._gather(name, section, floats_of)
        return named

    def load(self, named: Named) -> None:
        """Drop all residuals, and start from these."""
        self._outcome = None
        self._reduced.clear()
        self._chunks.clear()
        self._places.clear()
        self._loaded = dict(named)

    def _floats_now(self) -> FloatsOf:
        """Those that the next step adds, if it begins now."""
        applied = self._is_applied()
        return functools.cache(lambda residuals: residuals.floats(applied and residuals in self._reduced))

    def _of(self, chunk: ChunkLayout, device: torch.device) -> HeldInFloats:
        residuals = self._chunks.get(chunk)
        if residuals is None:
            floats: Floats = (
                _zeros((chunk.ranks, chunk.columns), device) if self.mode is True else None,
                _zeros((chunk.columns,), device) if self.owners else None,
            )
            residuals = self._chunks[chunk] = held(self.codec, chunk.aligned_runs(), *floats)
            floats_of = _floats_of()
            for section, _, span in chunk.spans():
                self._move_in(section, span, floats, floats_of)
                self._places[section.name, section.start] = chunk, section, span, residuals
            residuals.store(*floats)
        return residuals

    def _move_in(self, section: Section, span: slice, floats: Floats, floats_of: FloatsOf) -> None:
        """Bring a section's residuals from where they were: another chunk, or a state dict."""
        place = self._places.get((section.name, section.start))
        if place is not None:
            old_chunk, _, old_span, old = place
            (sender, owner), (old_sender, old_owner) = floats, floats_of(old)
            if sender is not None and old_sender is not None:
                sender[:, span].copy_(old_sender[:, old_span])
            if owner is not None and old_owner is not None:
                owner[span].copy_(old_owner[old_span])
            if self._chunks.get(old_chunk) is old:  # if that chunk is used again, it starts from here
                del self._chunks[old_chunk]
        elif section.name in self._loaded:
            self._take_loaded(section, span, floats)

    def _take_loaded(self, section: Section, span: slice, floats: Floats) -> None:
        (sender, owner), (loaded_sender, loaded_owner) = floats, self._loaded[section.name]
        if sender is not None and loaded_sender is not None:
            _copy(section.elements(loaded_sender), section.places(sender[:, span]))
        if owner is not None and loaded_owner is not None:
            count = section.owned(self._row)
            owner[span][:count].copy_(loaded_owner[section.start : section.start + count])
        others = (other for other in section.all() if other.start != section.start)
        if all((section.name, other.start) in self._places for other in others):
            del self._loaded[section.name]

    def _gather(self, name: str, like: Section, floats_of: FloatsOf) -> tuple[Tensor | None, Tensor | None]:
        """All of a parameter's residuals; `like` is one of its sections."""
        sender = _zeros((like.numel,)) if self.mode is True else None
        owned = max(0, min(like.part, like.numel - self._row * like.part))
        owner = _zeros((owned,)) if self.owners else None
        for section in like.all():
            _, _, span, residuals = self._places[name, section.start]
            held_sender, held_owner = floats_of(residuals)
            if sender is not None and held_sender is not None:
                _copy(section.places(held_sender[:, span]), section.elements(sender))
            if owner is not None and held_owner is not None:
                count = section.owned(self._row)
                owner[section.start : section.start + count].copy_(held_owner[span][:count])
        return sender, owner


def _floats_of() -> FloatsOf:
    return functools.cache(lambda residuals: residuals.floats())


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _zeros(shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)
