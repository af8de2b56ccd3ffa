"""A model as it was: what a rounding that was interrupted puts back.

A snapshot keeps each module's class, attributes and dictionaries (parameters, buffers, hooks, children). Tensors are
kept, not copied: nothing that rounds a model writes into them. So a snapshot costs no memory until parameters are
replaced; from then on it keeps the float ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class _Module(NamedTuple):
    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]
    contents: dict[str, Any]
    """Copies of the dictionaries and sets among the attributes."""


class Snapshot:
    """Every module of a model as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [_take(module) for module in model.modules()]

    def restore(self) -> None:
        for module, kind, attributes, contents in self._modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():  # the same objects: handles of hooks refer to them
                attributes[name].clear()
                attributes[name].update(content)


def _take(module: nn.Module) -> _Module:
    attributes = dict(vars(module))
    contents = {name: value.copy() for name, value in attributes.items() if isinstance(value, (dict, set))}
    return _Module(module, type(module), attributes, contents)
