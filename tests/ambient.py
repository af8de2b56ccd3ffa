"""What may surround a call: process-wide and thread-wide states of torch that must not change any number.

`surrounded(name)` enters one of `SURROUNDINGS` and restores what was before. A test that takes the fixture `ambient`
(conftest.py) runs once in each. In ranks, which are processes of their own, `surround_calls` lets every call of a
module's functions run in the next one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

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


def surround_calls(module: Any, functions: Sequence[str], leave_out: Sequence[str] = ()) -> None:
    """Let each call of these functions of `module` run in the next of the surroundings, from now on."""
    names = itertools.cycle([None, *(name for name in SURROUNDINGS if name not in leave_out)])

    def surrounding(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            name = next(names)
            try:
                with surrounded(name):
                    return function(*args, **kwargs)
            except Exception as error:
                error.add_note(f"in the surroundings {name!r}")
                raise

        return call

    for name in functions:
        setattr(module, name, surrounding(getattr(module, name)))
