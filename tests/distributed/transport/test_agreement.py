"""What ranks agree on: headers that fit exactly when calls do, whatever cancels, and a second trip otherwise."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import faults
import pytest
import ranks
import torch
import torch.distributed as dist
from patience import within

from narrowcast import codec as as_codec
from narrowcast import distributed as ncd
from narrowcast.distributed.transport import agreement
from narrowcast.distributed.transport.agreement import Call, Header
from narrowcast.errors import CollectiveError, MismatchError

pytestmark = pytest.mark.timeout(60)

INT8 = as_codec("int8")
Matrix = Sequence[Sequence[int]]


def _headers(send: Matrix, receive: Matrix, words: str = "dtype=float32", number: int = 7) -> list[Header]:
    calls = [
        Call("all_to_all", INT8, words, tuple(s), tuple(r), sizes=None) for s, r in zip(send, receive, strict=True)
    ]
    return [Header(call, number, rank, len(calls)) for rank, call in enumerate(calls)]


def _fit(headers: Sequence[Header]) -> bool:
    return agreement.fit(torch.stack([header.data for header in headers]).numpy())


def _transposed(matrix: Matrix) -> list[list[int]]:
    return [list(column) for column in zip(*matrix, strict=True)]


# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 5, 64, 1024])
def test_a_header_takes_32_bytes_however_many_ranks_there_are(world: int) -> None:
    counts = tuple(range(world))
    assert len(Header(Call("all_to_all", INT8, "", counts, counts), 1, 0, world).data) == agreement.HEADER_BYTES == 32


def test_headers_of_two_ranks_fit_exactly_when_all_counts_do() -> None:
    for counts in itertools.product(range(3), repeat=8):
        send, receive = (counts[:2], counts[2:4]), (counts[4:6], counts[6:])
        assert _fit(_headers(send, receive)) == (_transposed(send) == [list(row) for row in receive]), counts


@pytest.mark.parametrize("world", [2, 3, 5, 33])
def test_one_count_that_is_not_as_expected_is_seen_wherever_it_is(world: int) -> None:
    draw = random.Random(world)
    send = [[draw.choice([0, 1, 5, 2**20, 2**40]) for _ in range(world)] for _ in range(world)]
    receive = _transposed(send)
    assert _fit(_headers(send, receive))
    for a, b in itertools.islice(itertools.product(range(world), repeat=2), 40):
        for other in (send[a][b] + 1, send[a][b] - 1, send[a][b] + 2**32, 0, -1):
            if other != send[a][b]:
                wrong = [list(row) for row in send]
                wrong[a][b] = other
                assert not _fit(_headers(wrong, receive)), (a, b, other)


def _changed(matrix: Matrix, changes: dict[tuple[int, int], int]) -> list[list[int]]:
    changed = [list(row) for row in matrix]
    for (a, b), count in changes.items():
        changed[a][b] = count
    return changed


EVEN = [[4] * 5 for _ in range(5)]
RISING = [[10 * a + b for b in range(5)] for a in range(5)]
CANCELLING = {
    "two counts of a rank swapped": (_changed(RISING, {(1, 2): 13, (1, 3): 12}), _transposed(RISING)),
    "counts of two ranks swapped": (_changed(RISING, {(1, 2): 21, (2, 1): 12}), _transposed(RISING)),
    "one more here, one fewer there": (_changed(EVEN, {(0, 1): 5, (0, 2): 3}), EVEN),
    "one more here, one fewer back": (_changed(EVEN, {(0, 1): 5, (1, 0): 3}), EVEN),
    "the receiver is wrong by as much": (_changed(EVEN, {(0, 1): 5}), _changed(EVEN, {(2, 1): 5})),
    "every rank takes its counts for the others'": (RISING, RISING),
    "zero in another place": (_changed(EVEN, {(3, 4): 0}), _changed(EVEN, {(3, 4): 0})),
    "nothing, where all is expected": ([[0] * 5] * 5, EVEN),
    "every count twice": ([[8] * 5] * 5, EVEN),
    "the ranks of a ring, the wrong way round": (
        [[7 if b == (a + 1) % 5 else 0 for b in range(5)] for a in range(5)],
        [[7 if b == (a + 1) % 5 else 0 for b in range(5)] for a in range(5)],
    ),
}


@pytest.mark.parametrize("case", CANCELLING)
def test_counts_whose_sums_cancel_do_not_fit(case: str) -> None:
    send, receive = CANCELLING[case]
    assert not _fit(_headers(send, receive))
    statements = torch.stack([header.statement() for header in _headers(send, receive)]).numpy()
    assert "which expects" in str(agreement.mismatch(statements, range(5)))


def test_another_number_or_digest_does_not_fit() -> None:
    first, *others = _headers(EVEN, EVEN)
    assert _fit([first, *others])
    assert not _fit([_headers(EVEN, EVEN, number=8)[0], *others])
    assert not _fit([_headers(EVEN, EVEN, words="dtype=float16")[0], *others])


def test_a_word_of_counts_is_the_same_on_every_machine() -> None:
    data = Header(Call("all_to_all", INT8, "", (1, 2, 3), (4, 5, 6)), 0, 1, 3).data
    assert data.numpy().tobytes()[24:].hex() == "cdff27d5c117ebaa"


def test_calls_are_known_again_by_what_all_ranks_hold_alike() -> None:
    def key(rank: int, send: tuple[int, ...], sizes: tuple[int, ...] | None, number: int = 1) -> bytes | None:
        return Header(Call("x", INT8, "", send, send, sizes), number, rank, 3).key

    assert key(0, (), ()) == key(2, (), (), 5) is not None
    assert key(0, (1, 1, 1), (1, 2, 3)) == key(1, (2, 2, 2), (1, 2, 3), 5) is not None
    assert key(0, (1, 1, 1), (1, 2, 3)) != key(0, (1, 1, 1), (1, 3, 2))
    assert key(0, (1, 1, 1), None) is None


# -- a second trip ----------------------------------------------------------------------------------------------------


def _exchange(send: Matrix, receive: Matrix, rank: int, scale: int) -> torch.Tensor:
    sent, expected = ([count * scale for count in counts[rank]] for counts in (send, receive))
    source, output = torch.full((sum(sent),), float(rank)), torch.full((sum(expected),), -1.0)
    ncd.all_to_all_single(output, source, expected, sent, codec="raw")
    return output


def _error_of_exchange(send: Matrix, receive: Matrix, rank: int, scale: int) -> BaseException | None:
    return faults.error_of(lambda: _exchange(send, receive, rank, scale))[0]


def _disagree(rank: int) -> list[Any]:
    """Twice in a row each, with rows that travel along and with larger ones; then a call that all make alike."""
    found: list[Any] = []
    for case, (send, receive) in CANCELLING.items():
        expected = _changed(
            receive, {(rank, rank): send[rank][rank]}
        )  # what it sends itself, a rank knows without others
        for scale in (1, 8000):
            errors = [_error_of_exchange(send, expected, rank, scale) for _ in range(2)]
            output = _exchange(RISING, _transposed(RISING), rank, scale)
            right = torch.cat([torch.full((RISING[peer][rank] * scale,), float(peer)) for peer in range(5)])
            found.append((case, [(type(e), str(e)) for e in errors], torch.equal(output, right)))
    return found


def test_five_ranks_read_the_same_of_counts_that_cancel_twice_in_a_row_and_the_next_call_works() -> None:
    first, *rest = ranks.run(5, _disagree, timeout=50)
    assert rest == [first] * 4
    for case, errors, right in first:
        assert right, case
        assert errors[0] == errors[1]
        kind, text = errors[0]
        assert kind is MismatchError, (case, text)
        assert "which expects" in text
        assert "Nothing was sent" in text


def _in_flight(rank: int) -> Any:
    works, outputs = [], []
    for turn in range(9):  # good ones and bad ones, all on their way at once
        wrong = turn % 3 == 1 and rank == turn // 3
        numel = [100, 3_000_000][turn % 2] + int(wrong)
        outputs.append(torch.full((numel,), float(rank + turn)))
        works.append(ncd.all_reduce(outputs[-1], codec="raw", async_op=True))
    errors = [faults.error_of(work.wait)[0] for work in works]  # type: ignore[union-attr]
    exchanged = torch.empty(6)  # equal parts, said or not
    ncd.all_to_all_single(exchanged, torch.full((6,), float(rank)), None if rank == 0 else [2, 2, 2], codec="raw")
    assert exchanged.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    return [str(error) for error in errors], [float(output[-1]) for output in outputs]


def test_mismatches_among_calls_in_flight_leave_the_others_alone() -> None:
    outcomes = ranks.run(3, _in_flight, timeout=40)
    for rank, (errors, values) in enumerate(outcomes):
        assert errors == outcomes[0][0]
        for turn, (error, value) in enumerate(zip(errors, values, strict=True)):
            if turn % 3 == 1:
                assert f"rank {turn // 3} called" in error
                assert value == rank + turn, "untouched"
            else:
                assert (error, value) == ("None", 3.0 * turn + 3.0)


def _fail_in_the_second_trip(rank: int, when: str, action: Any) -> Any:
    ncd.all_reduce(torch.ones(10))
    dist.barrier()
    if rank == 1:
        faults.at(when, action)
    first = faults.error_of(lambda: ncd.all_reduce(torch.ones(10 + rank)))
    return [first, faults.error_of(lambda: ncd.all_reduce(torch.ones(10)))]


@pytest.mark.parametrize("when", ["before a statement", "a statement"])
def test_a_rank_that_dies_in_the_second_trip_is_named_by_all_that_do_not_know_what_it_called(when: str) -> None:
    outcomes = ranks.outcomes_of(3, _fail_in_the_second_trip, when, faults.die, timeout=30)
    told = 0
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        (first, seconds), (second, _) = outcomes[rank].value
        assert seconds < within(3.0)
        if type(first) is MismatchError:  # it had the statement of the dead
            assert "rank 1 called" in str(first)
            told += 1
        else:
            assert type(first) is CollectiveError
            assert "rank 1 is gone" in str(first)
        assert type(second) is CollectiveError
        assert "rank 1 is gone" in str(second)
    assert told <= (when == "a statement")


def test_a_rank_that_is_late_in_the_second_trip_is_named_at_the_timeout() -> None:
    outcomes = ranks.run(3, _fail_in_the_second_trip, "before a statement", _dawdle, timeout=30, group_timeout=2.0)
    for (first, seconds), (second, _) in (outcomes[0], outcomes[2]):
        assert type(first) is CollectiveError
        assert "rank 1 did not answer" in str(first)
        assert seconds < within(2.5)
        assert second is None
    assert outcomes[1][1][0] is None


def _dawdle() -> None:
    time.sleep(3.0)
