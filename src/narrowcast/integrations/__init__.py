"""Where narrowcast meets other libraries. Each module is loaded when it is first named, and its library with it.

    narrowcast.integrations.transformers         NarrowcastConfig: quantize in `from_pretrained`, save, load again
    narrowcast.integrations.compressed_tensors   export: a folder in the format that vLLM and others read

Both need `pip install 'narrowcast[hf]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["compressed_tensors", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. There are: {', '.join(__all__)}.")
    return import_module(f"{__name__}.{name}")
