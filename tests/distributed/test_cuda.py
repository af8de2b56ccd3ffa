"""Collectives on CUDA tensors: two ranks over gloo that share one GPU, and one rank over NCCL (which refuses two)."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from ranks import run

import narrowcast as nc
from ambient import SURROUNDINGS, surrounded
from narrowcast import distributed as ncd
from narrowcast.distributed.gradients.ddp import average_bucket
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket
from narrowcast.distributed.transport.buffers import KEEP
from narrowcast.distributed.transport.gloo import GlooWire
from narrowcast.distributed.transport.gloo_connections import Gloo
from narrowcast.distributed.transport.group import group_for
from narrowcast.distributed.transport.nccl import NcclWire
from narrowcast.distributed.transport.staged import StagedWire

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CODECS = ("raw", "int8", "int4", "fp8_e4m3:block=128", "apot4", "int8:block=row", "int4:stochastic=true")
SIZES = (0, 1, 5, 1000, 100_003, 3_000_001)


def sample(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def cuda_equals_cpu(rank: int) -> None:
    other = 1 - rank
    for codec in CODECS:
        for numel in SIZES:
            both = []
            for device in ("cuda", "cpu"):
                x = sample(rank, numel).to(device)
                ncd.all_reduce(x, dist.ReduceOp.AVG, codec=codec, seed=7)
                y = sample(rank, numel, torch.bfloat16).to(device)
                ncd.broadcast(y, 1, codec=codec, seed=7)
                z = torch.empty(2 * numel, device=device)
                ncd.all_gather_into_tensor(z, sample(rank, numel).to(device), codec=codec, seed=7)
                w = torch.empty(numel, device=device)
                ncd.reduce_scatter_tensor(w, sample(rank, 2 * numel).to(device), codec=codec, seed=7)
                v = torch.empty(3 * numel, device=device)
                splits = [2 * numel, numel] if rank == 0 else [numel, 2 * numel]
                ncd.all_to_all_single(v, sample(rank, 3 * numel).to(device), splits, splits, codec=codec, seed=7)
                u = torch.empty(numel, device=device)
                if rank == 0:
                    ncd.send(sample(rank, numel).to(device), other, codec=codec, seed=7)
                    u.zero_()
                else:
                    ncd.recv(u, other, codec=codec)
                both.append([t.cpu() for t in (x, y, z, w, v, u)])
            for i, (here, there) in enumerate(zip(*both, strict=True)):
                assert torch.equal(here, there), (codec, numel, i)


def test_two_ranks_on_one_gpu_get_the_bits_that_the_cpu_gets() -> None:
    run(2, cuda_equals_cpu, timeout=280, group_timeout=200)


def streams_are_ordered(rank: int) -> None:
    peers = group_for(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device()))
    n = 1 << 20
    producer = torch.cuda.Stream()
    for round_ in range(20):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(20_000_000)  # the value is written long after the call below was made
            x = torch.full((n,), float(rank + round_), device="cuda")
            work = ncd.all_reduce(x, async_op=True, codec="raw")
            assert work is not None
            work.wait()
            assert x.double().sum().item() == n * (1 + 2 * round_)
    assert isinstance(peers._wire, StagedWire)

    works, tensors = [], []
    for i in range(30):
        tensors.append(torch.full((1000 + 37 * i,), float(rank + i), device="cuda"))
        works.append(ncd.all_reduce(tensors[-1], async_op=True, codec="int8"))
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        (out,) = work.get_future().wait()
        assert out is tensor or out.data_ptr() == tensor.data_ptr()
        assert torch.equal(tensor, torch.full_like(tensor, 1.0 + 2 * i)), i
        assert work.is_completed()


def test_a_collective_waits_for_the_callers_stream_and_the_callers_stream_for_it() -> None:
    run(2, streams_are_ordered, timeout=120, group_timeout=100)


def pinned_memory(rank: int) -> None:
    """Large gathers leave little pinned memory behind, and a row crosses to the host once however many get it."""
    names: list[str] = []
    plain = StagedWire._pinned

    def counted(self: StagedWire, name: str, nbytes: int) -> torch.Tensor:
        names.append(name)
        return plain(self, name, nbytes)

    StagedWire._pinned = counted  # type: ignore[method-assign]
    numel, world = 25_000_000, dist.get_world_size()
    x, out = torch.full((numel,), float(rank), device="cuda"), torch.empty(world, numel, device="cuda")
    for _ in range(8):
        names.clear()
        ncd.all_gather_into_tensor(out, x, codec="raw")
        assert [float(row[-1]) for row in out] == [float(peer) for peer in range(world)]
        assert len([name for name in names if name.startswith("outbox")]) == 1
    peers = group_for(dist.group.WORLD, x.device)
    assert isinstance(peers._wire, StagedWire)
    held = sum(buffer.numel() for buffer in peers._wire._buffers._buffers.values())
    assert held <= KEEP
    stats = torch.cuda.host_memory_stats()
    assert stats["allocated_bytes.current"] <= 2 * KEEP, stats
    names.clear()
    ncd.all_reduce(torch.ones(1000, device="cuda"), codec="int8")


def test_large_gathers_over_gloo_hold_little_pinned_memory_and_copy_each_row_once() -> None:
    run(4, pinned_memory, timeout=280, group_timeout=200)


def around_calls(rank: int) -> None:
    """In all surroundings, the GPU's own among them, twice around."""
    for turn in range(2):
        for name in [None, *SURROUNDINGS]:
            if name == "default device meta":
                continue
            for codec in ("int8", "nf4", "apot4", "fp8_e4m3"):
                base = sample(rank + turn, 4000).cuda()
                x, halves = base.clone(), base.clone().view(2000, 2)[:, 0]
                torch.cuda.synchronize()
                with surrounded(name):
                    ncd.all_reduce(x, codec=codec)
                    work = ncd.all_reduce(halves, async_op=True, codec=codec)
                    assert work is not None
                    work.wait()
                torch.cuda.synchronize()
                y, z = base.cpu(), base.cpu().view(2000, 2)[:, 0].contiguous()
                ncd.all_reduce(y, codec=codec)
                ncd.all_reduce(z, codec=codec)
                assert torch.equal(x.cpu(), y), (name, codec)
                assert torch.equal(halves.cpu(), z), (name, codec)


