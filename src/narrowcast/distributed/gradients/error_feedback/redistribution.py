"""Residuals on another number of ranks, or on other hosts.

What counts of the senders' residuals is what they add to the average: over N ranks, 1/N of their sum. So each of the
ranks that hold an element now is given the same residual, such that this stays as it was. An owner's residual belongs
to an element of the average, and goes to whoever owns that element now. With one rank nothing is quantized: both are
added to its gradients, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from narrowcast.distributed.gradients.error_feedback.residuals import Holder
from narrowcast.distributed.gradients.layout import equal_part
from narrowcast.errors import SpecError, StateDictError

Redistribution = Literal["redistribute", "drop"]
State = Mapping[str, Any]


def for_other_ranks(given: State | Sequence[State], how: Redistribution | None, dealable: bool) -> State:
    """What `load_state_dict` was given, as one state that fits any rank; `dealable` says that it may be re-dealt."""
    if how not in (None, "redistribute", "drop"):
        raise SpecError(f'residuals={how!r}: "redistribute", "drop", or None to load what this rank saved.')
    if how == "redistribute" and not dealable:
        raise SpecError('residuals="redistribute": FSDP2 keeps residuals of shards, which torch cuts. Pass "drop".')
    if how is None:
        return cast("State", given)  # which is checked as what it is meant to be
    states = [given] if isinstance(given, Mapping) else list(given) if isinstance(given, (list, tuple)) else []
    if not states or (how == "redistribute" and isinstance(given, Mapping)):
        what = "the states of all ranks that saved, in a list" if how == "redistribute" else "what a rank saved"
        raise StateDictError(f"state: with residuals={how!r} it is {what}, not a {type(given).__name__}.")
    if how == "redistribute":
        _check_all(states)
    first = without_residuals(states[0])
    return {**first, "everyone": states} if how == "redistribute" else first


def without_residuals(state: State) -> dict[str, Any]:
    """The same state of no rank in particular."""
    kept = {key: value for key, value in state.items() if key != "everyone"}
    return {**kept, **asdict(Holder(0, 0)), "sender": {}, "owner": {}}


def redistributed(states: Sequence[State], here: Holder) -> State:
    """What the rank `here` goes on with, from the states of all ranks that saved."""
    dealt = {**without_residuals(states[0]), **asdict(here)}
    totals: dict[str, int] = {}
    for state in states:
        for name, owner in state["owner"].items():
            totals[name] = totals.get(name, 0) + owner.numel()
    for name, numel in totals.items():
        senders, owners = _together(name, numel, states)
        span = _span(numel, here)
        dealt["owner"][name] = owners[span.owned].clone()
        if senders is not None:
            dealt["sender"][name] = senders[span.sent] * (here.ranks / (here.hosts or here.ranks))
    return dealt


def added_to_average(states: Sequence[State], name: str) -> Tensor | None:
    """What the residuals of all ranks that saved add to the average of a parameter, in one step without a codec."""
    numel = sum(state["owner"][name].numel() for state in states if name in state["owner"])
    if not numel:
        return None
    senders, owners = _together(name, numel, states)
    return owners if senders is None else senders + owners


class _Span(NamedTuple):
    sent: slice
    owned: slice


def _span(numel: int, holder: Holder) -> _Span:
    """Which elements of a parameter a rank sends, and which of them it owns (layout.py)."""
    part = equal_part(numel, holder.ranks)
    start = min(numel, holder.place * holder.hosts * part)
    end = min(numel, start + holder.hosts * part) if holder.hosts else numel
    first = min(end, start + holder.row * part)
    return _Span(slice(start, end), slice(first, min(end, first + part)))


def _together(name: str, numel: int, states: Sequence[State]) -> tuple[Tensor | None, Tensor]:
    """What the senders' residuals add to the average, and the owners' residuals, of a whole parameter."""
    owners = torch.zeros(numel, dtype=torch.float32, device="cpu")
    senders = torch.zeros_like(owners) if any(name in state["sender"] for state in states) else None
    for state in states:
        span = _span(numel, Holder.of(state))
        if name in state["owner"]:
            owners[span.owned] = state["owner"][name].cpu()
        if senders is not None and name in state["sender"]:
            senders[span.sent] += state["sender"][name].cpu() / len(states)
    return senders, owners


def _check_all(states: Sequence[State]) -> None:
    """Raise unless these are the states of all ranks of one run, at one step."""
    holders = [Holder.of(state) if isinstance(state, Mapping) else Holder(-1, -1) for state in states]
    ranks = holders[0].ranks if holders else 0
    if holders and all(holder == Holder(0, 0) for holder in holders):
        return  # there are no residuals: nothing has been compressed yet
    if not holders or len(states) != ranks or sorted(holder.rank for holder in holders) != list(range(ranks)):
        told = ", ".join(sorted({f"rank {holder.rank} of {holder.ranks}" for holder in holders})) or "none"
        raise StateDictError(
            f'state: residuals="redistribute" takes the states of all ranks that saved, one of each, got {told}. If '
            'one is lost, load another with residuals="drop".'
        )
    alike = {(state["step"], state["seed"], state["codec"], state["error_feedback"]) for state in states}
    if len(alike) > 1:
        raise StateDictError(f"state: the states are of different steps or runs: {sorted(map(str, alike))[:3]}.")
