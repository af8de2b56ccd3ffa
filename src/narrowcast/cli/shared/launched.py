"""The rank of this process and the number of processes, as torchrun sets them; 0 and 1 without torchrun."""

from __future__ import annotations

import os


def world() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0
