"""Calls that fail on one rank alone, refused or in one phase: every rank raises, and the next call is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
from patience import within
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast.distributed.gradients.ddp import average_bucket
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket
from narrowcast.errors import CollectiveError, MismatchError

pytestmark = pytest.mark.timeout(60)

INTS = torch.ones(64, dtype=torch.int64)


def _sum_is_right(group: Any = None) -> bool:
    """Whether three sums, each of values of its own, are those of these values on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn in (1, 10, 100):
        x = torch.full((64,), float(turn * (rank + 1)))
        ncd.all_reduce(x, group=group, codec="raw")
        if not bool((x == turn * world * (world + 1) / 2).all()):
            return False
    return True


def _floats() -> list[Tensor]:
    return [torch.ones(64) for _ in range(dist.get_world_size())]


def _many() -> Tensor:
    return torch.ones(64 * dist.get_world_size())


# What one rank calls in the wrong way, and the others in the right one.
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "an int tensor": (lambda: ncd.all_reduce(INTS), lambda: ncd.all_reduce(torch.ones(64))),
    "an int tensor, asynchronous": (
        lambda: ncd.all_reduce(INTS, async_op=True),
        lambda: ncd.all_reduce(torch.ones(64), async_op=True).wait(),  # type: ignore[union-attr]
    ),
    "no such codec": (lambda: ncd.all_reduce(torch.ones(64), codec="int9"), lambda: ncd.all_reduce(torch.ones(64))),
    "no such argument": (
        lambda: ncd.all_reduce(torch.ones(64), codek="int8"),  # type: ignore[call-arg]
        lambda: ncd.all_reduce(torch.ones(64)),
    ),
    "no tensor": (lambda: ncd.all_reduce(None), lambda: ncd.all_reduce(torch.ones(64))),  # type: ignore[arg-type]
    "no such reduction": (
        lambda: ncd.all_reduce(torch.ones(64), dist.ReduceOp.MAX),
        lambda: ncd.all_reduce(torch.ones(64)),
    ),
    "a list too short": (
        lambda: ncd.all_gather(_floats()[1:], torch.ones(64)),
        lambda: ncd.all_gather(_floats(), torch.ones(64)),
    ),
    "elements that share memory": (
        lambda: ncd.broadcast(torch.ones(1).expand(64), 0),
        lambda: ncd.broadcast(torch.ones(64), 0),
    ),
    "an output too small": (
        lambda: ncd.reduce_scatter_tensor(torch.ones(63), _many()),
        lambda: ncd.reduce_scatter_tensor(torch.ones(64), _many()),
    ),
    "splits that do not add up": (
        lambda: ncd.all_to_all_single(_many(), _many(), [1] * dist.get_world_size()),
        lambda: ncd.all_to_all_single(_many(), _many()),
    ),
    "a dimension that is not there": (
        lambda: ncd.functional.all_gather(torch.ones(64), dim=3),
        lambda: ncd.functional.all_gather(torch.ones(64)),
    ),
}


def _refuse(rank: int, what: list[str], culprit: int) -> list[tuple[str, str, bool]]:
    found = []
    for name in what:
        wrong, right = REFUSED[name]
        error, _ = faults.error_of(wrong if rank == culprit else right)
        found.append((type(error).__name__, str(error), _sum_is_right()))
    return found


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_call_that_one_rank_refuses_fails_on_all_and_the_next_one_is_right(culprit: int) -> None:
    found = run(3, _refuse, list(REFUSED), culprit)
    for case, name in enumerate(REFUSED):
        own, words, _ = found[culprit][case]
        assert own not in ("NoneType", "CollectiveError"), name
        for rank, of_rank in enumerate(found):
            kind, text, right = of_rank[case]
            assert right, (name, rank)
            if rank != culprit:
                assert kind == "CollectiveError", (name, rank, text)
                assert f"rank {culprit} failed in it: {own}: {words[:40]}" in text


def _refuse_at_first(rank: int) -> tuple[str, bool]:
    error, seconds = faults.error_of(lambda: ncd.all_reduce(INTS if rank else torch.ones(64)))
    assert seconds < within(5)
    return str(error), _sum_is_right()


def test_the_first_call_of_a_group_may_be_the_one_that_is_refused() -> None:
    (told, right), *others = run(3, _refuse_at_first)
    assert "DtypeError: tensor: codecs take" in told
    assert right
    assert all(right for _, right in others)


def _all_refuse(rank: int) -> bool:
    for _ in range(3):
        error, _ = faults.error_of(lambda: ncd.all_reduce(INTS))
        assert type(error).__name__ == "DtypeError"
    return _sum_is_right()


def test_a_call_that_every_rank_refuses_is_refused_at_once_with_its_own_reason() -> None:
    assert run(3, _all_refuse) == [True] * 3


def _in_flight(rank: int) -> tuple[list[float], str, bool]:
    tensors = [torch.full((200_000,), float(i)) for i in range(4)]
    works = [ncd.all_reduce(x, async_op=True, codec="raw") for x in tensors]
    error, _ = faults.error_of(lambda: ncd.all_reduce(INTS if rank == 1 else torch.ones(64)))
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return [float(x[0]) for x in tensors], type(error).__name__, _sum_is_right()


