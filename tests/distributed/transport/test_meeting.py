"""What it takes ranks to meet: a handful of requests to the store each, however many they are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import within

from narrowcast.distributed.transport.failures import Board, Failure, _without
from narrowcast.distributed.transport.gloo_connections import Gloo

pytestmark = pytest.mark.timeout(60)


class Counting(dist.Store):
    """A store that counts what is asked of it and of its clones."""

    def __init__(self, inner: Any, counts: Counter[str]) -> None:
        super().__init__()
        self._inner = inner
        self.counts = counts

    def clone(self) -> Counting:
        self.counts["clone"] += 1
        return _alive(Counting(self._inner.clone(), self.counts))  # type: ignore[no-any-return]

    def has_extended_api(self) -> bool:
        return bool(self._inner.has_extended_api())


_kept: list[Any] = []


@pytest.fixture(autouse=True)
def _clear() -> Iterator[None]:
    yield
    _kept.clear()


def _alive(store: Any) -> Any:
    """A server ends with its store, and torch's PrefixStore does not keep a store of Python's alive."""
    _kept.append(store)
    return store


def _passed_on(name: str) -> Any:
    def request(self: Counting, *args: Any) -> Any:
        self.counts[name] += 1
        return getattr(self._inner, name)(*args)

    return request


for each in ("set", "get", "add", "check", "wait", "multi_get", "compare_set"):
    setattr(Counting, each, _passed_on(each))


def _in_threads(world: int, action: Any) -> list[Any]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(action, range(world)))


def _boards(world: int, seconds: float = 20.0) -> list[tuple[Board, Counting]]:
    server = _alive(dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False))
    stores = [_alive(Counting(server.clone(), Counter())) for _ in range(world)]
    return [
        (Board("test", store, rank, range(world), timedelta(seconds=seconds)), store)
        for rank, store in enumerate(stores)
    ]


@pytest.mark.parametrize("world", [2, 16])
def test_a_meeting_and_its_connections_take_the_same_few_requests_however_many_ranks_there_are(world: int) -> None:
    boards, limit = _boards(world), timedelta(seconds=20)

    def meet(rank: int) -> Gloo:
        board, _ = boards[rank]
        assert board.meet(0, threading.Event()) == ""
        return Gloo(board.page(0), rank, range(world), limit, limit)

    connected = _in_threads(world, meet)
    for _, store in boards:
        looks = store.counts.pop("check")
        news = store.counts.pop("compare_set", 0)
        assert store.counts == {"set": 2, "add": 1, "get": 1, "multi_get": 1, "clone": 1}
        assert looks < 40, "while others were on their way, on a busy machine"
        assert news in (0, 1), "who comes last tells the others"
    rows = torch.zeros(world, 8, dtype=torch.uint8)
    receives = [connected[0].receive(rows[peer], peer, 7) for peer in range(1, world)]
    for peer in range(1, world):
        connected[peer].send(torch.full((8,), peer, dtype=torch.uint8), 0, 7).wait()
    for receive in receives:
        receive.wait()
    assert rows[:, 0].tolist() == list(range(world))


def test_those_who_did_not_come_are_named_when_the_time_is_over() -> None:
    boards = _boards(5, seconds=2.0)
    there, start = [0, 2, 3], time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(lambda rank: boards[rank][0].meet(0, threading.Event()), there))
    assert said == ["ranks 1, 4 did not come"] * 3
    assert 1.9 < time.monotonic() - start < within(2.6)


def test_it_takes_few_requests_to_find_the_few_that_are_missing_among_many() -> None:
    ((board, store),) = _boards(1)
    page = board.page(0)
    for rank in set(range(256)) - {5, 40, 255}:
        page.set(f"here/{rank}", "1")
    assert _without(page, "here", range(256)) == [5, 40, 255]
    assert store.counts["check"] < 60


def test_a_failure_ends_a_meeting_at_once_and_one_that_comes_later_too() -> None:
    boards = _boards(3)
    start = time.monotonic()
    failure = Failure("raised", 2, 2, 1, "all_reduce", "a reason")
    threading.Timer(0.3, lambda: boards[2][0].report(0, failure)).start()
    assert boards[0][0].meet(0, threading.Event()) == "the other ranks gave up"
    assert boards[1][0].meet(0, threading.Event()) == "the other ranks gave up"
    assert time.monotonic() - start < within(2.0)


def _answer_checks(board: Board, check: Callable[[list[str]], bool]) -> None:
    """Let `check` say what is on the page that a rank looks at."""
    page = board.page(0)

    class Page:
        def __getattr__(self, name: str) -> Any:
            return check if name == "check" else getattr(page, name)

    board.page = lambda generation: Page()  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_what_fails_when_all_have_come_does_not_part_those_who_have_seen_it_from_those_who_have_not(
    kind: str, tmp_path: Path
) -> None:
    """Were one to leave, the other would wait in vain for its address, and it for the other in the next meeting."""
    store = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
    }[kind]()
    first, second = (Board("test", _alive(store), rank, range(2), timedelta(seconds=20)) for rank in range(2))
    page, slow = second.page(0), threading.Event()

    _answer_checks(second, lambda keys: slow.wait(20) and page.check(keys))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second.meet, 0, threading.Event())
        assert first.meet(0, threading.Event()) == ""
        first.report(0, Failure("raised", 0, 0, 1, "send", "a reason"))
        slow.set()
        assert late.result() == ""
    assert Failure.from_bytes(page.get("failure")).reason == "a reason", "and each learns of it from the connections"


def _two_boards(seconds: float) -> list[Board]:
    store = _alive(dist.HashStore())
    return [Board("test", store, rank, range(2), timedelta(seconds=seconds)) for rank in range(2)]


def test_who_gives_up_tells_those_who_come_later() -> None:
    first, second = _two_boards(6.0)
    assert first.meet(0, threading.Event()) == "rank 1 did not come"
    assert second.meet(0, threading.Event()) == "the other ranks gave up"


def test_who_would_give_up_goes_on_with_one_that_came_in_the_last_moment() -> None:
    first, second = _two_boards(6.0)
    _answer_checks(first, lambda keys: not {"news", "here/1"} & {*keys})  # the second is not seen to come
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(first.meet, 0, threading.Event())
        assert second.meet(0, threading.Event()) == ""
        assert early.result() == ""


def test_a_meeting_of_a_group_that_is_destroyed_ends() -> None:
    (board, _), _ = _boards(2)
    closing = threading.Event()
    threading.Timer(0.2, closing.set).start()
    start = time.monotonic()
    assert board.meet(0, closing) != ""
    assert time.monotonic() - start < within(2.0)
