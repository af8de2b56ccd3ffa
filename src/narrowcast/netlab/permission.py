"""May this process make networks? Asked before anything is made, so that a refusal leaves nothing behind.

Two capabilities are needed: CAP_SYS_ADMIN to make namespaces and CAP_NET_ADMIN to furnish them. Root has both, except
in most containers. Where plain users may make user namespaces, `unshare` gives both without root.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from .commands import TOOLS, find
from .errors import NetlabError

NEEDED = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12}
CONTAINER = "docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt apparmor=unconfined ..."


def require() -> None:
    """Raise with what is missing and the command that gives it."""
    if sys.platform != "linux":
        raise NetlabError(f"netlab needs Linux: network namespaces exist nowhere else, and this is {sys.platform}.")
    for tool in TOOLS:
        find(tool)
    held = capabilities()
    missing = [name for name, bit in NEEDED.items() if not held >> bit & 1]
    if missing:
        raise NetlabError(
            f"netlab may not make network namespaces: this process lacks {' and '.join(missing)}.\n{fix()}"
        )


def capabilities() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("CapEff:")), 16)


def fix() -> str:
    if os.geteuid() == 0:
        return (
            f"It is root, but in a container that keeps the capability back. Start the container with:\n  {CONTAINER}"
        )
    words = shlex.join([sys.executable, *sys.argv])
    inside = f"mount -t tmpfs run /run && exec {words}"
    lines = f"Run it as root:\n  sudo {words}\n"
    return f"{lines}or, where plain users may make user namespaces:\n  unshare -Urmn sh -c {shlex.quote(inside)}"


def refused() -> str:
    """What to try when the kernel refuses though the capabilities are there."""
    return f"The kernel, or a security module such as AppArmor, refuses. In a container, start it with:\n  {CONTAINER}"
