"""A progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown(what: str, total: int, progress: bool | None) -> Iterator[Callable[[], None]]:
    """A function to call once for each of `total` items. A bar is drawn on a terminal, or wherever `progress=True`."""
    if progress is False or (progress is None and not sys.stderr.isatty()) or total == 0:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
