"""`narrowcast doctor --group` on a network in a box: it names the rank whose link is slow."""

from __future__ import annotations

import json
import sys

import pytest
from netlab_run import netlab, networked

pytestmark = pytest.mark.timeout(300)


@networked
def test_the_rank_with_the_slow_link_is_named() -> None:
    doctor = (sys.executable, "-m", "narrowcast.cli", "doctor", "--group", "--json")
    done = netlab("--ranks", "3", "--rate", "200mbit,5mbit,200mbit", "--quiet", "--only", "0", "--", *doctor)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.removeprefix("[0] "))
    assert len(found["slow"]) == 1, found
    assert found["slow"][0].startswith("rank 1: sends at most 0.")
    for i in (0, 2):
        for rate in (found["bytes_per_s"][i][1], found["bytes_per_s"][1][i]):
            assert rate < 1.1 * 5e6 / 8  # no more than the link has; a burst of half a millisecond passes at once
