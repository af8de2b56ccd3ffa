"""What a `GradientCompression` remembers, as it is saved: tensors and plain values, one state per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
