"""all_reduce over hosts x local: the codec where links are slow, full precision where they are fast."""

from __future__ import annotations

import model
import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from cases import mixed, same_bits
from narrowcast import distributed as ncd
from narrowcast.distributed.protocols import mesh as protocol
from narrowcast.distributed.transport import agreement

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
SHAPES = [(2, 2), (2, 3), (4, 2), (1, 4), (4, 1), (1, 1)]

# (codec, local codec, numel, dtype, op)
CASES = [
    ("int8", None, 5000, torch.float32, SUM),
    ("int4", None, 5000, torch.float32, AVG),
    ("raw", None, 130, torch.float32, SUM),
    ("int8", None, 5000, torch.bfloat16, AVG),
    ("int8", None, 3001, torch.float16, SUM),
    ("int8", None, 3001, torch.float64, AVG),
    ("int4", "int8", 5000, torch.float32, SUM),
    ("int8", "bf16", 777, torch.float32, AVG),
    ("int8", None, 3, torch.float32, SUM),
    ("int8", None, 0, torch.float32, SUM),
    ("int4", None, 300_000, torch.float32, AVG),
    ("int8", None, 300_001, torch.bfloat16, SUM),
    ("int4", "int8", 300_001, torch.float32, AVG),
    ("raw", None, 300_001, torch.float64, SUM),
]


def in_chunks(numel: int, chunk: int) -> list[slice]:
    """The elements of a part that go between hosts at a time."""
    return [slice(start, start + chunk) for start in range(0, max(1, numel), chunk)]


def data(rank: int, case: int) -> Tensor:
    return mixed(CASES[case][2], seed=100 * rank + case, dtype=CASES[case][3]) / 8


def reduced(rank: int, hosts: int, local: int, chunk: int) -> list[Tensor]:
    protocol.CHUNK, protocol.HOST_CHUNK = chunk, 1
    mesh = init_device_mesh("cpu", (hosts, local))
    results = []
    for case, (codec, local_codec, _, _, op) in enumerate(CASES):
        x = data(rank, case)
        assert ncd.all_reduce(x, op, mesh, codec=codec, local_codec=local_codec) is None
        results.append(x)
    return results


def expected(case: int, hosts: int, local: int, chunk: int) -> Tensor:
    """The three steps in plain codec calls: sums within hosts, the reduction between them, the parts together."""
    spec, near, numel, dtype, op = CASES[case]
    lossless = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "raw")
    codec, close = nc.codec(spec), nc.codec(near or lossless)
    divisor = hosts * local if op == AVG else 1
    parts = []
    for owner, mine in enumerate(model.parts(numel, local)):
        of_hosts = [
            model.summed(close, [data(host * local + i, case)[mine] for i in range(local)], owner, 1)
            for host in range(hosts)
        ]
        if hosts > 1:
            chunks = in_chunks(len(of_hosts[0]), chunk)
            total = torch.cat([model.all_reduce(codec, [x[piece] for x in of_hosts], divisor) for piece in chunks])
        else:
            total = of_hosts[0] / torch.full_like(of_hosts[0], divisor)
        done = total.to(dtype)
        parts.append(model.there(close, done[None], 0, dtype)[0] if local > 1 else done)
    return torch.cat(parts)


def bound(case: int, hosts: int, local: int, chunk: int) -> Tensor:
    """A bound, per element, where the local codec is raw.

    Sums within a host are off by at most (local - 1) 2**-23 times the sum of magnitudes. What follows is an all_reduce
    of those sums between hosts, with its own bound; dividing is part of it.
    """
    spec, _, numel, _, op = CASES[case]
    divisor = hosts * local if op == AVG else 1
    inputs = [data(rank, case) for rank in range(hosts * local)]
    between = []
    for owner, mine in enumerate(model.parts(numel, local)):
        of_hosts = [
            model.summed(nc.codec("raw"), [x[mine] for x in inputs[host * local : (host + 1) * local]], owner, 1)
            for host in range(hosts)
        ]
        for piece in in_chunks(len(of_hosts[0]), chunk):
            between.append(model.all_reduce_bound(nc.codec(spec), [x[piece] for x in of_hosts], divisor))
    return local * 2.0**-23 * torch.stack(inputs).double().abs().sum(0) / divisor + torch.cat(between)


