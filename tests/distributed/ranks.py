"""Real ranks for tests: one process each, a real process group over gloo, results and errors brought back.

Processes come from a fork server that has imported torch once, so that a group of four starts in well under a second.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import one_gpu
import torch
import torch.distributed as dist
from patience import within

from ambient import surround_in_turn
from ports import free_port

_context = multiprocessing.get_context("forkserver")
# DDP imports torch._dynamo, which takes a process more than a second. Files of tests import pytest and
# narrowcast's names.
IMPORTED = ["torch", "torch._dynamo", "narrowcast.distributed", "narrowcast.kernels.cpu.binding"]
_context.set_forkserver_preload([*IMPORTED, "narrowcast.public", "narrowcast.codecs", "pytest"])


@dataclass
class Outcome:
    """What became of one rank."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


def start_server() -> None:
    """Start the fork server, and wait until it has imported what it is to import."""
    process = _context.Process(target=time.sleep, args=(0,))
    process.start()
    process.join()


AMBIENT = False
"""Whether each call of a collective runs in other surroundings, in turn (conftest.py sets it)."""


def run(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    **options: Any,
) -> list[Any]:
    """Run `function(rank, *args)` on `world` ranks and return what each returned; what went wrong on any is raised."""
    outcomes = outcomes_of(world, function, *args, timeout=timeout, group_timeout=group_timeout, **options)
    failed = {
        rank: outcome.trace or f"it ended with {outcome.exitcode}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None or outcome.exitcode != 0
    }
    if failed:  # all of them: the first may only have seen another one leave
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        told = "\n".join(f"rank {rank} of {world}:\n{trace}" for rank, trace in failed.items())
        raise AssertionError(told) from (errors or [None])[0]
    return [outcome.value for outcome in outcomes]


def outcomes_of(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    init: bool = True,
    tcp: bool = False,
    nccl: bool = False,
    meanwhile: Callable[[list[Any]], None] | None = None,
) -> list[Outcome]:
    """What became of every rank. `meanwhile(processes)` runs here while they do; none may outlive `timeout` seconds,
    of which a machine that has more to do gets more (patience.py).

    The group's store is a file, or with `tcp` a server in the process of rank 0. With `nccl`, CUDA tensors travel over
    NCCL, and all ranks share a GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [Outcome() for _ in range(world)]
        method = f"tcp://127.0.0.1:{free_port()}" if tcp else f"file://{folder}/store"
        pipes, processes = [], []
        for rank in range(world):
            here, there = _context.Pipe(duplex=False)
            stacks = f"{folder}/stacks {rank}"
            target = (rank, world, method, group_timeout, init, nccl, AMBIENT, there, function, args, stacks)
            process = _context.Process(target=_main, args=target, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            if meanwhile is not None:
                meanwhile(processes)
            _collect(pipes, processes, outcomes, time.monotonic() + within(timeout, most=50.0))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_stacks(Path(folder), processes)}") from error
        finally:
            for process in processes:
                process.kill()
                process.join()
    return outcomes


def play(rank: int, scenes: Mapping[str, Callable[[int], Any]]) -> dict[str, Any]:
    """What each scene returned on this rank: many tests can share one launch."""
    found = {}
    for name, scene in scenes.items():
        try:
            found[name] = scene(rank)
        except Exception as error:
            raise AssertionError(f"scene {name}: {type(error).__name__}: {error}") from error
    return found


def _collect(pipes: list[Connection], processes: list[Any], outcomes: list[Outcome], deadline: float) -> None:
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(open_pipes.values())} did not finish in time: they hang")
        for pipe in ready:
            rank = open_pipes.pop(pipe)  # type: ignore[index,arg-type]
            with contextlib.suppress(EOFError):  # it died without a word
                outcomes[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        assert process.exitcode is not None, f"rank {rank} returned but does not exit"
        outcomes[rank].exitcode = process.exitcode


def _stacks(folder: Path, processes: list[Any]) -> str:
    """Where the threads of those that still run are."""
    for process in processes:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGQUIT)
    time.sleep(1.0)
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(folder.glob("stacks *")))


def _main(
    rank: int,
    world: int,
    method: str,
    group_timeout: float,
    init: bool,
    nccl: bool,
    ambient: bool,
    pipe: Connection,
    function: Any,
    args: Any,
    stacks: str,
) -> None:
    faulthandler.register(signal.SIGQUIT, open(stacks, "w"))  # noqa: SIM115 - open until the process ends
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    outcome, start = Outcome(), time.monotonic()
    if nccl:
        os.environ.update(one_gpu.environment(rank))
        torch.cuda.set_device(0)
    if ambient:
        surround_collectives()
    try:
        if init:
            limit = datetime.timedelta(seconds=group_timeout)
            backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
            dist.init_process_group(backend, init_method=method, rank=rank, world_size=world, timeout=limit)
            dist.all_reduce(
                torch.zeros(1)
            )  # a rank that leaves while others still connect makes gloo fail or hang there
            start = time.monotonic()
        outcome.value = function(rank, *args)
    except BaseException as error:
        outcome.error, outcome.trace = _picklable(error), traceback.format_exc()
    outcome.seconds = time.monotonic() - start
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def surround_collectives() -> None:
    """Let every collective of this process run in surroundings that change from call to call."""
    from narrowcast import distributed as ncd

    messages = ["send", "recv", "isend", "irecv"]
    surround_in_turn(ncd, [name for name in ncd.__all__ if name.startswith(("all_", "reduce_", "broad"))] + messages)
    names = ["all_gather", "all_reduce", "all_to_all_single", "reduce_scatter"]
    surround_in_turn(ncd.functional, names, leave_out=["inference mode", "no grad"])  # where nothing has a gradient


def _picklable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
