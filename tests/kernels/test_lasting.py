"""kernels/lasting.py: which thread makes what stays. On a GPU tests/generate/test_steps.py compiles with it."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

import narrowcast as nc
from narrowcast.kernels.cuda import formats
from narrowcast.kernels.lasting import lasting


def test_on_a_cpu_and_while_a_graph_is_captured_the_caller_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lasting(threading.get_ident, torch.device("cpu")) == threading.get_ident()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert lasting(threading.get_ident, torch.device("cuda")) == threading.get_ident()


def test_on_a_gpu_another_thread_makes_it_between_two_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    maker = lasting(threading.get_ident, torch.device("cuda"))
    assert waits == [threading.get_ident(), maker]
    assert maker != threading.get_ident()


def test_what_goes_wrong_is_raised_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(ZeroDivisionError):
        lasting(lambda: 1 // 0, torch.device("cuda"))


def test_numbers_that_a_graph_writes_are_not_those_of_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, device = nc.codec("nf4").recipe(torch.device("cpu")), torch.device("cuda", 0)
    for name, memory in (("_make_numbers", lambda *given: torch.empty(256, 2)), ("_tables", {})):
        monkeypatch.setattr(formats, name, memory)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    of_the_graph = formats.numbers_of(recipe, device)
    capturing[0] = False
    numbers = formats.numbers_of(recipe, device)
    assert numbers is not of_the_graph
    assert formats.numbers_of(recipe, device) is numbers
    capturing[0] = True  # another graph may read what is there
    assert formats.numbers_of(recipe, device) is numbers
