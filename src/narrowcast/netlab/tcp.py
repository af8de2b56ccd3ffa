"""How TCP shares a link (congestion control): what this machine lets namespaces use, and what benchmarks ask for."""

from __future__ import annotations

import sys
from pathlib import Path

SETTINGS = Path("/proc/sys/net/ipv4")
USUAL = "cubic"
"""Linux's default, which results are measured with where the machine allows it."""


def current() -> str:
    """What the machine itself uses."""
    path = SETTINGS / "tcp_congestion_control"
    return path.read_text().strip() if path.exists() else "unknown"


def allowed() -> list[str]:
    """What a namespace may be set to."""
    path = SETTINGS / "tcp_allowed_congestion_control"
    return path.read_text().split() if path.exists() else []


def choose(wish: str = USUAL) -> str:
    """`wish` where namespaces may use it; otherwise what the machine uses, and a line that says so."""
    if wish in allowed() or wish == current():
        return wish
    print(f"netlab: namespaces here may not use TCP {wish}: taking {current()}, the machine's own.", file=sys.stderr)
    return current()
