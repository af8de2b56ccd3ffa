"""send, recv, isend and irecv."""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

import nccl_stand_in
import pytest
import torch
import torch.distributed as dist
from ranks import outcomes_of, run
from torch import Tensor

from cases import CODECS, DTYPES, mixed, same_bits
from narrowcast import distributed as ncd
from narrowcast.distributed import arguments
from narrowcast.errors import MismatchError, ShapeError

CASES = [
    *((name, (4, 33), DTYPES[i % 4]) for i, name in enumerate(CODECS)),
    ("int8", (0,), torch.float32),
    ("int8", (300_000,), torch.float32),
    ("raw", (100_001,), torch.bfloat16),
    ("int4", (), torch.float32),
]


def messages(rank: int) -> list[Tensor]:
    received = []
    for case, (name, shape, dtype) in enumerate(CASES):
        x = mixed(torch.Size(shape).numel(), seed=case, dtype=dtype).view(shape)
        if rank == 0:
            before = x.clone()
            assert ncd.send(x, 1, codec=CODECS[name], seed=case) is None  # type: ignore[func-returns-value]
            assert same_bits(x, before)
        else:
            y = torch.empty_like(x)
            assert ncd.recv(y, 0, codec=CODECS[name]) == 0
            received.append(y)
    return received


def test_a_message_arrives_as_the_codec_would_decode_it() -> None:
    for case, y in enumerate(run(2, messages)[1]):
        name, shape, dtype = CASES[case]
        x = mixed(torch.Size(shape).numel(), seed=case, dtype=dtype).view(shape)
        codec = CODECS[name]
        if not codec.stochastic:
            rows = codec.as_rows(x)
            assert same_bits(y, codec.decode(codec.encode(rows), rows.shape[1], dtype).view(shape)), name
        error = (x.double() - y.double()).abs()
        assert bool((error <= codec.max_error(x)).all()), name


def ring(rank: int, world: int, numel: int) -> None:
    """Everyone sends right and left at once, twice, and only then waits."""
    right, left = (rank + 1) % world, (rank - 1) % world
    for turn in range(2):
        x = torch.full((numel,), float(10 * rank + turn))
        from_left, from_right = torch.empty(numel), torch.empty(numel)
        work = [
            ncd.isend(x, right, tag=1, codec="raw"),
            ncd.isend(x, left, tag=2, codec="raw"),
            ncd.irecv(from_left, left, tag=1, codec="raw"),
            ncd.irecv(from_right, right, tag=2, codec="raw"),
        ]
        for one in work:
            one.wait()  # type: ignore[union-attr]
        assert bool((from_left == 10 * left + turn).all())
        assert bool((from_right == 10 * right + turn).all())


@pytest.mark.parametrize(("world", "numel"), [(2, 10), (3, 200_000), (5, 1000)])
def test_a_ring_exchange_both_ways_does_not_deadlock(world: int, numel: int) -> None:
    run(world, ring, world, numel)


def tagged(rank: int) -> None:
    order = [4, 0, 7, 2]
    if rank == 0:
        work = [ncd.isend(torch.full((50 + tag,), float(tag)), 1, None, tag, codec="raw") for tag in sorted(order)]
        for one in work:
            one.wait()  # type: ignore[union-attr]
    else:
        for tag in order:
            x = torch.empty(50 + tag)
            assert ncd.recv(x, 0, None, tag, codec="raw") == 0
            assert bool((x == tag).all())


def test_messages_with_other_tags_do_not_wait_for_each_other() -> None:
    run(2, tagged)


def in_order(rank: int) -> None:
    sizes = [3, 90_000, 0, 128, 40_000, 7] * 5
    if rank == 0:
        work = [ncd.isend(torch.full((n,), float(i)), dst=1, codec="raw") for i, n in enumerate(sizes)]
        ncd.send(tensor=torch.full((5,), 99.0), dst=1, group=None, tag=0, codec="raw")
    else:
        outputs = [torch.empty(n) for n in sizes]
        work = [ncd.irecv(tensor=output, src=0, codec="raw") for output in outputs]
        last = torch.empty(5)
        ncd.recv(last, 0, codec="raw")
        assert bool((last == 99.0).all())
        for i, output in enumerate(outputs):
            assert bool((output == i).all()), i
    assert all(one is not None and one.is_completed() for one in work)


def test_messages_of_one_tag_arrive_in_the_order_in_which_they_were_sent() -> None:
    run(2, in_order)


def within_groups(rank: int) -> None:
    group = dist.new_group([1, 3])
    x = torch.full((20,), float(rank))
    if rank == 1:
        ncd.send(x, 3, group, codec="raw")
        ncd.send(x, group=group, group_dst=1, tag=5, codec="raw")
    elif rank == 3:
        y, z = torch.empty(20), torch.empty(20)
        assert ncd.recv(y, 1, group, codec="raw") == 1
        assert ncd.recv(z, group=group, group_src=0, tag=5, codec="raw") == 1
        assert bool((y == 1.0).all())
        assert bool((z == 1.0).all())
    else:
        assert ncd.isend(x, 3, group) is None
        assert ncd.irecv(x, 1, group) is None
        assert ncd.recv(x, 1, group) == -1


