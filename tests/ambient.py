"""What may surround a call: process-wide and thread-wide states of torch that must not change any number.

`surrounded(name)` enters one of `SURROUNDINGS` and restores what was before. A test that takes the fixture `ambient`
(conftest.py) runs once in each.

A suite that says `pytestmark = pytest.mark.ambient` runs in each of them without a word in its tests: there the
surroundings are entered at every call of the library (`at_calls`), so that what a test makes, and what it compares
with, is what it is elsewhere. In ranks, which are processes of their own, `surround_in_turn` lets every call of a
module's functions run in the next one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.codecs import registry


@contextlib.contextmanager
def _set(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    """A state of the whole process. Where it is there already nothing is changed, nor restored: another thread does."""
    before = get()
    if before == value:
        yield
        return
    put(value)
    try:
        yield
    finally:
        put(before)


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.get_default_dtype, torch.set_default_dtype, dtype)


def _deterministic() -> AbstractContextManager[None]:
    return _set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def _threads(count: int) -> AbstractContextManager[None]:
    return _set(torch.get_num_threads, torch.set_num_threads, count)


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


FUNCTIONS = ("codec", "encode", "decode", "quantize_", "dequantize_", "save", "load")
CODEC = ("encode", "encode_matrix", "decode", "decode_sum", "decode_sum_encode", "linear", "max_error")
MODULE = ("forward", "decoded", "dequantize", "from_float", "_apply", "_load_from_state_dict")


def at_calls(name: str, patch: pytest.MonkeyPatch) -> None:
    """Surround every call of the library, until `patch` is undone; codecs are made anew."""
    registry._remembered.cache_clear()
    for function in FUNCTIONS:
        patch.setattr(nc, function, _surrounding(lambda: name, getattr(nc, function)))
    kinds: list[tuple[type, tuple[str, ...]]] = [(nc.Codec, CODEC)]
    bases = {base for kind in vars(nc.nn).values() if isinstance(kind, type) for base in kind.__mro__}
    kinds += [(kind, MODULE) for kind in bases if kind.__module__.startswith("narrowcast.")]
    for kind, methods in kinds:
        for method in set(methods) & set(vars(kind)):
            patch.setattr(kind, method, _surrounding(lambda: name, vars(kind)[method]))


def surround_in_turn(module: Any, functions: Sequence[str], leave_out: Sequence[str] = ()) -> None:
    """Let each call of these functions of `module` run in the next of the surroundings, from now on."""
    names = itertools.cycle([None, *(name for name in SURROUNDINGS if name not in leave_out)])
    for function in functions:
        setattr(module, function, _surrounding(lambda: next(names), getattr(module, function)))


def _surrounding(name_of_next: Callable[[], str | None], function: Any) -> Any:
    if isinstance(function, classmethod):
        return classmethod(_surrounding(name_of_next, function.__func__))

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        name = name_of_next()
        try:
            with surrounded(name):
                return function(*arguments, **options)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in the surroundings {name!r}")
            raise

    return call
