"""The step under way of an FSDP2 model: which of its parameter groups it has come to.

Passes of several roots may be one step (fsdp/steps.py), and a run may be saved between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class UnderWay:
    """Parameter groups that passes of this step have reduced, or come to and left out."""

    def __init__(self) -> None:
        self.groups: Sequence[Sequence[str]] = ()
        """The names of the parameters of each group; none where the model is not FSDP2's."""
        self.reduced: set[int] = set()
        self.left_out: set[tuple[int, int]] = set()
        """Those that a pass found without a gradient, with the number of the pass. A block that is used twice is found
        so before its gradient is there, but in the same pass."""

    def is_over(self, index: int, task: int) -> bool:
        """Whether a group that is reduced in this pass belongs to the next step."""
        before = any(other == index and its_task != task for other, its_task in self.left_out)
        return before or not self.reduced or index in self.reduced

    def begin(self, task: int) -> None:
        """A step begins in this pass."""
        self.reduced.clear()
        self.left_out = {(index, its_task) for index, its_task in self.left_out if its_task == task}

    def state(self) -> dict[str, list[str]]:
        """The parameters that it has come to, by name: none once it has come to all of them, and is over."""
        came_to = self.reduced | {index for index, _ in self.left_out}
        if len(came_to) == len(self.groups):
            came_to.clear()
        return {"under_way": [name for index in sorted(came_to) for name in self.groups[index]]} if self.groups else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a state that does not say was saved when a step was over."""
        names = set(state.get("under_way", ()))
        self.reduced = {index for index, group in enumerate(self.groups) if not names.isdisjoint(group)}
        self.left_out = set()