def test_collectives_on_a_gpu_give_the_same_bits_whatever_surrounds_them() -> None:
    run(2, around_calls, timeout=280, group_timeout=200)


def one_rank_over_nccl(rank: int) -> None:
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    x = sample(0, 1000).cuda()
    before = x.clone()
    work = ncd.all_reduce(x, async_op=True, codec="int8")
    assert work is not None
    work.wait()
    assert torch.equal(x, before)  # nothing travels in a group of one
    out = torch.empty_like(x)
    ncd.all_gather_into_tensor(out, x, codec="int4")
    ncd.reduce_scatter_tensor(out, x, codec="int4")
    ncd.all_to_all_single(out, x, codec="int4")
    assert torch.equal(out, x)
    peers = group_for(dist.group.WORLD, torch.device("cuda", 0))
    assert peers.nccl

    limit = datetime.timedelta(seconds=30)
    control = GlooWire(Gloo(dist.PrefixStore("test", store), 0, [0], limit, limit))
    wire = NcclWire(control, store, torch.device("cuda", 0))
    sent, received = torch.arange(64, dtype=torch.uint8).cuda(), torch.zeros(64, dtype=torch.uint8).cuda()
    wire._groups[0].alltoall([received], [sent]).wait()
    assert torch.equal(sent, received)
    assert list(wire.expect([received])()) == []  # a rank alone has no peers, but NCCL's call is made
    wire.close()


def test_one_rank_over_nccl() -> None:
    run(1, one_rank_over_nccl, init=False, timeout=120)


def gradients_alike(rank: int) -> None:
    """The same gradients, on the GPU and on the CPU, for a few steps."""
    shapes = ((300, 500), (500,), (3, 7), (1000, 129))
    for codec in ("int8", "int4", "nf4", "sign", "int4:block=row", "int4:stochastic=true"):
        for dtype in (torch.float32, torch.bfloat16):
            both = []
            for device in ("cuda", "cpu"):
                parameters = [torch.zeros(shape, device=device) for shape in shapes]
                offsets = torch.tensor([0, *(p.numel() for p in parameters)]).cumsum(0).tolist()
                state = nc.GradientCompression(codec, error_feedback=True, seed=rank)
                ended = []
                for step in range(3):
                    bucket = sample(10 * step + rank, offsets[-1], dtype).to(device)
                    average_bucket(state, DdpBucket(bucket, parameters, offsets[:-1], 0, True)).wait()
                    ended.append(bucket.cpu())
                both.append(ended + [t for pair in state.residuals.by_name().values() for t in pair])
            for i, (here, there) in enumerate(zip(*both, strict=True)):
                assert torch.equal(here, there), (codec, dtype, i)


def test_gradients_on_a_gpu_get_the_bits_that_the_cpu_gets() -> None:
    run(2, gradients_alike, timeout=280, group_timeout=200)


def ddp_trains(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    nc.compress_gradients(ddp, "int4")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(20):
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_ddp_on_a_gpu_ends_with_the_same_parameters_on_both_ranks() -> None:
    first, second = run(2, ddp_trains, timeout=120)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
