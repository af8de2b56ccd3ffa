"""Every test of the suites below runs twice: plain, and with calls in each of the surroundings of ambient.py in turn.

A new test in them gets that for free. One with many sets of parameters is surrounded with the second of them only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks

SURROUNDED = ("test_async", "test_collectives", "test_exact", "test_functional", "test_mesh", "test_point_to_point")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in SURROUNDED:
        metafunc.fixturenames.append("around_calls")
        metafunc.parametrize("around_calls", ["plain", "surrounded"], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    surrounded: dict[object, list[pytest.Item]] = {}
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("around_calls") == "surrounded":
            surrounded.setdefault((item.path, item.originalname), []).append(item)
    extra = {id(item) for found in surrounded.values() for item in (found[:1] + found[2:] if found[1:] else [])}
    items[:] = [item for item in items if id(item) not in extra]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that forks ranks. It imports torch: on a loaded machine longer than the first test may take."""
    here = Path(__file__).parent
    if not session.config.option.collectonly and any(here in item.path.parents for item in session.items):
        ranks.start_server()


@pytest.fixture
def around_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ranks, "AMBIENT", request.param == "surrounded")
    return str(request.param)
