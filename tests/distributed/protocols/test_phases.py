"""What a phase tells the one that follows it: chunks that are done, and failures."""

from __future__ import annotations

import threading

import pytest

from narrowcast.distributed.protocols.phases import Progress
from narrowcast.distributed.transport.failures import Failure
from narrowcast.errors import CollectiveError, MismatchError


def test_the_end_is_reached_when_the_phase_is_over_not_with_its_last_chunk() -> None:
    progress = Progress(3, rank=0)
    passed: list[int] = []

    def follow() -> None:
        for count in (1, 2, 3):
            progress.wait(count)
            passed.append(count)

    follower = threading.Thread(target=follow)
    follower.start()
    for count in (1, 2, 3):
        progress.reach(count)
    follower.join(0.2)
    assert passed == [1, 2]
    progress.complete()
    follower.join(10)
    assert passed == [1, 2, 3]


@pytest.mark.parametrize("error", [MemoryError("no room"), MismatchError("ranks disagree"), KeyboardInterrupt()])
def test_a_failure_is_no_mismatch_to_the_phase_that_waits_whose_own_ranks_agree(error: BaseException) -> None:
    progress = Progress(3, rank=5)
    progress.reach(1)
    progress.fail(error)
    progress.wait(1)  # is done
    with pytest.raises(CollectiveError) as caught:
        progress.wait(2)
    assert not isinstance(caught.value, MismatchError)
    assert caught.value.failure == Failure.of(error, 5, 0, "")
    assert progress.begins()


def test_a_phase_that_fails_before_its_first_chunk_has_not_begun() -> None:
    progress = Progress(3, rank=0)
    progress.fail(RuntimeError())
    assert not progress.begins()
