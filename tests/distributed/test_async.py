"""Collectives in flight: what a Work promises, and that nothing swaps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

from cases import mixed
from narrowcast import distributed as ncd
from narrowcast.distributed.encoder import Encoder
from narrowcast.distributed.transport.lane import Lane
from narrowcast.errors import CollectiveError

SIZES = (3, 700, 60_000, 0, 128, 9_000)


def many(rank: int, world: int) -> None:
    """Sixty collectives of five kinds and six sizes in flight, waited for in another order on every rank."""
    pending: list[tuple[Any, Tensor, Tensor]] = []
    for i in range(60):
        numel = SIZES[i % len(SIZES)]
        x = torch.full((numel,), float(100 * i + rank))
        everyone = torch.tensor([100.0 * i + peer for peer in range(world)])
        kind = i % 5
        if kind == 0:
            work = ncd.all_reduce(x, async_op=True, codec="raw")
            pending.append((work, x, everyone.sum().expand(numel)))
        elif kind == 1:
            output = torch.empty(world, numel)
            work = ncd.all_gather_into_tensor(output, x, async_op=True, codec="raw")
            pending.append((work, output, everyone[:, None].expand(world, numel)))
        elif kind == 2:
            output = torch.empty(numel)
            work = ncd.reduce_scatter(output, [x] * world, dist.ReduceOp.AVG, async_op=True, codec="raw")
            pending.append((work, output, everyone.mean().expand(numel)))
        elif kind == 3:
            output = torch.empty(world, numel)
            work = ncd.all_to_all_single(output, x.expand(world, numel), async_op=True, codec="raw")
            pending.append((work, output, everyone[:, None].expand(world, numel)))
        else:
            work = ncd.broadcast(x, i % world, async_op=True, codec="raw")
            pending.append((work, x, everyone[i % world].expand(numel)))
    order = torch.randperm(len(pending), generator=torch.Generator().manual_seed(rank)).tolist()
    for i in order:
        work, found, expected = pending[i]
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert torch.equal(found, expected), i


@pytest.mark.parametrize("world", [2, 5])
def test_results_of_many_in_flight_never_swap(world: int) -> None:
    run(world, many, world)


def works(rank: int) -> None:
    x = torch.full((1000,), float(rank))
    work = ncd.all_reduce(x, async_op=True, codec="raw")
    assert isinstance(work, dist.Work)
    assert isinstance(work, ncd.Work)
    (result,) = work.get_future().wait()
    assert result is x
    assert work.result() == [x]
    assert work.get_future() is work.get_future()
    assert bool((x == 1.0).all())

    outputs, y = [torch.empty(5), torch.empty(5)], torch.full((5,), float(rank))
    late = ncd.all_gather(outputs, y, async_op=True, codec="raw")
    assert late is not None
    late.wait(timedelta(seconds=20))
    assert all(a is b for a, b in zip(late.get_future().value(), outputs, strict=True))  # asked for when it was done

    seen, told = [], threading.Event()
    z = torch.full((5,), float(rank + 1))
    chained = ncd.all_reduce(z, async_op=True, codec="raw").get_future().then(lambda done: done.value()[0] * 10)  # type: ignore[union-attr]
    chained.add_done_callback(lambda done: (seen.append(float(done.value()[0])), told.set()))  # type: ignore[func-returns-value]
    assert bool((chained.wait() == 30.0).all())
    assert told.wait(20)  # a callback may run a moment after those who wait
    assert seen == [30.0]


def test_a_work_has_wait_result_and_a_future_of_the_callers_own_tensors() -> None:
    run(2, works)


def dropped(rank: int) -> None:
    tensors = [torch.full((500 * i,), 1.0) for i in range(40)]
    for x in tensors:
        ncd.all_reduce(x, async_op=True, codec="raw")
    last = torch.ones(3)
    ncd.all_reduce(last, codec="raw")  # in order: done when all those before it are
    assert all(bool((x == 3.0).all()) for x in [*tensors, last])
    ncd.all_reduce(torch.ones(10_000), async_op=True)  # and one on which nobody waits before the end


def test_a_work_may_be_dropped_without_a_wait() -> None:
    run(3, dropped)


def temporaries(rank: int) -> None:
    """The caller's only reference to the input goes away while it is in flight."""
    outputs = [torch.empty(2, 4000) for _ in range(30)]
    work = [
        ncd.all_gather_into_tensor(output, torch.full((4000,), float(10 * i + rank)), async_op=True, codec="raw")
        for i, output in enumerate(outputs)
    ]
    for i, (output, one) in enumerate(zip(outputs, work, strict=True)):
        one.wait()  # type: ignore[union-attr]
        assert bool((output[0] == 10 * i).all())
        assert bool((output[1] == 10 * i + 1).all())


def test_inputs_in_flight_are_kept_alive() -> None:
    run(2, temporaries)


