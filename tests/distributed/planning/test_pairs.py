"""Every pair of ranks: the turns they take, what is measured by real ranks, and which link is called slow."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import run

from narrowcast import errors
from narrowcast.distributed.planning.pairs import MOST_ALONE, Pairs, find_slow, measure_pairs, schedule


@pytest.mark.parametrize("size", [2, 3, 7, MOST_ALONE, MOST_ALONE + 1, 24, 33])
def test_every_pair_has_one_turn_and_no_rank_is_in_two_pairs_of_a_turn(size: int) -> None:
    turns = schedule(size)
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(i, j) for i in range(size) for j in range(i + 1, size)]
    for turn in turns:
        ranks = [rank for pair in turn for rank in pair]
        assert len(set(ranks)) == len(ranks)
    alone = all(len(turn) == 1 for turn in turns)
    assert alone == (size <= MOST_ALONE)


def measured(rank: int) -> Pairs:
    return measure_pairs()


def test_ranks_measure_all_pairs_both_ways_and_have_the_same_matrices() -> None:
    found = run(3, measured)
    assert found[0] == found[1] == found[2]
    for i in range(3):
        for j in range(3):
            rate, latency = found[0].bytes_per_s[i][j], found[0].latency_s[i][j]
            assert (rate, latency) == (0.0, 0.0) if i == j else (1e5 < rate < 1e12 and 0 < latency < 5)
    assert found[0].latency_s[0][1] == found[0].latency_s[1][0]


def in_a_part(rank: int) -> tuple[str, Pairs | None]:
    part = dist.new_group([1, 2])
    try:
        return "", measure_pairs(part)
    except errors.CollectiveError as error:
        return str(error), None


def test_a_part_of_the_ranks_is_measured_by_itself() -> None:
    (said, nothing), (_, one), (_, other) = run(3, in_a_part)
    assert said.startswith("measure_pairs: this rank is not in the group.")
    assert nothing is None
    assert one is not None
    assert one == other
    assert len(one.latency_s) == 2


def pairs(rates: list[list[float]], latency_ms: list[list[float]] | None = None) -> Pairs:
    size = len(rates)
    latencies = latency_ms or [[0.1] * size for _ in range(size)]
    return Pairs([[1e6 * each for each in row] for row in rates], [[1e-3 * each for each in row] for row in latencies])


def test_a_rank_that_is_slow_with_everyone_has_the_slow_link() -> None:
    rates = [[0, 110, 12], [108, 0, 11], [11, 11, 0.0]]
    assert find_slow(pairs(rates)) == [
        "rank 2: sends at most 11 MB/s and gets at most 12 MB/s, where the others have 109 MB/s."
    ]


def test_a_link_may_be_slow_one_way_only() -> None:
    rates = [[0, 110, 108, 109], [110, 0, 107, 107], [11, 12, 0, 13], [110, 108, 110, 0.0]]
    assert find_slow(pairs(rates)) == ["rank 2: sends at most 13 MB/s, where the others have 110 MB/s."]


def test_a_slow_pair_of_fast_ranks_is_named_with_its_direction() -> None:
    rates = [[0, 110, 108, 109], [110, 0, 9, 107], [111, 112, 0, 113], [110, 108, 110, 0.0]]
    assert find_slow(pairs(rates)) == ["from rank 1 to rank 2: 9 MB/s, where both have 110 MB/s with others."]


def test_a_far_rank_is_named_by_its_latency() -> None:
    rates = [[100.0] * 3 for _ in range(3)]
    assert find_slow(pairs(rates, [[0, 0.1, 25], [0.1, 0, 26], [25, 26, 0.0]])) == [
        "rank 2: 25 ms to the nearest, where the others have 0.1 ms."
    ]


@pytest.mark.parametrize(
    "rates",
    [
        [[0, 100.0], [1.0, 0]],  # two ranks: nothing to compare with
        [[0, 100, 60], [90, 0, 70], [55, 80, 0.0]],  # less than twice
    ],
)
def test_where_nothing_stands_out_nothing_is_named(rates: list[list[float]]) -> None:
    assert find_slow(pairs(rates)) == []
