"""narrowcast: quantized tensors in flight, at rest and in training.

import narrowcast as nc

payload = nc.encode(x, "int4")      # four bits an element, and a scale per block
y = nc.decode(payload)

The names are those of `narrowcast.public`, which is loaded, and torch with it, when the first of them is used. Only
the operators of exported programs are there at once, wherever torch is (registration.py).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowcast.registration import register_with_torch

if TYPE_CHECKING:
    from narrowcast.public import *  # noqa: F403

__version__ = "0.1.0"
register_with_torch()


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = import_module("narrowcast.public")
    names = {each: getattr(public, each) for each in public.__all__} | {"__all__": public.__all__}
    globals().update(names)
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return names[name]


def __dir__() -> list[str]:
    return [*globals(), *import_module("narrowcast.public").__all__]
