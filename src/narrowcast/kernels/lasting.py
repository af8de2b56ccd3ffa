"""Tensors that outlive the call that makes them: tables of levels, and what kernels make of them.

With mode="reduce-overhead", torch.compile lets a first call allocate from the memory of its CUDA graph, and raises
where something of that call stays. This holds for the thread that calls, so on a GPU such tensors are made in another.
And a tensor made in inference mode cannot be saved for a later backward pass, so none is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def lasting(make: Callable[[], T], device: torch.device) -> T:
    """What `make` returns; what it makes serves every later call, whatever surrounds this one."""
    if torch.compiler.is_compiling():
        return make()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):
            return make()
    torch.cuda.current_stream(device).synchronize()  # what `make` reads is written

    def make_and_wait() -> T:
        with torch.cuda.device(device):
            result = make()
            torch.cuda.current_stream().synchronize()
        return result

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_and_wait).result()
