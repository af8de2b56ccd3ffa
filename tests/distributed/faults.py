"""Faults for tests: ways in which one real process dies, stops or fails at one exact place of a collective.

Each patch is made inside the process of the rank that is to fail, and nowhere else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast import distributed as ncd
from narrowcast.distributed.coder import Coder
from narrowcast.distributed.wire import HostWire

Action = Callable[[], object]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def run_out_of_memory() -> None:
    raise MemoryError("no room left for codes")


def at(place: str, action: Action) -> None:
    """Do `action` once, the next time that this process comes to a place of a collective."""
    if place == "encoding":
        _before(Coder, "encode", action)
    elif place == "after headers":
        _in_rounds(1, "outgoing", action)
    elif place == "stage one":
        _in_rounds(1, "arrived", action)
    elif place == "between stages":
        _before(Coder, "sum_encode", action)
    elif place == "the sum":
        _before(Coder, "sum", action)
    elif place == "stage two":
        _in_rounds(2, "outgoing", action)
    elif place == "decoding":
        _before(Coder, "decode", action)
    else:
        raise KeyError(place)


def _before(owner: type, name: str, action: Action) -> None:
    plain = getattr(owner, name)

    def acting(self: Any, *args: Any) -> Any:
        setattr(owner, name, plain)
        action()
        return plain(self, *args)

    setattr(owner, name, acting)


def _in_rounds(which: int, moment: str, action: Action) -> None:
    """In the `which`-th exchange of rows from now on: before this rank's first row is sent, or while it is."""
    plain, seen = HostWire.rounds, [0]

    def acting(self: HostWire, outgoing: Any, arrived: Any, *args: Any) -> None:
        def then(callback: Any) -> Any:
            def wrapped(*values: Any) -> Any:
                if HostWire.rounds is not plain:
                    setattr(HostWire, "rounds", plain)  # noqa: B010
                    action()
                return callback(*values)

            return wrapped

        seen[0] += 1
        if seen[0] == which:
            outgoing, arrived = (then(outgoing), arrived) if moment == "outgoing" else (outgoing, then(arrived))
        plain(self, outgoing, arrived, *args)

    setattr(HostWire, "rounds", acting)  # noqa: B010


def data(rank: int, numel: int = 300_000) -> Tensor:
    """Values of a rank. The usual size has rows far larger than those that travel with a header."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def all_reduce(rank: int, world: int, numel: int = 300_000, **options: Any) -> Any:
    return ncd.all_reduce(data(rank, numel), **options)


def all_gather(rank: int, world: int, numel: int = 300_000, **options: Any) -> Any:
    outputs = [torch.empty(numel) for _ in range(world)]
    return ncd.all_gather(outputs, data(rank, numel), **options)


def all_to_all_single(rank: int, world: int, numel: int = 300_000, **options: Any) -> Any:
    source = data(rank, numel // world * world)
    return ncd.all_to_all_single(torch.empty_like(source), source, **options)


def reduce_scatter_tensor(rank: int, world: int, numel: int = 300_000, **options: Any) -> Any:
    output = torch.empty(numel // world)
    return ncd.reduce_scatter_tensor(output, data(rank, len(output) * world), **options)


def broadcast(rank: int, world: int, numel: int = 300_000, **options: Any) -> Any:
    return ncd.broadcast(data(rank, numel), src=0, **options)


OPS = {
    function.__name__: function
    for function in (all_reduce, all_gather, all_to_all_single, reduce_scatter_tensor, broadcast)
}


def call(op: str, rank: int, **options: Any) -> Any:
    return OPS[op](rank, dist.get_world_size(), **options)


def error_of(action: Callable[[], object]) -> tuple[BaseException | None, float]:
    """What `action` raised, and the seconds until it did."""
    start = time.monotonic()
    try:
        action()
    except BaseException as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start
