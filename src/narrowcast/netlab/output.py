"""What the ranks print, line by line, each with its rank in front: stdout to stdout, stderr to stderr.

A line is passed on when it is whole, so that lines of several ranks never mix. Ranks that are not shown keep their last
lines of stderr, in case they fail.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict, deque
from collections.abc import Collection
from typing import BinaryIO

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
KEPT = 200  # lines: a traceback, and what led to it


class Output:
    """`only`: the ranks to show; none means all."""

    def __init__(self, only: Collection[int] = ()) -> None:
        self.only = frozenset(only)
        self.rest: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self.kept: dict[int, deque[bytes]] = defaultdict(lambda: deque(maxlen=KEPT))

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """What came from a rank's stream, 1 or 2."""
        *whole, self.rest[rank, stream] = (self.rest[rank, stream] + data).split(b"\n")
        for line in whole:
            self.line(rank, stream, line)

    def line(self, rank: int, stream: int, line: bytes) -> None:
        if not self.only or rank in self.only:
            emit(rank, stream, line)
        elif stream == 2:
            self.kept[rank].append(line)

    def finish(self, rank: int) -> None:
        """The rank has ended: pass on a last line without an end."""
        for stream in (1, 2):
            if line := self.rest.pop((rank, stream), b""):
                self.line(rank, stream, line)

    def reveal(self, rank: int) -> None:
        """Show what a rank that was not shown last had to say on stderr."""
        for line in self.kept.pop(rank, ()):
            emit(rank, 2, line)


def emit(rank: int, stream: int, line: bytes) -> None:
    target = sys.stdout if stream == 1 else sys.stderr
    prefix = f"[{rank}]".encode()
    if target.isatty() and not os.environ.get("NO_COLOR"):
        prefix = b"\x1b[%dm%s\x1b[0m" % (COLOURS[rank % len(COLOURS)], prefix)
    binary: BinaryIO = target.buffer
    binary.write(prefix + b" " + line + b"\n")
    binary.flush()