@pytest.mark.parametrize("chunk", [protocol.CHUNK, 1 << 14])
@pytest.mark.parametrize(("hosts", "local"), SHAPES)
def test_every_rank_of_a_mesh_ends_with_the_same_bits_those_of_the_model_within_the_bound(
    hosts: int, local: int, chunk: int
) -> None:
    found = run(hosts * local, reduced, hosts, local, chunk)
    for case, (_, near, numel, dtype, op) in enumerate(CASES):
        result = found[0][case]
        for of_rank in found:
            assert same_bits(of_rank[case], result), CASES[case]
        assert same_bits(result, expected(case, hosts, local, chunk)), CASES[case]
        if near is None and dtype == torch.float32 and numel and hosts > 1:
            inputs = torch.stack([data(rank, case) for rank in range(hosts * local)]).double()
            exact = inputs.mean(0) if op == AVG else inputs.sum(0)
            assert bool(((result.double() - exact).abs() <= bound(case, hosts, local, chunk)).all()), CASES[case]


def counted(rank: int, hosts: int, local: int) -> dict[str, ncd.OpStats]:
    mesh = init_device_mesh("cpu", (hosts, local))
    ncd.reset_stats()
    ncd.all_reduce(torch.ones(128 * hosts * local * 10), group=mesh, codec="int8")
    return ncd.stats()


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 3), (4, 2), (4, 1)])
def test_between_hosts_a_rank_sends_one_part_in_local_of_the_encoded_bytes(hosts: int, local: int) -> None:
    numel, codec = 128 * hosts * local * 10, nc.codec("int8")
    encoded = hosts * local * codec.row_bytes(numel // (hosts * local))  # all rows of the whole tensor
    for stats in run(hosts * local, counted, hosts, local):
        between = stats["all_reduce between hosts"]
        headers = (hosts - 1) * agreement.HEADER_BYTES
        assert between.sent_bytes - headers == 2 * (hosts - 1) * encoded // hosts // local
        assert between.calls == 1
        within = stats["all_reduce within hosts"]
        trips = 2 * (local - 1) * (agreement.HEADER_BYTES + 4 * numel // local)
        assert within.sent_bytes == trips  # fp32 there and back
        assert within.calls == 2


def overlapping(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = [torch.full((n,), float(i + rank)) for i, n in enumerate((10, 50_000, 300, 0, 7) * 4)]
    work = [ncd.all_reduce(x, group=mesh, async_op=True, codec="raw") for x in tensors]
    flat = torch.full((100,), float(rank))
    ncd.all_reduce(flat, codec="raw")  # on the flat group, meanwhile
    ncd.all_reduce(flat, AVG, mesh.get_group(1), codec="raw")
    assert bool((flat == 6.0).all())
    for i, (x, one) in enumerate(zip(tensors, work, strict=True)):
        one.wait()  # type: ignore[union-attr]
        assert bool((x == 4 * i + 6).all())


def test_mesh_collectives_in_flight_do_not_race_with_those_of_their_groups() -> None:
    run(4, overlapping)


def large_halves(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (1, 2))
    results = []
    for group in (mesh, None):
        x = torch.full((300,), 60000.0, dtype=torch.float16)
        ncd.all_reduce(x, group=group, codec="raw")
        results.append(x)
    return results


def test_a_sum_beyond_fp16_saturates_over_a_mesh_as_it_does_without() -> None:
    for over_mesh, flat in run(2, large_halves):
        assert torch.equal(over_mesh, flat)
        assert bool((flat == 65504.0).all())


def in_views(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    base = torch.full((40, 9), 3.0)
    view = base[::2, 1:8]
    view.fill_(float(rank + 1))
    ncd.all_reduce(view, group=mesh, codec="raw")
    assert bool((view == 3.0).all())
    assert bool((base == 3.0).all())


def test_a_mesh_writes_into_views() -> None:
    run(2, in_views)


def in_any_order(rank: int) -> list[Tensor]:
    """torch numbers the ranks of a group in ascending order, whatever the order of a mesh's row is."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]))
    for numel in (1, 300, 5000):
        x = torch.arange(float(numel)) * (rank + 1)
        ncd.all_reduce(x, group=mesh, codec="raw")
        assert torch.equal(x, 10 * torch.arange(float(numel)))
    ddp = DistributedDataParallel(torch.nn.Linear(70, 60))
    compression = nc.compress_gradients(ddp, "int4", process_group=mesh, seed=1)
    ddp(mixed(70, seed=rank)).square().sum().backward()
    assert compression.state_dict()["place"] == (0 if rank in (0, 3) else 1)
    assert ddp.module.weight.grad is not None
    return [ddp.module.weight.grad]


def test_rows_of_a_mesh_may_name_their_ranks_in_any_order() -> None:
    first, *rest = run(4, in_any_order)
    for other in rest:
        assert all(map(same_bits, first, other))


def outside(rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[0], [1]]))
    x = torch.full((10,), float(rank + 1))
    ncd.all_reduce(x, group=mesh, codec="raw")
    assert bool((x == 3.0).all())  # 1 + 2, and rank 2 keeps its own 3


def test_a_rank_outside_of_the_mesh_is_left_alone() -> None:
    run(3, outside)
