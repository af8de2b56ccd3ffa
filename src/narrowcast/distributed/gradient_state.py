"""What a `GradientCompression` remembers, as it is saved: tensors and plain values, one state per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.distributed.feedback import Residuals
from narrowcast.distributed.gradient_options import Mode
from narrowcast.errors import StateDictError

VERSION = 1
KEYS = {"version", "step", "seed", "codec", "error_feedback", "ranks", "rank", "sender", "owner"}


def check(state: Mapping[str, Any], mode: Mode, numels: Mapping[str, int] | None) -> None:
    if not isinstance(state, Mapping) or not set(state) >= KEYS:
        raise StateDictError(
            "state: this is not what GradientCompression.state_dict() returns; it lacks "
            f"{sorted(KEYS - set(state)) if isinstance(state, Mapping) else 'everything'}."
        )
    if state["version"] != VERSION:
        raise StateDictError(f"state: version {state['version']!r}, and this narrowcast knows {VERSION}. Update it.")
    if numels is not None:
        strange = [name for name in {**state["sender"], **state["owner"]} if name not in numels]
        strange += [name for name, kept in state["sender"].items() if kept.numel() != numels.get(name, kept.numel())]
        if strange:
            raise StateDictError(
                f"state: residuals for {', '.join(sorted(strange)[:5])}, which this model does not have in that size. "
                "The state is of another model; load the one saved with this one."
            )
    if mode is False and (state["sender"] or state["owner"]):
        raise StateDictError(
            f"state: holds residuals (error_feedback={state['error_feedback']!r}), and error_feedback is False here. "
            "Pass the same error_feedback as in the run that was saved."
        )


def check_world(residuals: Residuals | None, state: Mapping[str, Any]) -> None:
    there = state["rank"], state["ranks"]
    here = there if residuals is None else (residuals.rank, residuals.ranks)
    if state["ranks"] and there != here:
        raise StateDictError(
            f"state: taken by rank {there[0]} of {there[1]}, loaded by rank {here[0]} of {here[1]}. Residuals "
            "belong to a rank: load on each rank what that rank saved, on as many ranks. To start without "
            'residuals, load {**state, "sender": {}, "owner": {}, "ranks": 0, "rank": 0}.'
        )


def load_residuals(residuals: Residuals | None, state: Mapping[str, Any]) -> None:
    """Go on with the residuals of a state: of the same rank of as many."""
    check_world(residuals, state)
    if residuals is not None and state["ranks"]:
        names = {*state["sender"], *state["owner"]}
        residuals.load({name: (state["sender"].get(name), state["owner"].get(name)) for name in names})
