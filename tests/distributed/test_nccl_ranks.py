"""Several ranks over NCCL, which share one GPU (one_gpu.py)."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import one_gpu
import pytest
import torch
import torch.distributed as dist
from by_hand import reduced_by_hand
from ranks import outcomes_of, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast.distributed.protocols import together
from narrowcast.distributed.protocols.together import in_one_stage
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.nccl import HALVED, NcclWire
from narrowcast.errors import CollectiveError, MismatchError, NarrowcastError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
CODECS = ("raw", "int8", "int4", "nf4", "sign", "int8:block=row", "int4:stochastic=true")
SIZES = (0, 1, 1000, 100_003, 1 << 18)


@pytest.fixture(scope="module", autouse=True)
def mps() -> Iterator[None]:
    with one_gpu.side_by_side():
        yield


def sample(rank: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank + 1000 * seed))


# -- right numbers ----------------------------------------------------------------------------------------------------


def _as_on_the_cpu(rank: int) -> None:
    """Every collective in every codec gives what the same one gives over gloo, to the bit where ownership is alike."""
    world = dist.get_world_size()
    together.PLAIN_BYTES = together.PLAIN_RAW_BYTES = 0  # else small tensors of all_reduce would go as they are
    for codec, numel in itertools.product(CODECS, SIZES):
        both: list[list[torch.Tensor]] = []
        for device in ("cuda", "cpu"):
            y = sample(rank, numel).to(device, torch.bfloat16)
            ncd.broadcast(y, world - 1, codec=codec, seed=7)
            z = torch.empty(world * numel, device=device)
            ncd.all_gather_into_tensor(z, sample(rank, numel).to(device), codec=codec, seed=7)
            w = torch.empty(numel, device=device)
            ncd.reduce_scatter_tensor(w, sample(rank, world * numel).to(device), codec=codec, seed=7)
            counts = [[(a + 2 * b) % 3 * numel for b in range(world)] for a in range(world)]
            sent, expected = counts[rank], [row[rank] for row in counts]
            v = torch.empty(sum(expected), device=device)
            ncd.all_to_all_single(v, sample(rank, sum(sent)).to(device), expected, sent, codec=codec, seed=7)
            both.append([t.cpu() for t in (y, z, w, v)])
        for i, (here, there) in enumerate(zip(*both, strict=True)):
            assert torch.equal(here, there), (codec, numel, i)
        x = sample(rank, numel).cuda()
        ncd.all_reduce(x, dist.ReduceOp.AVG, codec=codec, seed=7)
        everyone = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(everyone, x)
        assert all(torch.equal(each, x) for each in everyone), (codec, numel)
        if "stochastic" not in codec:
            one = in_one_stage(nc.codec(codec).row_bytes(numel), world)
            right = reduced_by_hand([sample(r, numel) for r in range(world)], codec, world, one_stage=one)
            assert torch.equal(x.cpu(), right), (codec, numel)
    wire = group_for(dist.group.WORLD, x.device)._wire
    assert isinstance(wire, NcclWire)


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_over_nccl_give_the_bits_that_gloo_gives(world: int) -> None:
    run(world, _as_on_the_cpu, nccl=True, timeout=280, group_timeout=200)


def _small(rank: int) -> None:
    """A small tensor is summed as it is, whatever the codec, and counted so."""
    world = dist.get_world_size()
    dtypes = torch.float32, torch.float64, torch.float16, torch.bfloat16
    for nbytes, dtype, async_op in itertools.product((8, 8000, together.PLAIN_BYTES), dtypes, (False, True)):
        numel = nbytes // max(4, dtype.itemsize)
        for codec, op in (("int8", dist.ReduceOp.SUM), ("sign", dist.ReduceOp.AVG)):
            x = sample(rank, numel).to("cuda", dtype)
            ncd.all_reduce(x.clone(), op, codec=codec)
            ncd.reset_stats()
            work = ncd.all_reduce(x, op, codec=codec, async_op=async_op)
            if work is not None:
                work.wait()
            assert ncd.stats()["all_reduce"].sent_bytes == 2 * (world - 1) * max(4, x.element_size()) * numel // world
            terms = torch.stack([sample(peer, numel).to(dtype) for peer in range(world)]).double()
            right = terms.sum(0) / (1 if op == dist.ReduceOp.SUM else world)
            # As in protocols/test_together.py: one rounding per addition, and those of the division and the result.
            wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            narrow = torch.finfo(dtype)
            half_step = narrow.eps / 2 * right.abs().clamp(narrow.tiny)  # below `tiny`, steps get no smaller
            bound = world * wide * terms.abs().sum(0) + half_step
            assert bool(((x.cpu().double() - right).abs() <= bound).all()), (numel, dtype, codec)
            everyone = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(everyone, x)
            assert all(torch.equal(each, x) for each in everyone), (numel, dtype, codec)
    y = torch.ones(together.PLAIN_BYTES // 4 + 1, device="cuda")
    y[0] = 1e-3  # of a block of ones: int4 makes it zero
    ncd.all_reduce(y, codec="int4")
    assert float(y[0]) == 0.0


@pytest.mark.parametrize("world", [2, 3])
def test_a_small_tensor_goes_as_it_is_over_nccl_and_all_ranks_get_the_same_bits(world: int) -> None:
    run(world, _small, nccl=True, timeout=100, group_timeout=60)


def _uneven(rank: int) -> None:
    counts = [[3 + b for b in range(3)] for _ in range(3)]
    for turn in range(6):
        sent, expected = counts[rank], [row[rank] for row in counts]
        source = torch.cat([torch.full((n,), 10.0 * rank + peer) for peer, n in enumerate(sent)]).cuda()
        output = torch.empty(sum(expected), device="cuda")
        ncd.all_to_all_single(output, source, expected, sent, codec="raw")
        right = torch.cat([torch.full((n,), 10.0 * peer + rank) for peer, n in enumerate(expected)])
        assert torch.equal(output.cpu(), right)
        counts[1][2] = (HALVED + 5) * (turn % 3)  # nothing else changes, and one pair's rows are long now and then


def test_counts_that_change_between_two_ranks_only_keep_nobody_waiting() -> None:
    run(3, _uneven, nccl=True, timeout=100, group_timeout=40)


def _ring(rank: int) -> None:
    """All send before they receive; then all receive before they send."""
    world = dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    for turn, first in itertools.product(range(3), ("send", "receive")):
        outgoing = torch.full((5000 + turn,), float(10 * rank + turn), device="cuda")
        incoming = torch.zeros_like(outgoing)
        start = time.monotonic()
        works: list[Any] = []
        for what in ("send", "receive") if first == "send" else ("receive", "send"):
            works.append(
                ncd.isend(outgoing, after, codec="raw") if what == "send" else ncd.irecv(incoming, before, codec="raw")
            )
        assert time.monotonic() - start < 10.0  # the host is not held
        for work in works:
            work.wait()
        assert torch.equal(incoming.cpu(), torch.full((5000 + turn,), float(10 * before + turn)))


def test_a_ring_may_send_first_or_receive_first() -> None:
    run(3, _ring, nccl=True, timeout=100, group_timeout=30)


def _overlap(rank: int) -> None:
    """An asynchronous call does not hold the caller's stream; `wait` does."""
    x, busy = torch.full((1 << 22,), float(rank), device="cuda"), torch.cuda.Stream()
    assert float((torch.ones(1000, device="cuda") * 2).sum()) == 2000.0  # CUDA waits for kernels when it loads new ones
    for codec in ("raw", "int8"):
        ncd.all_reduce(x, codec=codec)
        torch.cuda.synchronize()
        x.fill_(float(rank))
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)  # the others' reductions cannot end before
        started = time.monotonic()
        work = ncd.all_reduce(x, codec=codec, async_op=True)
        y = torch.ones(1000, device="cuda") * 2
        assert float(y.sum()) == 2000.0  # this stream went on
        if rank != 1:
            assert time.monotonic() - started < 0.9
            assert not work.is_completed()
        with torch.cuda.stream(busy):
            work.wait()
            assert float(x[5]) == pytest.approx(sum(range(dist.get_world_size())), rel=0.01)


