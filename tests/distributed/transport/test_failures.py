"""What ranks believe went wrong, where several of them suspect somebody at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from narrowcast.distributed.transport.failures import Board, Failure
from narrowcast.distributed.transport.gloo_connections import LAST_WORDS_BYTES


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


@pytest.mark.parametrize("text", ["plain " * 1000, "\U0001f600" * 160, "\U0001f600" * 5000, '"\\\n\x00' * 400, ""])
def test_a_failure_fits_its_record_whatever_its_reason_and_is_read_back(text: str) -> None:
    failure = Failure("raised", 1, 1, 2**40, "all_reduce between hosts", text, 2**29)
    data = failure.to_bytes(LAST_WORDS_BYTES)
    assert len(data) <= LAST_WORDS_BYTES
    read = Failure.from_bytes(data)
    assert text.startswith(read.reason)
    assert (read.number, read.op, read.tag) == (failure.number, failure.op, failure.tag)
    assert len(text) < 100 or len(data) > LAST_WORDS_BYTES - 13, "no more is cut than must be"