def test_in_a_group_peers_go_by_their_global_number_or_by_their_number_in_it() -> None:
    run(4, within_groups)


def into_layouts(rank: int) -> None:
    base = torch.full((6, 40), 5.0)
    view = base[1:5:2, 3:30]
    x = mixed(54).view(2, 27)
    if rank == 0:
        source = base.clone()[1:5:2, 3:30]
        source.copy_(x)
        ncd.send(source, 1, codec="raw")
    else:
        ncd.recv(view, 0, codec="raw")
        assert same_bits(view, x)
        view.fill_(5.0)
        assert bool((base == 5.0).all())


def test_messages_leave_and_arrive_in_any_layout() -> None:
    run(2, into_layouts)


def beside_collectives(rank: int) -> None:
    """A message that waits for its receiver does not hold up the collectives of its group."""
    x, y = torch.full((10,), float(rank)), torch.empty(10)
    work = ncd.isend(x, 1, codec="raw") if rank == 0 else None
    for _ in range(5):
        ncd.all_reduce(torch.ones(1000))
    if rank == 1:
        work = ncd.irecv(y, 0, codec="raw")
    ncd.all_reduce(torch.ones(1000))
    if work is not None:
        work.wait()
    if rank == 1:
        assert bool((y == 0.0).all())


def test_messages_and_collectives_do_not_wait_for_each_other() -> None:
    run(3, beside_collectives)


def many_tags(rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Descriptors and threads after a few tags, and after many more: some out of order, some large."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def exchange(tags: list[int]) -> None:
        numel = {tag: 50_000 if tag % 50 == 7 else 100 for tag in tags}
        if rank == 0:
            work = [ncd.isend(torch.full((numel[tag],), float(tag)), 1, tag=tag, codec="raw") for tag in tags]
        else:
            received = {tag: torch.zeros(numel[tag]) for tag in tags}
            work = [ncd.irecv(received[tag], 0, tag=tag, codec="raw") for tag in reversed(tags)]
        for one in work:
            one.wait()  # type: ignore[union-attr]
        if rank == 1:
            assert all(bool((x == tag).all()) for tag, x in received.items())

    exchange(list(range(10)))
    time.sleep(1.5)  # threads that have nothing to do for a second end
    before = held()
    for start in range(10, 410, 20):
        exchange(list(range(start, start + 20)))
    exchange([2**30 - 9, 2**29, 3])
    time.sleep(1.5)
    return before, held()


def test_any_number_of_tags_takes_no_more_descriptors_and_threads_than_one() -> None:
    for before, after in run(2, many_tags):
        assert after <= before


@pytest.mark.parametrize("tag", [-1, 2**30, 1.0, True, "1"])
def test_a_tag_that_cannot_be_is_refused_in_words(tag: object) -> None:
    with pytest.raises(ShapeError, match=r"tag=.*: a tag is an integer of zero or more, below 1073741816\."):
        arguments.message_tag(tag)


def disagreeing(rank: int) -> None:
    if rank == 0:
        ncd.send(torch.ones(10), 1, codec="int8")
    else:
        ncd.recv(torch.ones(12), 0, codec="int4")


def test_sender_and_receiver_that_disagree_raise_the_same_error() -> None:
    first, second = outcomes_of(2, disagreeing, group_timeout=10)
    assert isinstance(first.error, MismatchError)
    assert str(first.error) == str(second.error)
    for word in ("rank 0", "rank 1", "int8", "int4", "numel=10", "numel=12"):
        assert word in str(first.error)


def _in_any_order(rank: int, nccl: bool) -> None:
    """Messages between all ranks, started in another order on each of them; those of a pair (and tag) in their own."""
    if nccl:
        nccl_stand_in.use()
    world, drawn = dist.get_world_size(), random.Random(3)
    pairs = list(itertools.permutations(range(world), 2))
    messages = [(*drawn.choice(pairs), drawn.choice((0, 1, 100, 50_000)), drawn.choice((0, 7))) for _ in range(30)]
    queues: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}
    for i, (source, target, numel, tag) in enumerate(messages):
        tag = 0 if nccl else tag  # NCCL knows none: messages of all tags are in one order
        if rank in (source, target):
            queues.setdefault((source, target, tag), []).append((i, source, target, numel))
    mine = random.Random(rank)
    works: list[tuple[Any, Tensor, Tensor]] = []
    while queues:
        key = mine.choice(list(queues))
        i, source, target, numel = queues[key].pop(0)
        if not queues[key]:
            del queues[key]
        content, tag = torch.arange(numel) + float(i), key[2]
        if rank == source:
            works.append((ncd.isend(content, target, tag=tag, codec="raw"), content, content))
        else:
            buffer = torch.zeros(numel)
            works.append((ncd.irecv(buffer, source, tag=tag, codec="raw"), buffer, content))
    mine.shuffle(works)
    for work, came, content in works:
        work.wait()
        assert torch.equal(came, content)


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "nccl"])
def test_messages_between_all_ranks_may_start_in_any_order(nccl: bool) -> None:
    run(3, _in_any_order, nccl, timeout=100, group_timeout=60)
