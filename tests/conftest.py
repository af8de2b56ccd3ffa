"""Fixtures for every suite: `device` gives a test each device that the machine has. What takes longest comes first."""

from __future__ import annotations

import pytest
import torch

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


@pytest.fixture(params=CODECS, ids=lambda name: name.replace("table=", "")[:48])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Each codec of the table in cases.py."""
    return CODECS[request.param]