def test_an_asynchronous_call_leaves_the_callers_stream_alone() -> None:
    run(2, _overlap, nccl=True, timeout=100, group_timeout=60)


def _two_streams(rank: int) -> None:
    """Small sums stay on the caller's stream, rows go on the lane's: each call follows the one before it."""
    world = dist.get_world_size()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    small, rows = torch.zeros(1000, device="cuda"), torch.zeros(1 << 18, device="cuda")
    for turn in range(40):
        with torch.cuda.stream(streams[turn // 3 % 2]):
            torch.cuda.current_stream().wait_stream(streams[1 - turn // 3 % 2])
            small.fill_(float(rank + turn))
            rows.fill_(float(rank + turn))
            work = ncd.all_reduce(rows, codec="int8", async_op=True)
            ncd.all_reduce(small, codec="raw")
            ncd.all_reduce(small, dist.ReduceOp.AVG, codec="int8")
            if turn % 2:
                small.add_(1.0)  # on the same stream, after the sum
            work.wait()
            right = float(sum(range(world)) + world * turn)
            assert float(small[7]) == right + turn % 2, turn
            assert float(rows[7]) == pytest.approx(right, rel=0.01), turn
    torch.cuda.current_stream().wait_stream(streams[1])
    large = sample(rank, 3 << 20).cuda()  # in two halves
    ncd.all_reduce(large, codec="raw")
    terms = torch.stack([sample(peer, 3 << 20) for peer in range(world)]).double()
    bound = world * torch.finfo(torch.float32).eps * terms.abs().sum(0)  # as in _small
    assert bool(((large.cpu().double() - terms.sum(0)).abs() <= bound).all())
    everyone = [torch.empty_like(large) for _ in range(world)]
    dist.all_gather(everyone, large)
    assert all(torch.equal(each, large) for each in everyone)


def test_sums_on_the_callers_stream_and_rows_on_the_lanes_follow_each_other() -> None:
    run(3, _two_streams, nccl=True, timeout=100, group_timeout=60)


def _many(rank: int) -> None:
    tensors = [torch.full((1000 + 37 * i,), float(rank + i), device="cuda") for i in range(200)]
    works = [ncd.all_reduce(x, codec=("raw", "int8")[i % 2], async_op=True) for i, x in enumerate(tensors)]
    for i, (work, x) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert float(x[3]) == pytest.approx(1.0 + 2 * i, abs=0.02 * (i + 1))


def test_two_hundred_reductions_in_flight() -> None:
    run(2, _many, nccl=True, timeout=100, group_timeout=60)


def _destroyed(rank: int) -> None:
    x = torch.full((8 << 20,), float(rank + 1), device="cuda")
    ncd.all_reduce(torch.ones(8, device="cuda"), codec="raw")
    torch.cuda._sleep(500_000_000)  # the reduction begins long after the call
    ncd.all_reduce(x, codec="raw")
    dist.destroy_process_group()
    assert float(x[7]) == 3.0 == float(x[-1])


def test_a_group_that_is_destroyed_right_after_a_call_keeps_its_result() -> None:
    run(2, _destroyed, nccl=True, timeout=100, group_timeout=60)


# -- faults -----------------------------------------------------------------------------------------------------------


def _lost(rank: int) -> str:
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(3):
        ncd.all_reduce(x, codec="int8")
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(100):
            ncd.all_reduce(x, codec="int8")
            torch.cuda.synchronize()
            time.sleep(0.05)
    except CollectiveError as error:
        assert time.monotonic() - start < 20.0
        return str(error)
    raise AssertionError("no error")


def test_a_killed_rank_gives_the_survivors_an_error() -> None:
    outcomes = outcomes_of(3, _lost, nccl=True, timeout=120, group_timeout=20)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert "rank 1 is gone" in str(outcomes[rank].value), outcomes[rank]


def _refused(rank: int) -> str:
    """A call that one rank refuses, though ranks agreed on one like it before, fails on all; the next one is right."""
    x = torch.ones(64, device="cuda")
    ncd.all_reduce(x, codec="raw")
    torch.cuda.synchronize()
    start = time.monotonic()
    told = ""
    try:
        if rank == 0:
            ncd.all_reduce(torch.ones(64, dtype=torch.int64, device="cuda"))
        else:
            work = ncd.all_reduce(torch.ones(64, device="cuda"), codec="raw", async_op=True)
            torch.cuda.synchronize()
            work.wait()
    except NarrowcastError as error:
        told = str(error)
    assert time.monotonic() - start < 10.0
    y = torch.full((64,), float(rank), device="cuda")
    ncd.all_reduce(y, codec="raw")
    assert float(y[3]) == sum(range(dist.get_world_size()))
    return told


def test_a_call_that_one_rank_refuses_keeps_nobody_waiting() -> None:
    told = run(3, _refused, nccl=True, timeout=100, group_timeout=40)
    assert all(told)


def _refused_behind(rank: int, codec: str, first: bool) -> list[str]:
    """One rank refuses a call while the stream has yet to come to the one before it: that one ends on all ranks."""
    x = torch.full((1 << 20,), float(rank), device="cuda")
    if not first:  # ranks have agreed on it before
        ncd.all_reduce(x.clone(), codec=codec)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    start = time.monotonic()
    work = ncd.all_reduce(x, codec=codec, async_op=True)
    told = []
    try:
        ncd.all_reduce(torch.ones(65, dtype=torch.int64 if rank == 0 else torch.float32, device="cuda"))
    except NarrowcastError as error:
        told.append(str(error))
    try:
        work.wait()
    except CollectiveError as error:
        told.append(str(error))
    assert time.monotonic() - start < 20.0
    y = torch.full((64,), float(rank), device="cuda")
    ncd.all_reduce(y, codec="raw")
    assert float(y[3]) == sum(range(dist.get_world_size()))
    return told


@pytest.mark.untried
@pytest.mark.parametrize("codec", ["int8", "raw"])
@pytest.mark.parametrize("first", [False, True])
def test_a_call_that_waits_on_the_stream_raises_on_all_ranks_where_one_refuses_the_next(
    codec: str, first: bool
) -> None:
    for told in run(3, _refused_behind, codec, first, nccl=True, timeout=100, group_timeout=40):
        assert len(told) == 2, told
        assert "rank 0 failed" in told[1], told


def _written_outside_of_inference(rank: int) -> None:
    world = dist.get_world_size()
    with torch.inference_mode():
        x, out = (torch.full((world << 15,), float(rank), device="cuda") for _ in range(2))
        y = torch.full((1000,), float(rank), device="cuda")
    ncd.all_reduce(y, codec="int8")
    assert float(y[7]) == sum(range(world))
    ncd.all_to_all_single(out, x, codec="raw")
    assert [float(part[5]) for part in out.chunk(world)] == list(range(world))
    ncd.all_reduce(x, codec="raw")
    assert float(x[-1]) == sum(range(world))


@pytest.mark.untried
def test_tensors_of_inference_mode_are_written_outside_of_it_over_nccl() -> None:
    run(2, _written_outside_of_inference, nccl=True, timeout=100, group_timeout=60)


def _differing(rank: int) -> str:
    ncd.all_reduce(torch.ones(64, device="cuda"), codec="raw")
    try:
        ncd.all_reduce(torch.ones(64 + rank, device="cuda"), codec="int4")
    except MismatchError as error:
        ncd.all_reduce(torch.ones(64, device="cuda"), codec="raw")
        return str(error)
    raise AssertionError("no error")


def test_new_calls_that_differ_are_told_on_every_rank() -> None:
    first, *rest = run(3, _differing, nccl=True, timeout=100, group_timeout=40)
    assert rest == [first] * 2


# -- gradients --------------------------------------------------------------------------------------------------------


def _trained(rank: int, codec: str) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda(), device_ids=[0], bucket_cap_mb=1
    )
    nc.compress_gradients(model, codec)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(8):
        x = sample(rank, 64 * 256, step).view(64, 256).cuda()
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(each, flat) for each in everyone)
    return losses


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_ddp_over_nccl_trains_with_the_same_bits_on_every_rank(codec: str) -> None:
    for losses in run(3, _trained, codec, nccl=True, timeout=100, group_timeout=60):
        assert losses[-1] < losses[0]
