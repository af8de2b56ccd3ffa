"""Progress bars: on stderr, so that stdout is the result's, and gone when the work is done."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def bytes_bar(*, shown: bool = True) -> Progress:
    """A bar that counts bytes."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown, transient=True)
