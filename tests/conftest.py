"""Fixtures for every suite: `device` gives a test each device that the machine has, `ambient` each state of torch that
may surround a call. What takes longest comes first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ambient import SURROUNDINGS, surrounded
from cases import CODECS
from narrowcast import Codec

DEVICES = [pytest.param("cpu")]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Wheels are compiled while another worker has the other tests: at the end, it would wait for them."""
    items.sort(key=lambda item: item.path.name != "test_packaging.py")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SURROUNDINGS)
def ambient(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in each of the surroundings of ambient.py."""
    with surrounded(request.param):
        yield request.param


@pytest.fixture(params=CODECS, ids=lambda name: name.replace("table=", "")[:48])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Each codec of the table in cases.py."""
    return CODECS[request.param]
