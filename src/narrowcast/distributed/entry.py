"""How a public collective is entered: torch.compile does not look into it, and a call that is refused counts.

The other ranks make a call that this rank refuses (an int tensor, a codec that does not exist, an argument too many).
If it were not counted here, the next call of this rank would meet that one of theirs: a sum of two different calls,
which nobody notices. So a call that raises before a lane has taken it fails as any other does: on every rank, once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from narrowcast.distributed import arguments
from narrowcast.distributed.meshes import refuse_by_hosts, refuse_to_mesh
from narrowcast.distributed.transport.group import group_for, last_device, pair_for
from narrowcast.distributed.transport.lane import accepted

P = ParamSpec("P")
T = TypeVar("T")

Refuse = Callable[[str, dict[str, Any], BaseException], None]
"""Tells the other ranks that this one refuses the call of that name with these arguments."""


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """A function that torch.compile leaves alone: a break in the graph.

    `torch.compiler.disable` says the same, but loads the compiler when a module that uses it is imported.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


def collective(function: Callable[P, T]) -> Callable[P, T]:
    """A collective of all ranks of `group=`."""
    return _entered(function, _refuse_to_group)


def message(function: Callable[P, T]) -> Callable[P, T]:
    """A message between this rank and another, `dst` or `src`."""
    return _entered(function, _refuse_to_pair)


def _entered(function: Callable[P, T], refuse: Refuse) -> Callable[P, T]:
    name, positional = function.__name__, list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        before = accepted()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if accepted() == before and dist.is_available() and dist.is_initialized():
                with contextlib.suppress(Exception):  # the arguments may be anything, and the error is on its way
                    refuse(name, {**dict(zip(positional, args, strict=False)), **kwargs}, error)
            raise

    return uncompiled(call)


def _refuse_to_group(op: str, given: dict[str, Any], error: BaseException) -> None:
    group = given.get("group")
    if isinstance(group, DeviceMesh):
        refuse_to_mesh(group, _device(given, c10d._get_default_group()), error)
        return
    members = arguments.members(group, op)
    if members is None or members.size() == 1:
        return
    if op == "all_reduce" and group is None:
        refuse_by_hosts(members, _device(given, members), error)
    else:
        group_for(members, _device(given, members)).refuse(op, error)


def _refuse_to_pair(op: str, given: dict[str, Any], error: BaseException) -> None:
    members = arguments.members(given.get("group"), op)
    if members is None:
        return
    sends = op in ("send", "isend")
    name = "dst" if sends else "src"
    peer = arguments.one_of(given.get(name), given.get(f"group_{name}"), members, name, f"group_{name}")
    if peer != members.rank():
        ends = (members.rank(), peer) if sends else (peer, members.rank())
        tag = arguments.message_tag(given.get("tag", 0))
        pair_for(members, _device(given, members), *ends, tag).refuse(op, error)


def _device(given: dict[str, Any], group: dist.ProcessGroup) -> torch.device:
    """The device that a call was about."""
    tensor = next(_tensors(given.values()), None)
    return last_device(group) if tensor is None else tensor.device


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from (each for each in value if isinstance(each, Tensor))
