"""Who shares a host, from what torchrun tells every rank of its own."""

from __future__ import annotations

import pytest

from narrowcast.distributed.transport import hosts


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["2 0", "2 0", "2 1", "2 1"], ((0, 1), (2, 3))),
        (["2 1", "2 0", "2 1", "2 0"], ((0, 2), (1, 3))),  # ranks in turn
        (["3 0"] * 3 + ["3 1"] * 3, ((0, 1, 2), (3, 4, 5))),
        (["2 -"] * 6, ((0, 1), (2, 3), (4, 5))),  # no numbers: side by side
        (["4 0"] * 4, None),  # one host
        (["1 0", "1 1", "1 2", "1 3"], None),  # one rank a host
        (["3 0"] * 3 + ["2 1"] * 2 + ["1 2"], None),  # uneven
        (["3 -"] * 3 + ["2 -"] * 2 + ["1 -"], None),
        (["- -"] * 4, None),  # not started by torchrun
        (["2 0", "2 0", "- -", "2 1"], None),
        (["2 0", "2 0", "2 1", "2 -"], ((0, 1), (2, 3))),
        (["4 0"] * 2 + ["4 1"] * 2, None),  # ranks that are not in the group: not ours to judge
        (["0 -"] * 4, None),
        (["0 0", "0 0", "0 1", "0 1"], None),
        (["9 -"] * 4, None),
    ],
)
def test_hosts_follow_from_what_all_ranks_say(lines: list[str], found: hosts.Hosts | None) -> None:
    assert hosts.hosts_of(lines) == found


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "3"}, "8 3"),
        ({"LOCAL_WORLD_SIZE": "8"}, "8 -"),
        ({}, "- -"),
        ({"LOCAL_WORLD_SIZE": "-1", "GROUP_RANK": "a b"}, "- -"),
        ({"LOCAL_WORLD_SIZE": " ", "GROUP_RANK": ""}, "- -"),
    ],
)
def test_a_rank_says_what_torchrun_told_it(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hosts.mine() == line


def test_only_a_number_of_ranks_that_can_be_shared_evenly_may_have_hosts() -> None:
    assert [ranks for ranks in range(1, 13) if hosts.may_have_hosts(ranks)] == [4, 6, 8, 9, 10, 12]