def test_calls_in_flight_before_a_refused_one_end_well() -> None:
    for rank, (sums, error, right) in enumerate(run(2, _in_flight)):
        assert sums == [0.0, 2.0, 4.0, 6.0]
        assert error == ("DtypeError" if rank == 1 else "CollectiveError")
        assert right


# -- a mesh ----------------------------------------------------------------------------------------------------------


def _in_a_mesh(rank: int, what: str, culprit: int, shape: tuple[int, int]) -> list[tuple[str, str, bool]]:
    mesh = init_device_mesh("cpu", shape)
    assert _sum_is_right(mesh)
    found = []
    for _ in range(2):
        x = torch.ones(64)
        options: dict[str, Any] = {}
        if rank == culprit:
            x = {"one element more": torch.ones(65), "an int tensor": INTS}.get(what, x)
            if what == "raised":
                faults.at("after headers", faults.run_out_of_memory)
            elif what == "another local codec":
                options["local_codec"] = "int8"
        elif what == "another local codec" and rank // shape[1] == culprit // shape[1]:
            options["local_codec"] = "int8"
        error, _ = faults.error_of(lambda x=x, options=options: ncd.all_reduce(x, group=mesh, **options))
        found.append((type(error).__name__, str(error), _sum_is_right(mesh)))
    return found


@pytest.mark.parametrize("shape", [(2, 2), (3, 2)])
@pytest.mark.parametrize("what", ["one element more", "an int tensor", "raised", "another local codec"])
def test_a_failure_anywhere_in_a_mesh_is_known_to_all_its_ranks_and_the_next_sum_is_right(
    what: str, shape: tuple[int, int]
) -> None:
    culprit = 1
    for rank, found in enumerate(run(shape[0] * shape[1], _in_a_mesh, what, culprit, shape)):
        for kind, text, right in found:
            assert right, rank
            if what in ("one element more", "another local codec"):
                assert kind == "MismatchError", (rank, text)
                assert "ranks disagree on a collective" in text
            elif rank == culprit:
                assert kind == {"an int tensor": "DtypeError", "raised": "MemoryError"}[what]
            else:
                assert kind == "CollectiveError", (rank, text)
                assert f"rank {culprit} failed in it" in text


# -- messages --------------------------------------------------------------------------------------------------------


def _messages(rank: int, sender_refuses: bool) -> tuple[str, float]:
    y = torch.zeros(64)
    if rank == 0:
        error, _ = faults.error_of(lambda: ncd.send(INTS if sender_refuses else torch.ones(64), 1, codec="raw"))
        ncd.send(torch.full((64,), 7.0), 1, codec="raw")
    else:
        error, _ = faults.error_of(lambda: ncd.recv(y if sender_refuses else INTS.clone(), 0, codec="raw"))
        ncd.recv(y, 0, codec="raw")
    return type(error).__name__, float(y[0])


@pytest.mark.parametrize("sender_refuses", [True, False])
def test_a_message_that_one_end_refuses_fails_on_both_and_the_next_one_arrives(sender_refuses: bool) -> None:
    sender, receiver = run(2, _messages, sender_refuses)
    assert {sender[0], receiver[0]} == {"DtypeError", "CollectiveError"}
    assert receiver[1] == 7.0


def _other_tags(rank: int) -> list[float]:
    """Messages of other tags are under way when one is refused."""
    if rank == 0:
        works = [ncd.isend(torch.full((64,), float(tag)), 1, tag=tag, codec="raw") for tag in range(5)]
        error, _ = faults.error_of(lambda: ncd.send(INTS, 1, tag=9, codec="raw"))
        assert type(error).__name__ == "DtypeError"
        for work in works:
            work.wait()  # type: ignore[union-attr]
        return []
    error, _ = faults.error_of(lambda: ncd.recv(torch.zeros(64), 0, tag=9, codec="raw"))
    assert isinstance(error, CollectiveError)
    assert not isinstance(error, MismatchError)
    received = [torch.zeros(64) for _ in range(5)]
    for tag in reversed(range(5)):
        ncd.recv(received[tag], 0, tag=tag, codec="raw")
    return [float(x[0]) for x in received]


def test_messages_of_other_tags_arrive_although_one_was_refused() -> None:
    assert run(2, _other_tags)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


# -- gradients -------------------------------------------------------------------------------------------------------


def _gradients(rank: int) -> tuple[str, str, list[float]]:
    """Rank 1 cannot say which codec step 1 takes: no other bucket of the others may meet its next one."""

    def schedule(step: int) -> str:
        if step == 1 and rank == 1:
            raise OSError("no such file")
        return "raw"

    state = nc.GradientCompression("raw", schedule=schedule, exempt=None)
    parameter = torch.zeros(2048)
    error, seen = None, []
    for turn in (1.0, 10.0, 100.0):
        bucket = torch.full((2048,), turn * (rank + 1))
        try:
            average_bucket(state, DdpBucket(bucket, [parameter], [0], 0, True)).wait()
            seen.append(float(bucket[0]))
        except Exception as raised:
            error = raised
            state.step = 2  # what a trainer that goes on with the next batch has
    return type(error).__name__, str(error), seen


def test_a_bucket_that_one_rank_cannot_hand_over_fails_on_all_and_the_next_one_is_right() -> None:
    (kind, text, seen), (own, _, seen_there) = run(2, _gradients)
    assert own == "OSError"
    assert "rank 1 failed in it: OSError: no such file" in text, kind
    assert seen == seen_there == [1.5, 150.0]
