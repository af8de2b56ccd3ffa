"""Fixtures for every suite: `device` gives a test each device that the machine has."""

from __future__ import annotations

import pytest
import torch

from cases import CODECS
from narrowcast import Codec

DEVICES = [pytest.param("cpu")]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=CODECS, ids=lambda name: name.replace("table=", "")[:48])
def codec(request: pytest.FixtureRequest) -> Codec:
    """Each codec of the table in cases.py."""
    return CODECS[request.param]
