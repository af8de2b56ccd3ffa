"""Whether a product may read its weights before the kernel before it has ended, and which weights are read after it.

A kernel that starts while the one before it ends sees what that one wrote only once it has waited for it. So it waits
before it reads anything, weights too: whoever calls may just have encoded or gathered them. A decoder that takes one
step after another knows that its weights were written long ago, and in which order they are read. So a product may
bring the weights of the next ones to the L2 cache: while norms, gates and attention run, which read little, memory
works on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

WINDOW = 16 << 20
"""Bytes after a product's own that it brings to the L2 cache; bench/decode_h200.py on an H200, whose cache has 50 MB."""

Upcoming = Mapping[int, tuple[Tensor, ...]]
"""Where the rows of a product lie, and what is read after them: up to two runs of bytes."""

_here = threading.local()
_NONE: Upcoming = {}


@contextlib.contextmanager
def weights_written_long_ago(upcoming: Upcoming = _NONE) -> Iterator[None]:
    """Let products that are launched in here read weights first, and wait then; `upcoming`: upcoming_weights."""
    before = may_read_weights_early(), getattr(_here, "upcoming", _NONE)
    _here.ready, _here.upcoming = True, upcoming
    try:
        yield
    finally:
        _here.ready, _here.upcoming = before


def may_read_weights_early() -> bool:
    return getattr(_here, "ready", False)


def upcoming_after(rows: Tensor) -> tuple[Tensor, ...]:
    """What is read after these rows."""
    upcoming: Upcoming = getattr(_here, "upcoming", _NONE)
    return upcoming.get(rows.data_ptr(), ())


def upcoming_weights(order: Sequence[Tensor], window: int | None = None) -> Upcoming:
    """What each product of a cycle brings to the cache, from weights in the order in which they are read.

    Each brings what lies within `window` bytes after its own and was not brought by those before it, of at most two
    tensors. Only contiguous weights that begin at a multiple of 16 bytes count.
    """
    window = WINDOW if window is None else window
    fit = [one for one in order if one.is_contiguous() and one.numel() and one.data_ptr() % 16 == 0]
    flat = [one.detach().view(-1).view(torch.uint8) for one in fit]
    upcoming: dict[int, tuple[Tensor, ...]] = {}
    ready = 0  # bytes after the product's own that are on their way
    for number in range(2 * len(flat)):  # twice: the first ones come after the last ones
        at = number % len(flat)
        ready = max(0, ready - flat[at].numel())
        runs, ready = _runs_between(flat, at, ready, window)
        upcoming[flat[at].data_ptr()] = runs
    return upcoming


def _runs_between(flat: Sequence[Tensor], at: int, ready: int, window: int) -> tuple[tuple[Tensor, ...], int]:
    """Bytes from `ready` to `window` after flat[at], in at most two runs; and how far they reach."""
    runs: list[Tensor] = []
    begin, reach = 0, ready
    for number in range(at + 1, at + len(flat)):
        one = flat[number % len(flat)]
        first, last = max(reach, begin), min(window, begin + one.numel())
        if first < last and len(runs) < 2:
            run = one[(first - begin) // 16 * 16 : (last - begin) // 16 * 16]
            runs += [run] if run.numel() else []
            reach = last
        begin += one.numel()
        if begin >= window or len(runs) == 2:
            break
    return tuple(runs), reach
