"""What torchrun says about this process: which of how many it is. Without torchrun, it is the only one."""

from __future__ import annotations

import os


def world() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0
