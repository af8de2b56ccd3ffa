"""What may surround a call: process-wide and thread-wide states of torch that must not change any number.

`surrounded(name)` enters one of `SURROUNDINGS` and restores what was before. A test that takes the fixture `ambient`
(conftest.py) runs once in each; ranks of a process group, which are processes of their own, call `surrounded`
themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default dtype bf16": lambda: _default_dtype(torch.bfloat16),
    "default dtype fp64": lambda: _default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": _deterministic,
    "three threads": lambda: _threads(3),
}
if torch.cuda.is_available():
    SURROUNDINGS["default device cuda"] = lambda: torch.device("cuda")
    SURROUNDINGS["side stream"] = _side_stream
    SURROUNDINGS["autocast cuda"] = lambda: torch.autocast("cuda", dtype=torch.bfloat16)


@contextlib.contextmanager
def surrounded(name: str | None) -> Iterator[None]:
    """Run in the surroundings of that name; None for plain ones."""
    with contextlib.nullcontext() if name is None else SURROUNDINGS[name]():
        yield
