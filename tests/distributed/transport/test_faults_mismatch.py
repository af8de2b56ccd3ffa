"""Ranks that disagree: one error with one text on all of them, tensors untouched, and the next collective works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from patience import within

from narrowcast import distributed as ncd
from narrowcast.errors import CollectiveError, MismatchError

pytestmark = pytest.mark.timeout(60)

LIMIT = 2.0
Case = tuple[Callable[[int], Any], list[str]]


def _reduce(numel: int = 1000, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    tensor = torch.ones(numel, dtype=dtype)
    ncd.all_reduce(tensor, **options)
    return [tensor]


def _exchange(sent: list[int], expected: list[int]) -> None:
    ncd.all_to_all_single(torch.ones(sum(expected)), torch.ones(sum(sent)), expected, sent)


def _gather(own: int, expected: list[int]) -> None:
    ncd.all_gather([torch.ones(numel) for numel in expected], torch.ones(own))


AVG = dist.ReduceOp.AVG
CASES: dict[str, Case] = {
    "codec": (
        lambda rank: _reduce(codec="int4" if rank == 1 else "int8"),
        ["ranks 0, 2 called all_reduce(codec=int8,", "rank 1 called all_reduce(codec=int4,"],
    ),
    "options": (
        lambda rank: _reduce(codec="int8:block=64" if rank == 2 else "int8:block=32"),
        ["ranks 0, 1 called all_reduce(codec=int8:block=32", "rank 2 called all_reduce(codec=int8:block=64"],
    ),
    "a long table of levels": (
        lambda rank: _reduce(codec="levels:table=" + "|".join(str(i / 40 + (i == 40) * rank) for i in range(41))),
        ["ranks disagree on a collective: rank 0 called", "rank 1 called", "rank 2 called", "with options"],
    ),
    "numel": (
        lambda rank: _reduce(1000 + rank),
        ["rank 0 called", "numel=1000,", "rank 1 called", "numel=1001,", "rank 2 called", "numel=1002,"],
    ),
    "numel of which one is large": (
        lambda rank: _reduce(4_000_000 if rank == 0 else 100),
        ["rank 0 called", "numel=4000000,", "ranks 1, 2 called", "numel=100,"],
    ),
    "no elements on one rank": (
        lambda rank: _reduce(0 if rank == 0 else 100),
        ["rank 0 called", "numel=0,", "ranks 1, 2 called", "numel=100,"],
    ),
    "dtype": (
        lambda rank: _reduce(dtype=torch.float16 if rank else torch.float32),
        ["rank 0 called", "dtype=float32", "ranks 1, 2 called", "dtype=float16"],
    ),
    "reduce op": (
        lambda rank: _reduce(**({"op": AVG} if rank == 0 else {})),
        ["rank 0 called", "op=avg", "ranks 1, 2 called", "op=sum"],
    ),
    "src": (
        lambda rank: ncd.broadcast(torch.ones(500), src=rank % 2),
        ["ranks 0, 2 called broadcast", "src=0", "rank 1 called broadcast", "src=1"],
    ),
    "operation": (
        lambda rank: _reduce() if rank else ncd.broadcast(torch.ones(1000), src=0),
        ["rank 0 called broadcast", "ranks 1, 2 called all_reduce"],
    ),
    "operation with splits": (
        lambda rank: _reduce() if rank else _gather(1000, [1000] * 3),
        ["rank 0 called all_gather", "ranks 1, 2 called all_reduce"],
    ),
    "splits": (
        lambda rank: _exchange([1, 2, 3], [rank + 1] * 3 if rank != 2 else [3, 4, 3]),
        ["rank 1 sends 3 elements to rank 2, which expects 4"],
    ),
    "large splits": (
        lambda rank: _exchange([900_000] * 3, [900_000] * 3 if rank != 1 else [900_000, 900_000, 90]),
        ["rank 2 sends 900000 elements to rank 1, which expects 90"],
    ),
    "what to gather": (
        lambda rank: _gather(10 + rank, [10, 11, 12] if rank != 1 else [9, 11, 12]),
        ["rank 0 sends 10 elements to rank 1, which expects 9"],
    ),
}


def _disagree(rank: int) -> dict[str, Any]:
    """Every case in one group, each followed by a collective of which all ranks think the same."""
    found = {}
    for name, (call, _) in CASES.items():
        error, _ = faults.error_of(lambda call=call: call(rank))  # type: ignore[misc]
        tensor = faults.data(rank, 5000)
        ncd.all_reduce(tensor, codec="raw")
        found[name] = type(error), str(error), tensor
    return found


@pytest.fixture(scope="module")
def disagreements() -> list[dict[str, Any]]:
    return ranks.run(3, _disagree, timeout=30, group_timeout=10)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises_the_same_error_which_says_who_said_what(
    name: str, disagreements: list[dict[str, Any]]
) -> None:
    types, texts, tensors = zip(*(of_rank[name] for of_rank in disagreements), strict=True)
    assert set(types) == {MismatchError}, texts
    assert len(set(texts)) == 1
    for part in CASES[name][1]:
        assert part in texts[0]
    total = torch.stack([faults.data(rank, 5000) for rank in range(3)]).sum(0)
    assert all(torch.allclose(tensor, total, atol=1e-5) for tensor in tensors), "the next collective"


def _untouched(rank: int) -> Any:
    tensors = [torch.full((200_000,), 3.0), torch.full((5,), 3.0), torch.full((400_000,), 3.0), torch.full((10,), 3.0)]
    codec = "int8" if rank else "int4"
    calls: list[Callable[[], object]] = [
        lambda: ncd.all_reduce(tensors[0], codec=codec),
        lambda: ncd.all_reduce(tensors[1], codec=codec),
        lambda: ncd.all_gather_into_tensor(tensors[2], torch.ones(200_000), codec=codec),
        lambda: ncd.broadcast(tensors[3], src=0, codec=codec),
    ]
    errors = [type(faults.error_of(call)[0]) for call in calls]
    works = [ncd.all_reduce(tensors[0], codec=codec, async_op=True) for _ in range(3)]
    errors += [type(faults.error_of(work.wait)[0]) for work in works]
    return errors, [bool((tensor == 3.0).all()) for tensor in tensors]


def test_tensors_are_untouched_and_works_raise() -> None:
    for errors, untouched in ranks.run(2, _untouched, timeout=20):
        assert errors == [MismatchError] * 7
        assert all(untouched)


def _sub_group(rank: int) -> Any:
    pair = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    error, _ = faults.error_of(lambda: ncd.all_reduce(torch.ones(rank), group=pair))
    tensor = torch.ones(4)
    ncd.all_reduce(tensor, group=pair, codec="raw")
    return type(error), str(error), tensor.tolist()


def test_a_sub_group_reports_global_ranks() -> None:
    _, one, _, three = ranks.run(4, _sub_group, timeout=20)
    assert one == three
    assert one[0] is MismatchError
    assert "rank 1 called all_reduce(codec=int8, dtype=float32, numel=1, op=sum)" in one[1]
    assert "rank 3 called all_reduce(codec=int8, dtype=float32, numel=3, op=sum)" in one[1]
    assert one[2] == [2.0] * 4


def _order(rank: int) -> Any:
    calls: list[Callable[[], object]] = [
        lambda: _reduce(10),
        lambda: ncd.broadcast(torch.ones(10), src=0),
    ]
    errors = [faults.error_of(call)[0] for call in (calls if rank else calls[::-1])]
    return [(type(error), str(error)) for error in errors], _reduce(10, codec="raw")[0].tolist()


def test_another_order_raises_in_both_calls_and_the_third_works() -> None:
    first, second = ranks.run(2, _order, timeout=20)
    assert first == second
    assert [kind for kind, _ in first[0]] == [MismatchError] * 2
    assert first[1] == [2.0] * 10


def _messages(rank: int) -> Any:
    found: list[Any] = []
    for mine, theirs in (
        ({"codec": "int8"}, {"codec": "int4"}),
        ({"numel": 10}, {"numel": 11}),
        ({"numel": 500_000}, {"numel": 11}),
        ({"dtype": torch.float32}, {"dtype": torch.float16}),
    ):
        options: dict[str, Any] = dict(mine if rank == 0 else theirs)
        tensor = torch.full((options.pop("numel", 20),), 3.0, dtype=options.pop("dtype", torch.float32))
        error, _ = faults.error_of(lambda: (ncd.recv if rank else ncd.send)(tensor, 1 - rank, **options))  # noqa: B023
        found.append((type(error), str(error), bool((tensor == 3.0).all())))
    tensor = torch.full((4,), 7.0 - 7.0 * rank)
    (ncd.recv if rank else ncd.send)(tensor, 1 - rank, codec="raw")
    return found, tensor.tolist()


def test_sender_and_receiver_that_disagree_raise_the_same() -> None:
    sender, receiver = ranks.run(2, _messages, timeout=20)
    assert sender == receiver
    assert sender[1] == [7.0] * 4
    for kind, text, untouched in sender[0]:
        assert kind is MismatchError
        assert "rank 0 called message(" in text
        assert "rank 1 called message(" in text
        assert untouched


def _one_call_fewer(rank: int) -> Any:
    _reduce()
    if rank == 2:
        time.sleep(1.3 * LIMIT)
    missed = faults.error_of(_reduce)
    return missed, _reduce(codec="raw")[0][0].item()


def test_a_rank_that_makes_a_call_too_late_is_named_at_the_timeout_and_the_next_call_works() -> None:
    outcomes = ranks.run(3, _one_call_fewer, timeout=25, group_timeout=LIMIT)
    for (error, seconds), total in outcomes:
        assert type(error) is CollectiveError
        assert "rank 2 did not answer" in str(error)
        assert seconds < within(1.1 * LIMIT + 0.15)
        assert total == 3.0


def _one_call_fewer_at_the_end(rank: int) -> Any:
    _reduce()
    if rank == 2:
        time.sleep(1.3 * LIMIT)  # it believes that all is done
        return None
    return faults.error_of(_reduce)


def test_a_rank_that_makes_a_call_fewer_is_named() -> None:
    first, second, _ = ranks.run(3, _one_call_fewer_at_the_end, timeout=25, group_timeout=LIMIT)
    for error, seconds in (first, second):
        assert type(error) is CollectiveError
        assert str(error).startswith("all_reduce: rank 2 did not answer")
        assert seconds < within(1.1 * LIMIT + 0.15)
