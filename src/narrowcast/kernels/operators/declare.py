"""How operators are declared: one implementation for CPU and CUDA, and a fake that knows the shapes of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.library import Library, register_fake

Operator = tuple[str, str, Callable[..., Any], Callable[..., Any]]
"""Its name, the rest of its schema, what it does, and what it returns for tensors without memory."""

_home = Library("narrowcast", "DEF")  # type: ignore[no-untyped-call]


def declare(operators: Iterable[Operator]) -> Library:
    """Define operators; returns the library, which `register_autograd` wants."""
    for name, schema, implementation, fake in operators:
        _home.define(name + schema)  # type: ignore[no-untyped-call]
        for device in ("CPU", "CUDA"):
            _home.impl(name, implementation, device)  # type: ignore[no-untyped-call]
        register_fake(f"narrowcast::{name}", fake, lib=_home)
    return _home
