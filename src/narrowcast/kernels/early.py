"""Whether a product may read its weights, and attention its cache, before the kernel before it has ended.

A kernel that starts while the one before it ends sees what that one wrote only once it has waited for it. So it waits
before it reads anything, weights too: whoever calls may just have encoded or gathered them. A decoder that takes one
step after another knows that its weights were written long ago. What is in its cache was written before the step: each
step begins with a kernel that waits for all before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_here = threading.local()


@contextlib.contextmanager
def weights_written_long_ago() -> Iterator[None]:
    """Let products that are launched in here read weights first, and wait then."""
    before = may_read_weights_early()
    _here.ready = True
    try:
        yield
    finally:
        _here.ready = before


def may_read_weights_early() -> bool:
    return getattr(_here, "ready", False)
