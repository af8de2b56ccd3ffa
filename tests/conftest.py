"""Fixtures for every suite: `device` gives a test each device that the machine has, `codec` each codec, `ambient` each
state of torch that may surround a call. What takes longest comes first.

A suite with `pytestmark = pytest.mark.ambient` runs in each of these states besides: with one codec of every family,
since all of them in all states would take half an hour. A test there that a state cannot apply to says so:
`@pytest.mark.not_in("inference mode", reason="...")`; without a name it is in none of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported: a thread of OpenMP that waits for work sleeps, where by default it spins and takes the
# processor from the other worker's tests. A loop of small layers took 0.14 s of processor time in place of 1.4 (two
# threads, two cores, a load of 13).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import narrowcast as nc
from ambient import SURROUNDINGS, at_calls, surrounded
from cases import CODECS, OF_EACH_FAMILY
from interpreter import patch_language_once
from narrowcast import Codec
from narrowcast.codecs import registry

DEVICES = [pytest.param("cpu")]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_language_once()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All codecs in plain surroundings; in the others, codecs of each family."""
    marks = list(metafunc.definition.iter_markers("parametrize"))
    takes_codec = "codec" in metafunc.fixturenames and not any("codec" in mark.args[0] for mark in marks)
    if metafunc.definition.get_closest_marker("ambient") is None:
        if takes_codec:
            metafunc.parametrize("codec", CODECS, ids=_short, indirect=True)
        return
    states = [name for name in SURROUNDINGS if name not in _excluded(metafunc.definition)]
    if takes_codec:
        pairs = [(None, name) for name in CODECS] + [(state, name) for state in states for name in OF_EACH_FAMILY]
        ids = [_short(name) if state is None else f"{state}-{name}" for state, name in pairs]
        metafunc.parametrize(("surroundings", "codec"), pairs, ids=ids, indirect=True)
    else:
        metafunc.parametrize("surroundings", [None, *states], ids=lambda state: state or "plain", indirect=True)


def _short(name: str) -> str:
    return name.replace("table=", "")[:48]


def _excluded(item: pytest.Item) -> set[str]:
    """The surroundings that a test says it is not for, which takes a reason."""
    found: set[str] = set()
    for mark in item.iter_markers("not_in"):
        assert mark.kwargs.get("reason"), f"{item.name}: not_in needs a reason"
        assert set(mark.args) <= {*SURROUNDINGS, *GPU_ONLY}, f"{item.name}: not_in{mark.args} names no surroundings"
        found |= set(mark.args or SURROUNDINGS)
    return found


GPU_ONLY = ("default device cuda", "side stream", "autocast cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Wheels are compiled while another worker has the other tests: at the end, it would wait for them."""
    items[:] = _few_codecs(items)
    items.sort(key=lambda item: item.path.name != "test_packaging.py")


def _few_codecs(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test's own list of codecs, too, only those of each family meet all surroundings, or else the first."""
    kept, met = [], {}
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        named = [value for value in params.values() if isinstance(value, str) and value in CODECS]
        if params.get("surroundings") is not None and named and named[0] not in OF_EACH_FAMILY:
            test = (item.nodeid.partition("[")[0], params["surroundings"])
            if met.setdefault(test, item) is not item:
                continue
        kept.append(item)
    return kept


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SURROUNDINGS)
def ambient(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in each of the surroundings of ambient.py."""
    with surrounded(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """What surrounds each call of the library in this test: plain (None), but in suites marked `ambient`."""
    state = getattr(request, "param", None)
    if state is None:
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        at_calls(state, patch)
        yield state
    registry._remembered.cache_clear()


@pytest.fixture
def codec(request: pytest.FixtureRequest, surroundings: str | None) -> Codec:
    """Each codec of the table in cases.py; made anew where something surrounds the call."""
    found = CODECS[request.param]
    return found if surroundings is None else nc.codec(found.config())
