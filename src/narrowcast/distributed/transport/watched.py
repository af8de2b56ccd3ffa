"""What knows no time limit of its own, or does not keep it: gloo and NCCL while they connect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def watched(
    name: str,
    action: Callable[[], T],
    pause: float,
    look: Callable[[float], float],
    undo: Callable[[T], object] = lambda result: None,
) -> T:
    """Do it in a thread of its own, and look now and then, first after `pause` seconds, whether it still makes sense.

    `look`, given the seconds so far, returns those until it is to be called next, or raises. Then the thread is left to
    itself: it does not keep the process alive, and `undo` gets what comes of it.
    """
    future: Future[T] = Future()

    def act() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=act, name=name, daemon=True).start()
    start = time.monotonic()
    try:
        while not wait([future], pause).done:
            pause = look(time.monotonic() - start)
    except BaseException:
        future.add_done_callback(lambda late: late.exception() or undo(late.result()))
        raise
    return future.result()
