"""What leaves a host, counted by the kernel: one encoded tensor, there and back, however many ranks share the host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from netlab_run import networked

pytestmark = pytest.mark.timeout(300)


def counted() -> list[dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    import hosts

    return hosts.run("2x2", calls=2)


@networked
def test_a_host_sends_within_five_percent_of_one_encoded_tensor_there_and_back() -> None:
    rows = counted()
    by_hosts = [row for row in rows if row["form"].endswith("by hosts")]
    assert {row["what"] for row in by_hosts} == {"all_reduce", "DDP"}
    for row in by_hosts:
        assert 0.999 < row["share"] < 1.05, row
    flat = [row for row in rows if row["form"].endswith("flat")]
    assert flat
    assert all(1.9 < row["share"] < 2.1 for row in flat), "taken for equal, the two ranks of a host send twice that"
