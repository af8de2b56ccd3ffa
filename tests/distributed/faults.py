"""Faults for tests: ways in which one real process dies, stops or fails at one exact place of a collective.

Each patch is made inside the process of the rank that is to fail, and nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from patience import within
from torch import Tensor

from narrowcast import distributed as ncd
from narrowcast.distributed.collective import Collective
from narrowcast.distributed.encoder import Encoder
from narrowcast.distributed.transport.agreement import Header, statement_bytes
from narrowcast.distributed.transport.gloo import _HEADERS, EAGER, GlooWire
from narrowcast.distributed.transport.group import Group
from narrowcast.distributed.transport.wire import WireError

Action = Callable[[], object]
NUMEL = 4 * 2 * EAGER
"""So many elements that even int8 rows for one of four ranks do not travel with a header."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    # To this thread, which then does not run on until another one gets the signal; it stops the whole process.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + within(10, most=40.0)
    while not is_stopped(pid):
        assert time.monotonic() < deadline, "the victim never came to the place where it stops"
        time.sleep(0.01)


@contextlib.contextmanager
def gloo_held() -> Iterator[None]:
    """Hold gloo's own threads of this process, so that it notices nothing meanwhile.

    A thread that gets SIGUSR1 calls pause() of the C library, and goes on when it gets SIGUSR2.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGUSR1, ctypes.cast(libc.pause, ctypes.c_void_p))
    libc.signal(signal.SIGUSR2, ctypes.cast(libc.getpid, ctypes.c_void_p))
    tasks = Path("/proc/self/task").iterdir()
    threads = [int(task.name) for task in tasks if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    assert threads, "gloo's threads have another name: look for it in /proc/PID/task/*/comm"
    try:
        for thread in threads:
            libc.tgkill(os.getpid(), thread, signal.SIGUSR1)
        time.sleep(0.1)
        yield
    finally:
        for thread in threads:
            libc.tgkill(os.getpid(), thread, signal.SIGUSR2)


def run_out_of_memory() -> None:
    raise MemoryError("no room left for codes")


def at(place: str, action: Action, *, in_this_thread: bool = False, after: int = 0) -> None:
    """Do `action` once, the next time that this process, or thread, comes to a place of a collective; or after it came
    there so many times."""
    thread = threading.get_ident() if in_this_thread else None
    patch = functools.partial(_patch, thread=thread, left=after)
    if place == "encoding":
        patch(Encoder, "encode", action)
    elif place == "a header":
        patch(GlooWire, "_send", action, after=True, when=lambda row, peer, tag: tag == _HEADERS)
    elif place == "before a statement":  # of a second trip: ranks know that they disagree
        patch(Header, "statement", action)
    elif place == "a statement":
        size = statement_bytes(dist.get_world_size())
        patch(GlooWire, "_send", action, after=True, when=lambda row, peer, tag: tag == _HEADERS and len(row) == size)
    elif place == "after headers":
        patch(GlooWire, "agree", action, after=True)
    elif place == "stage one":  # a row is on the wire
        patch(GlooWire, "_send", action, after=True, when=lambda row, peer, tag: tag != _HEADERS and len(row) > 0)
    elif place == "between stages":
        patch(Encoder, "decode_sum_encode", action)
    elif place == "stage two":  # nothing of it was sent yet
        patch(Encoder, "decode_sum_encode", action, after=True)
    elif place == "passing on":
        patch(Collective, "share", action)
    elif place == "failing":
        patch(Group, "_fail", action)
    elif place == "decoding":
        patch(Encoder, "decode", action)
    else:
        raise KeyError(place)


def _patch(
    owner: type,
    name: str,
    action: Action,
    *,
    after: bool = False,
    when: Callable[..., bool] = lambda *args: True,
    thread: int | None = None,
    left: int = 0,
) -> None:
    plain = getattr(owner, name)
    came = itertools.count()

    def acting(self: Any, *args: Any, **options: Any) -> Any:
        now = when(*args) and thread in (None, threading.get_ident()) and next(came) == left
        if now:
            setattr(owner, name, plain)
        if now and not after:
            action()
        result = plain(self, *args, **options)
        if now and after:
            action()
        return result

    setattr(owner, name, acting)


def data(rank: int, numel: int = NUMEL) -> Tensor:
    """Values of a rank."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def all_reduce(rank: int, world: int, numel: int = NUMEL, **options: Any) -> Any:
    return ncd.all_reduce(data(rank, numel), **options)


def all_gather(rank: int, world: int, numel: int = NUMEL, **options: Any) -> Any:
    outputs = [torch.empty(numel) for _ in range(world)]
    return ncd.all_gather(outputs, data(rank, numel), **options)


def all_to_all_single(rank: int, world: int, numel: int = NUMEL, **options: Any) -> Any:
    source = data(rank, numel // world * world)
    return ncd.all_to_all_single(torch.empty_like(source), source, **options)


def reduce_scatter_tensor(rank: int, world: int, numel: int = NUMEL, **options: Any) -> Any:
    output = torch.empty(numel // world)
    return ncd.reduce_scatter_tensor(output, data(rank, len(output) * world), **options)


def broadcast(rank: int, world: int, numel: int = NUMEL, **options: Any) -> Any:
    return ncd.broadcast(data(rank, numel), src=0, **options)


OPS = {
    function.__name__: function
    for function in (all_reduce, all_gather, all_to_all_single, reduce_scatter_tensor, broadcast)
}


def call(op: str, rank: int, **options: Any) -> Any:
    return OPS[op](rank, dist.get_world_size(), **options)


def blamed(action: Action) -> tuple[int, str, float]:
    """Whose fault it was that `action` failed, of what kind, and after how many seconds."""
    start = time.monotonic()
    try:
        action()
    except WireError as error:
        return error.peer, error.kind, time.monotonic() - start
    raise AssertionError("nothing was noticed")


def error_of(action: Callable[[], object]) -> tuple[BaseException | None, float]:
    """What `action` raised, and the seconds until it did."""
    start = time.monotonic()
    try:
        action()
    except BaseException as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start
