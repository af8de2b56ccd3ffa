"""Calls of `ip`, `tc` and `bridge`: many lines at a time, and errors that quote the line and what the kernel said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable

from .errors import NetlabError

TOOLS = ("ip", "tc", "bridge")
SECONDS = 30
# Where the tools are when the PATH of a plain user, or of sudo, does not say.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
FAILED = re.compile(r"Command failed -:(\d+)")


def find(tool: str) -> str:
    found = shutil.which(tool, path=PATH)
    if not found:
        raise NetlabError(
            f"netlab needs the command `{tool}`, which is not installed. "
            "It comes with iproute2: `apt install iproute2` or `dnf install iproute iproute-tc`."
        )
    return found


def run(tool: str, *words: str, namespace: str | None = None, lines: Iterable[str] = (), hint: str = "") -> str:
    """Run a tool, or one batch of `lines` through it, in a namespace. Returns what it printed."""
    batch = list(lines)
    command = [find(tool), *(["-n", namespace] if namespace else []), *(["-batch", "-"] if batch else []), *words]
    try:
        # In a session of its own, so that Ctrl-C at the terminal does not break a set-up or a clean-up in the middle.
        done = subprocess.run(
            command, input="\n".join(batch), capture_output=True, text=True, timeout=SECONDS, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise NetlabError(f"`{' '.join(command)}` did not end within {SECONDS} s.") from None
    if done.returncode:
        raise NetlabError(complaint(tool, " ".join(command[1:]), batch, done.stderr, hint))
    return done.stdout


def complaint(tool: str, words: str, batch: list[str], stderr: str, hint: str) -> str:
    failed = FAILED.search(stderr)
    said = " ".join(FAILED.sub("", stderr).split()) or "nothing"
    line = batch[int(failed[1]) - 1] if failed and batch else words
    return f"`{tool} {line}` failed; it said: {said}" + (f"\n{hint}" if hint else "")
