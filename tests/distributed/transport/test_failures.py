"""What ranks believe went wrong, where several of them suspect somebody at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from patience import within

from narrowcast.distributed.transport.failures import Board, Failure
from narrowcast.distributed.transport.gloo_connections import LAST_WORDS_BYTES


def _failure(kind: str, seen_by: int, rank: int) -> Failure:
    return Failure(kind, rank, seen_by, 7, "all_reduce", "a reason")


def _believed(*suspicions: Failure, delays: Sequence[float] = (0.0,) * 4) -> tuple[list[Failure], Failure]:
    """What each that reports is told, all at once, and what stands on the board."""
    store = dist.HashStore()
    boards = [Board("test", store, rank, range(4), timedelta(seconds=20)) for rank in range(4)]

    def report(suspicion: Failure, delay: float) -> Failure:
        time.sleep(delay)
        return boards[suspicion.seen_by].report(0, suspicion)

    with ThreadPoolExecutor(len(suspicions)) as pool:
        told = list(pool.map(report, suspicions, delays))
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


def test_where_a_rank_cannot_connect_the_one_that_says_nothing_is_named_and_not_the_one_that_gave_up() -> None:
    """Who cannot connect gives its connections up: to those that had connected, it is the one that is gone."""
    told, written = _believed(
        _failure("unconnected", 0, 0), _failure("gone", 1, 0), _failure("unconnected", 2, 2), delays=[0.0, 0.1, 0.2]
    )
    assert (written.kind, written.reason) == ("unconnected", "a reason, and nothing of rank 3 since")
    assert told == [written] * 3


def test_who_ran_out_of_time_for_a_rank_that_could_not_connect_is_told_the_same_though_others_say_nothing() -> None:
    """Rank 1 had connected, so its time was over a little later. Ranks 2 and 3 are stopped."""
    told, written = _believed(_failure("unconnected", 0, 0), _failure("late", 1, 0), delays=[0.0, 0.05])
    assert (written.kind, written.reason) == ("unconnected", "a reason, and nothing of ranks 2, 3 since")
    assert told == [written] * 2


def test_who_connects_shows_that_it_is_there_and_learns_that_another_could_not() -> None:
    store = dist.HashStore()
    one, other = (Board("test", store, rank, [5, 6, 7], timedelta(seconds=20)) for rank in (0, 2))
    assert other.given_up(0) is False
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(one.report, 0, _failure("unconnected", 5, 5))
        while not written.done():
            other.given_up(0)
    assert written.result().reason == "a reason, and nothing of rank 6 since"
    assert other.given_up(0) is True


def test_a_store_that_does_not_answer_holds_up_one_thread_and_not_who_looks() -> None:
    class Silent(dist.HashStore):
        def clone(self) -> dist.Store:
            time.sleep(1000)
            raise AssertionError

    store = Silent()
    board = Board("test", store, 0, range(2), timedelta(seconds=4))
    start = time.monotonic()
    assert board.given_up(0) is None
    assert time.monotonic() - start < within(0.5)
    threads = threading.active_count()
    assert [board.given_up(0) for _ in range(5)] == [None] * 5
    assert threading.active_count() == threads, "each look leaves a thread that waits for the store"


def test_a_look_for_which_there_is_no_thread_keeps_later_ones_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    board = Board("test", store, 0, range(2), timedelta(seconds=20))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            board.given_up(0)
    assert board.given_up(0) is False


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
