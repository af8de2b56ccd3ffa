"""Makes narrowcast's operators known to torch, once both are imported.

A program that torch.export or AOTInductor saved calls `torch.ops.narrowcast`. So `import narrowcast` is all that a
process must do to load one, before or after `import torch`. torch itself is not imported here: where it is not there
yet, the operators are registered as soon as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MODULES = ("rows", "linear", "fake_quantize", "integer", "adamw")
"""The modules of kernels/operators that declare operators."""


def register_operators() -> None:
    """Declare every operator."""
    for module in MODULES:
        import_module(f"narrowcast.kernels.operators.{module}")


def register_with_torch() -> None:
    """Declare every operator now, or as soon as torch is imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _AfterTorch())
    elif not getattr(sys.modules["torch"].__spec__, "_initializing", False):
        register_operators()


class _AfterTorch:
    """Finds torch as it would be found without this, and declares the operators when torch has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register_operators()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
