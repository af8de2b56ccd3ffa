"""PyTorch's own four quantization APIs, under their own names, over this library.

Code that imports one of PyTorch's files runs with only its import line changed. Each module is loaded when it is first
named; none of them implements a codec, a protocol or a kernel of its own.

    narrowcast.compat.quantization         torch.distributed.algorithms._quantization.quantization
    narrowcast.compat.quantization_hooks   torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks
    narrowcast.compat.gpt_fast             benchmarks/gpt_fast/quantize.py of the PyTorch repository
    narrowcast.compat.apot                 torch.ao.quantization.experimental

Where PyTorch's numbers are wrong, these are correct. The docstrings say what differs; docs/migrating.md has a table.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["apot", "gpt_fast", "quantization", "quantization_hooks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. There are: {', '.join(__all__)}.")
    return import_module(f"{__name__}.{name}")
