"""What is wanted of a layer whose output is added to something: that the sum is right, not the output alone.

The output of a residual branch is added to the hidden states that entered the block. In a rounded model these are not
what they were, and the branch can make up for it. So with y + r in the unrounded model and r' in the rounded one, the
output that is wanted is y + r - r'.

Sums are found by what torch adds while a batch runs (a dropout between is followed). An output that anything else reads
too is wanted as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowcast.nn.rounding.recording import input_of
from narrowcast.nn.rounding.sums import ADDITIONS


class Watched:
    """One call of a layer: its input, its output, and what the output is added to."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.added: Tensor | None = None
        self.uses = 0


@contextmanager
def watching_calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Watched]]]:
    """The calls of modules, by the names given here, in order."""
    calls: dict[str, list[Watched]] = {name: [] for name in modules}
    watch = _Watch()

    def called(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], y: Tensor) -> None:
        call = Watched(input_of(args, kwargs), y)
        calls[name].append(call)
        watch.follow(y, call)

    hooks = [module.register_forward_hook(partial(called, name), with_kwargs=True) for name, module in modules.items()]
    try:
        with watch:
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def wanted_output(now: Watched, before: Watched) -> Tensor:
    """What a layer should give for the input of `now`; `before` is the same call in the unrounded model."""
    if now.added is None or before.added is None or now.added.shape != before.added.shape:
        return before.y
    return before.y.float() + (before.added.float() - now.added.float())


class _Watch(TorchFunctionMode):
    """Follows outputs of layers to where they are added."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, tuple[Tensor, Watched]] = {}  # the tensor stays: another one could take its id

    def follow(self, y: Tensor, call: Watched) -> None:
        self._calls[id(y)] = y, call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "__get__":  # its shape, its dtype
            return func(*args, **kwargs)
        followed = [self._calls[id(value)][1] for value in _flat([*args, *kwargs.values()]) if id(value) in self._calls]
        if followed and func is F.dropout:
            result = func(*args, **kwargs)
            self.follow(result, followed[0])
            return result
        for call in followed:
            call.uses += 1
            call.added = _other_term(call, func, args, kwargs, self._calls) if call.uses == 1 else None
        return func(*args, **kwargs)


def _other_term(
    call: Watched, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, calls: Mapping[int, Any]
) -> Tensor | None:
    """What an output is added to; None if it is not just added to a tensor of its shape."""
    if func not in ADDITIONS or kwargs or len(args) != 2 or not all(isinstance(term, Tensor) for term in args):
        return None
    one, other = args if calls.get(id(args[0]), (None, None))[1] is call else args[::-1]
    return other.clone() if other.shape == one.shape else None  # a copy: it may be added to in place


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
