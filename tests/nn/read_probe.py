"""A probe that notes which weights a running model reads without calling the layer that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SAME_FOR_ROWS = {Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.requires_grad.__get__}  # type: ignore[attr-defined]


class _Noted(Tensor):
    """A weight that tells the probe when a function of torch takes it."""

    note: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, _Noted) and func not in SAME_FOR_ROWS:
                value.note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@contextmanager
def note_reads(model: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """The names of modules, and of the parameters that are read while none of the module's own code runs."""
    reads: set[tuple[str, str]] = set()
    before = {module: type(module) for module in model.modules() if not [*module.children()] and [*module.parameters()]}
    names = {module: name for name, module in model.named_modules()}
    for module, kind in before.items():
        module.__class__ = _probed(kind, names[module], reads)
    try:
        yield reads
    finally:
        for module, kind in before.items():
            module.__class__ = kind


def _probed(kind: type[nn.Module], module: str, reads: set[tuple[str, str]]) -> type[nn.Module]:
    class Probed(kind):  # type: ignore[misc, valid-type]
        running = False

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            type(self).running = True
            try:
                return super().__call__(*args, **kwargs)
            finally:
                type(self).running = False

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if type(self).running or name not in self._parameters or value is None:
                return value
            noted = value.as_subclass(_Noted)
            noted.note = lambda: reads.add((module, name))
            return noted

    Probed.__name__ = kind.__name__
    return Probed
