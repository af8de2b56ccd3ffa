"""What ranks believe went wrong, where several of them suspect somebody at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from narrowcast.distributed.board import Board, Failure


def _failure(kind: str, seen_by: int, rank: int) -> Failure:
    return Failure(kind, rank, seen_by, 7, "all_reduce", "a reason")


def _believed(*suspicions: Failure) -> tuple[list[Failure], Failure]:
    """What each that reports is told, all at once, and what stands on the board."""
    store = dist.HashStore()
    boards = [Board("test", store, rank, range(4), timedelta(seconds=20)) for rank in range(4)]
    with ThreadPoolExecutor(len(suspicions)) as pool:
        told = list(pool.map(lambda suspicion: boards[suspicion.seen_by].report(0, suspicion), suspicions))
    page = boards[0].page(0)
    assert page.check(["failure"])
    return told, Failure.from_bytes(page.get("failure"))


@pytest.mark.parametrize(
    ("suspicions", "culprit"),
    [
        ([("late", 1, 0), ("late", 0, 2)], ("late", 0, 2)),
        ([("gone", 1, 0), ("late", 0, 2)], ("late", 0, 2)),
        ([("late", 2, 1), ("gone", 1, 0), ("late", 0, 3)], ("late", 0, 3)),
        ([("late", 1, 0), ("gone", 0, 3)], ("gone", 0, 3)),
    ],
    ids=str,
)
def test_a_suspicion_is_followed_to_the_rank_that_suspects_nobody(
    suspicions: list[tuple[str, int, int]], culprit: tuple[str, int, int]
) -> None:
    told, written = _believed(*(_failure(*suspicion) for suspicion in suspicions))
    assert written == _failure(*culprit)
    assert told == [written] * len(told)


def test_of_ranks_that_suspect_each_other_the_first_is_believed() -> None:
    suspicions = [_failure("gone", 0, 1), _failure("gone", 1, 0)]
    told, written = _believed(*suspicions)
    assert written in suspicions
    assert told == [written] * 2


@pytest.mark.parametrize("failure", [_failure("raised", 0, 0), _failure("gone", 1, 2)], ids=["its own", "another's"])
def test_what_is_known_is_written_and_nobody_asked(failure: Failure) -> None:
    store = dist.HashStore()
    board = Board("test", store, 0, range(4), timedelta(seconds=20))
    assert board.report(0, failure) == failure
    assert Failure.from_bytes(board.page(0).get("failure")) == failure
    assert not board.page(0).check([f"saw/{failure.seen_by}"])
