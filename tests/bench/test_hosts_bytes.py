"""What leaves a host, counted by the kernel: one encoded tensor, there and back, however many ranks share the host."""

from __future__ import annotations

from typing import Any

import pytest
from netlab_run import networked

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    import hosts

    return hosts.run("2x2", calls=2)


@networked
def test_a_host_sends_within_five_percent_of_one_encoded_tensor_there_and_back(rows: list[dict[str, Any]]) -> None:
    by_hosts = [row for row in rows if row["form"].endswith("by hosts")]
    assert {row["what"] for row in by_hosts} == {"all_reduce", "DDP"}
    for row in by_hosts:
        assert 0.999 < row["share"] < 1.05, row


@networked
def test_taken_for_equal_the_two_ranks_of_a_host_send_twice_that(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["form"].endswith("flat"):
            assert 1.9 < row["share"] < 2.1, row
