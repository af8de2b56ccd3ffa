"""Progress bars on stderr. They disappear when the work is done, and are not drawn where stderr is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def bytes_bar(*, shown: bool = True) -> Progress:
    """A bar that counts bytes."""
    return _bar(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), shown=shown)


def share_bar(work: str) -> Progress:
    """A bar that shows the share of `work` that is done, and its current item."""
    return _bar(TextColumn(work), BarColumn(), TextColumn("{task.percentage:.0f}% {task.description}"))


def _bar(*columns: ProgressColumn, shown: bool = True) -> Progress:
    console = Console(stderr=True)
    # Into a file or a pipe, rich would still write the last state or an empty line.
    disable = not (shown and console.is_terminal)
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=disable, transient=True)