def bits_of_both(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    first, second = ([mixed(n, seed=rank + n) for n in (1, 300, 50_000)] for _ in range(2))
    for work in [ncd.all_reduce(x, async_op=True, codec="int4") for x in first]:
        work.wait()  # type: ignore[union-attr]
    for x in second:
        ncd.all_reduce(x, codec="int4")
    return first, second


def test_asynchronous_and_synchronous_calls_give_the_same_bits() -> None:
    for first, second in run(3, bits_of_both):
        assert all(map(torch.equal, first, second))


def from_a_callback(rank: int) -> None:
    x, y = torch.ones(10), torch.ones(10)
    works: list[Any] = []
    errors: list[Exception] = []
    called = threading.Event()

    def then(done: Any) -> None:
        works.append(ncd.all_reduce(y, async_op=True, codec="raw"))
        try:
            ncd.all_reduce(torch.ones(10), codec="raw")
        except CollectiveError as error:
            errors.append(error)
        called.set()

    blocker = ncd.all_reduce(torch.ones(200_000), async_op=True)  # so that the callback is there before x is done
    ncd.all_reduce(x, async_op=True, codec="raw").get_future().add_done_callback(then)  # type: ignore[union-attr]
    blocker.wait()  # type: ignore[union-attr]
    assert called.wait(20)
    works[0].wait()
    assert bool((y == 2.0).all())
    assert "wait for itself" in str(errors[0])
    assert "async_op=True" in str(errors[0])


def test_a_callback_may_start_a_collective_but_not_wait_for_one() -> None:
    run(2, from_a_callback)


def from_threads(rank: int) -> None:
    """Each thread has its own group; all of them work at once."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(3)]
    failed: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)

    def loop(number: int) -> Callable[[], None]:
        def action() -> None:
            for i in range(30):
                x = torch.full((100 * number + i,), float(number))
                ncd.all_reduce(x, group=groups[number], codec="raw")
                assert bool((x == 3.0 * number).all())

        return action

    threads = [threading.Thread(target=guarded, args=(loop(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed, failed


def test_groups_work_side_by_side_in_threads() -> None:
    run(3, from_threads)


def known_memory(rank: int) -> None:
    """Every tensor that a protocol encodes from or decodes into is among those that `start` is told of.

    On CUDA these are the ones whose memory the allocator keeps until the side stream is done with it.
    """
    known, used = set(), set()
    plain_start, plain_encode, plain_decode = Lane.start, Encoder.encode, Encoder.decode
    plain_sum, plain_sum_encode = Encoder.decode_sum, Encoder.decode_sum_encode

    def start(self: Lane, op: str, job: Any, tensors: Any, async_op: bool, *how: bool, **where: bool) -> Any:
        known.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return plain_start(self, op, job, tensors, async_op)

    def note(*tensors: Tensor) -> None:
        used.update(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())

    def encode(self: Encoder, rows: Tensor, out: Tensor, *key: int) -> Tensor:
        note(rows)
        return plain_encode(self, rows, out, *key)

    def decode(self: Encoder, data: Tensor, out: Tensor) -> None:
        note(out)
        plain_decode(self, data, out)

    def summed(self: Encoder, data: Tensor, own: Tensor, rank: int, divisor: int, out: Tensor) -> None:
        note(own, out)
        plain_sum(self, data, own, rank, divisor, out)

    def sum_encode(self: Encoder, data: Tensor, own: Tensor, *rest: Any) -> None:
        note(own)
        plain_sum_encode(self, data, own, *rest)

    Lane.start, Encoder.encode, Encoder.decode = start, encode, decode  # type: ignore[method-assign]
    Encoder.decode_sum, Encoder.decode_sum_encode = summed, sum_encode  # type: ignore[method-assign]

    def gaps(*shape: int) -> Tensor:
        return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]

    calls = {
        "all_reduce": lambda: ncd.all_reduce(gaps(4, 50), async_op=True),
        "reduce_scatter": lambda: ncd.reduce_scatter(gaps(2, 50), [gaps(2, 50) for _ in range(2)], async_op=True),
        "reduce_scatter_tensor": lambda: ncd.reduce_scatter_tensor(gaps(2, 50), gaps(4, 50), async_op=True),
        "all_gather": lambda: ncd.all_gather([gaps(2, 50) for _ in range(2)], gaps(2, 50), async_op=True),
        "all_gather_into_tensor": lambda: ncd.all_gather_into_tensor(gaps(4, 50), gaps(2, 50), async_op=True),
        "all_to_all": lambda: ncd.all_to_all([gaps(5) for _ in range(2)], [gaps(5) for _ in range(2)], async_op=True),
        "all_to_all_single": lambda: ncd.all_to_all_single(gaps(4, 50), gaps(4, 50), async_op=True),
        "broadcast": lambda: ncd.broadcast(gaps(4, 50), 0, async_op=True),
        "message": lambda: (ncd.irecv if rank else ncd.isend)(gaps(4, 50), 1 - rank),
    }
    for name, call in calls.items():
        known.clear()
        used.clear()
        work = call()
        assert work is not None
        work.wait()
        assert used, name
        assert used <= known, name


def test_all_memory_of_a_call_in_flight_is_known_to_the_side_stream() -> None:
    run(2, known_memory)
