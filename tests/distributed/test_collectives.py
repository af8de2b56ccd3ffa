"""Every collective as torch.distributed takes it: positional and by keyword, any world, size, dtype and group.

On whole numbers `codec="raw"` loses nothing in any dtype, so results must equal those of torch.distributed itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

import narrowcast as nc
from cases import DTYPES, mixed, same_bits
from narrowcast import distributed as ncd
from narrowcast.distributed.encoder import Encoder

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def whole(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers from -8 to 8, others on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


# -- every world ----------------------------------------------------------------------------------------------------


def same_as_torch(rank: int, world: int) -> None:
    dtypes = DTYPES[1:] if world <= 4 else [DTYPES[1 + world % 3]]
    for numel, dtype in [*((n, torch.float32) for n in (0, 1, world - 1, 131)), *((257, d) for d in dtypes)]:
        reductions_agree(rank, world, numel, dtype)
        gathers_agree(rank, world, numel, dtype)
        swaps_agree(rank, world, numel, dtype)


def reductions_agree(rank: int, world: int, numel: int, dtype: torch.dtype) -> None:
    x = whole(rank, numel, dtype=dtype)
    total = x.clone()
    dist.all_reduce(total)
    average = (total.float() / world).to(dtype)
    for op, expected in ((SUM, total), (AVG, average)):
        mine, named = x.clone(), x.clone()
        assert ncd.all_reduce(mine, op, None, False, codec="raw") is None
        ncd.all_reduce(tensor=named, op=op, group=dist.group.WORLD, async_op=False, codec="raw")
        assert torch.equal(mine, expected)
        assert torch.equal(named, expected)

    inputs = [whole(rank + 10 * peer, numel + peer, dtype=dtype) for peer in range(world)]
    expected = sum(whole(peer + 10 * rank, numel + rank).float() for peer in range(world))  # type: ignore[assignment]
    outputs = [torch.empty(numel + rank, dtype=dtype) for _ in range(4)]
    ncd.reduce_scatter(outputs[0], inputs, SUM, None, codec="raw")
    ncd.reduce_scatter(output=outputs[1], input_list=inputs, op=AVG, group=None, async_op=False, codec="raw")
    assert torch.equal(outputs[0], expected.to(dtype))
    assert torch.equal(outputs[1], (expected / world).to(dtype))

    x = whole(rank, world * numel, dtype=dtype)
    expected = sum(whole(peer, world * numel).float() for peer in range(world)).view(world, numel)[rank]  # type: ignore[union-attr]
    outputs = [torch.empty(numel, dtype=dtype) for _ in range(2)]
    ncd.reduce_scatter_tensor(outputs[0], x, SUM, None, False, codec="raw")
    ncd.reduce_scatter_tensor(output=outputs[1], input=x, op=AVG, codec="raw")
    assert torch.equal(outputs[0], expected.to(dtype))
    assert torch.equal(outputs[1], (expected / world).to(dtype))


def gathers_agree(rank: int, world: int, numel: int, dtype: torch.dtype) -> None:
    x = whole(rank, numel, dtype=dtype)
    expected = [whole(peer, numel, dtype=dtype) for peer in range(world)]
    lists = [[torch.empty_like(x) for _ in range(world)] for _ in range(2)]
    ncd.all_gather(lists[0], x, None, False, codec="raw")
    ncd.all_gather(tensor_list=lists[1], tensor=x, group=None, async_op=False, codec="raw")
    outputs = [torch.empty(world * numel, dtype=dtype), torch.empty(world, numel, dtype=dtype)]
    ncd.all_gather_into_tensor(outputs[0], x, None, False, codec="raw")
    ncd.all_gather_into_tensor(output=outputs[1], input=x, codec="raw")
    for found in (*lists, list(outputs[0].view(world, numel)), list(outputs[1])):
        assert all(map(torch.equal, found, expected))

    for src in {0, world - 1, world // 2}:
        mine, named, theirs = x.clone(), x.clone(), x.clone()
        ncd.broadcast(mine, src, None, False, codec="raw")
        ncd.broadcast(tensor=named, group_src=src, codec="raw")
        dist.broadcast(theirs, src)
        assert torch.equal(mine, theirs)
        assert torch.equal(named, theirs)


def swaps_agree(rank: int, world: int, numel: int, dtype: torch.dtype) -> None:
    inputs = [whole(100 * rank + peer, numel % 7 + peer, dtype=dtype) for peer in range(world)]
    expected = [whole(100 * peer + rank, numel % 7 + rank, dtype=dtype) for peer in range(world)]
    lists = [[torch.empty_like(piece) for piece in expected] for _ in range(2)]
    ncd.all_to_all(lists[0], inputs, None, False, codec="raw")
    ncd.all_to_all(output_tensor_list=lists[1], input_tensor_list=inputs, codec="raw")
    assert all(map(torch.equal, lists[0], expected))
    assert all(map(torch.equal, lists[1], expected))

    # From rank a to rank b go (a * b + a) % 3 rows: uneven, and some pieces are empty.
    sent = [(rank * peer + rank) % 3 for peer in range(world)]
    coming = [(peer * rank + peer) % 3 for peer in range(world)]
    x = whole(rank, sum(sent), numel, dtype=dtype)
    found, named, theirs = (torch.empty(sum(coming), numel, dtype=dtype) for _ in range(3))
    ncd.all_to_all_single(found, x, coming, sent, None, False, codec="raw")
    ncd.all_to_all_single(output=named, input=x, output_split_sizes=coming, input_split_sizes=sent, codec="raw")
    dist.all_to_all_single(theirs, x, coming, sent)
    assert torch.equal(found, theirs)
    assert torch.equal(named, theirs)

    x = whole(rank, world * 2, numel, dtype=dtype)
    found, theirs = torch.empty_like(x), torch.empty_like(x)
    ncd.all_to_all_single(found, x, codec="raw")
    dist.all_to_all_single(theirs, x)
    assert torch.equal(found, theirs)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_without_loss_every_collective_gives_what_torch_gives(world: int) -> None:
    run(world, same_as_torch, world)


def uneven_gathers(rank: int) -> None:
    sizes = [0, 5, 40_000, 129]
    for codec in ("raw", "int8:block=row"):
        everyone = [mixed(size, seed=peer) for peer, size in enumerate(sizes)]
        outputs = [torch.empty(size) for size in sizes]
        ncd.all_gather(outputs, everyone[rank], codec=codec)
        for found, x in zip(outputs, everyone, strict=True):
            chosen = nc.codec(codec)
            assert same_bits(found, chosen.decode(chosen.encode(x[None]), x.numel())[0]), codec


def test_all_gather_takes_tensors_of_another_size_from_every_rank() -> None:
    run(4, uneven_gathers)


def alone(rank: int) -> None:
    x = mixed(500)
    for codec in ("sign", "int2:stochastic=true"):
        outputs = [torch.empty(500) for _ in range(5)]
        ncd.all_gather([outputs[0]], x, codec=codec)
        ncd.all_gather_into_tensor(outputs[1], x, codec=codec)
        ncd.reduce_scatter(outputs[2], [x], AVG, codec=codec)
        ncd.all_to_all([outputs[3]], [x], codec=codec)
        ncd.all_to_all_single(outputs[4], x, codec=codec)
        kept = x.clone()
        ncd.all_reduce(kept, AVG, codec=codec)
        ncd.broadcast(kept, 0, codec=codec)
        assert all(same_bits(output, x) for output in (*outputs, kept))


def test_in_a_group_of_one_nothing_is_quantized() -> None:
    run(1, alone)


# -- layouts --------------------------------------------------------------------------------------------------------

SENTINEL = 12345.0
KINDS = ("transposed", "channels_last", "every third", "inner rows")


def strided(kind: str, world: int) -> tuple[Tensor, Tensor]:
    """A tensor of 48 elements for each rank with gaps or odd strides, and the whole memory that it is a view of."""
    if kind == "channels_last":
        base = torch.full((world, 4, 3, 4), SENTINEL).contiguous(memory_format=torch.channels_last)
        return base, base
    if kind == "transposed":
        base = torch.full((12, 4 * world), SENTINEL)
        return base.t(), base
    if kind == "every third":
        base = torch.full((12 * world, 17), SENTINEL)
        return base[1::3, 2:-3], base
    base = torch.full((4 * world + 2, 12), SENTINEL)
    return base[1:-1], base


def calls(rank: int, world: int, codec: str) -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """Every collective as a function of an output and an input of the same shape."""

    def others(out: Tensor) -> list[Tensor]:
        return [torch.empty(out.shape) if peer else out for peer in range(world)]

    def message(out: Tensor, x: Tensor) -> None:
        if rank == 0 and world > 1:
            ncd.send(x, 1, codec=codec)
        if rank == 1:
            ncd.recv(out, 0, codec=codec)

    return {
        "all_reduce": lambda out, x: ncd.all_reduce(out, codec=codec),
        "broadcast": lambda out, x: ncd.broadcast(out, world - 1, codec=codec),
        "all_gather": lambda out, x: ncd.all_gather(others(out), x, codec=codec),
        "all_gather_into": lambda out, x: ncd.all_gather_into_tensor(out, x.tensor_split(world)[-1], codec=codec),
        "reduce_scatter": lambda out, x: ncd.reduce_scatter(out, [x] * world, codec=codec),
        "reduce_scatter_tensor": lambda out, x: ncd.reduce_scatter_tensor(out.tensor_split(world)[-1], x, codec=codec),
        "all_to_all": lambda out, x: ncd.all_to_all(others(out), [x] * world, codec=codec),
        "all_to_all_single": lambda out, x: ncd.all_to_all_single(out, x, codec=codec),
        "message": message,
    }


def layouts(rank: int, world: int) -> None:
    for codec in ("int8", "int8:block=row", "raw"):
        for name, call in calls(rank, world, codec).items():
            for kind in KINDS:
                (output, base), (source, _) = strided(kind, world), strided(kind, world)
                plain, x = (mixed(output.numel(), seed=s + rank).view(output.shape) for s in (0, 50))
                output.copy_(plain)
                source.copy_(x)
                call(plain, x)
                call(output, source)
                assert torch.equal(plain, output), (kind, codec, name)
                assert same_bits(source, x), (kind, codec, name)
                output.fill_(SENTINEL)
                assert bool((base == SENTINEL).all()), (kind, codec, name)


def test_results_are_written_into_any_layout_and_nothing_beside_it() -> None:
    run(3, layouts, 3)


def in_inference_mode(rank: int, world: int) -> None:
    for name, call in calls(rank, world, "int8").items():
        plain, x = (mixed(48 * world, seed=s + rank).view(world, 48) for s in (0, 50))
        with torch.inference_mode():
            output, source = plain.clone(), x.clone()
        assert output.is_inference()
        call(plain, x)
        call(output, source)
        assert torch.equal(plain, output), name


@pytest.mark.parametrize("world", [1, 3])
def test_tensors_of_inference_mode_are_written_to_outside_of_it_as_torch_does(world: int) -> None:
    run(world, in_inference_mode, world)


def aliases(rank: int) -> None:
    whole_output = torch.zeros(3, 1000)
    mine, expected = mixed(1000, seed=rank), torch.empty(3, 1000)
    ncd.all_gather_into_tensor(expected, mine, codec="int8")
    whole_output[rank] = mine
    ncd.all_gather_into_tensor(whole_output, whole_output[rank], codec="int8")
    assert torch.equal(whole_output, expected)

    source, output = mixed(3000, seed=rank).view(3, 1000), torch.empty(1000)
    ncd.reduce_scatter_tensor(output, source, codec="int8")
    ncd.reduce_scatter_tensor(source[rank], source, codec="int8")
    assert torch.equal(source[rank], output)


def test_an_input_may_be_a_view_into_its_output_as_fsdp_passes_it() -> None:
    run(3, aliases)


def with_graphs(rank: int) -> None:
    x = mixed(300, seed=rank).requires_grad_()
    before, doubled = x.detach().clone(), x * 2
    gathered, output = torch.empty(2, 300, requires_grad=True), torch.empty(150, requires_grad=True)
    ncd.all_gather_into_tensor(gathered, doubled, codec="raw")
    ncd.reduce_scatter_tensor(output, x, codec="int8")
    parameter = torch.nn.Parameter(before.clone())
    ncd.all_reduce(parameter, codec="raw")
    ncd.broadcast(parameter, 0, codec="raw")
    assert torch.equal(gathered[rank], before * 2)
    assert torch.equal(parameter, (mixed(300, seed=0) + mixed(300, seed=1)))
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert doubled.grad_fn is not None
    assert same_bits(x.detach(), before)
    doubled.sum().backward()
    assert torch.equal(x.grad, torch.full((300,), 2.0))  # type: ignore[arg-type]


def test_tensors_that_require_grad_are_read_and_written_outside_of_their_graph() -> None:
    run(2, with_graphs)


def scalars(rank: int) -> None:
    x = torch.tensor(float(rank + 1))
    ncd.all_reduce(x, codec="raw")
    assert x.item() == 6.0
    assert x.dim() == 0
    ncd.broadcast(x, 2, codec="int8:block=row")
    output = torch.empty(3)
    ncd.all_gather_into_tensor(output, torch.tensor(float(rank)), codec="raw")
    assert output.tolist() == [0.0, 1.0, 2.0]


def test_a_tensor_without_dimensions_is_one_element() -> None:
    run(3, scalars)


# -- groups ---------------------------------------------------------------------------------------------------------


def in_subgroups(rank: int) -> None:
    for ranks in ([1, 3], [0, 2, 3], [3], [2, 0]):
        group = dist.new_group(ranks)
        order = dist.get_process_group_ranks(group) if rank in ranks else ranks
        x = whole(rank, 70)
        total, sent = x.clone(), x.clone()
        output, swapped = torch.full((70 * len(ranks),), 9.0), torch.full((len(ranks),), 9.0)
        ncd.all_reduce(total, group=group, codec="raw")
        ncd.all_gather_into_tensor(output, x, group, codec="raw")
        ncd.all_to_all_single(swapped, torch.full((len(ranks),), float(rank)), group=group, codec="raw")
        ncd.broadcast(sent, ranks[-1], group, codec="raw")
        if rank in ranks:
            assert torch.equal(total, sum(whole(peer, 70) for peer in ranks))  # type: ignore[arg-type]
            assert torch.equal(output, torch.cat([whole(peer, 70) for peer in order]))
            assert swapped.tolist() == order
            assert torch.equal(sent, whole(ranks[-1], 70))
        else:
            for untouched, before in ((total, x), (sent, x)):
                assert torch.equal(untouched, before)
            assert bool((output == 9.0).all())
            assert bool((swapped == 9.0).all())
            assert ncd.all_reduce(total, group=group, async_op=True) is None


def test_a_subgroup_counts_its_own_ranks_and_leaves_others_alone() -> None:
    run(4, in_subgroups)


def beside_torch(rank: int) -> None:
    """narrowcast's collectives and torch's, in flight at once, in another order on each rank."""
    for i in range(20):
        ours, theirs = torch.full((500,), float(i)), torch.full((500,), float(i + 100))
        if rank % 2:
            work = [dist.all_reduce(theirs, async_op=True), ncd.all_reduce(ours, async_op=True, codec="raw")]
        else:
            work = [ncd.all_reduce(ours, async_op=True, codec="raw"), dist.all_reduce(theirs, async_op=True)]
        for one in work:
            one.wait()
        assert bool((ours == 3 * i).all())
        assert bool((theirs == 3 * (i + 100)).all())


def test_the_callers_own_collectives_on_the_group_do_not_race_with_these() -> None:
    run(3, beside_torch)


def leaving(rank: int, numel: int) -> None:
    """Rank 0 takes its time over what rank 2 gets. Rank 1 has all it needs long before, and leaves."""
    ncd.all_reduce(torch.ones(10))
    if rank == 0:
        plain = Encoder.encode

        def slow(self: Encoder, rows: Tensor, out: Tensor, *key: int) -> Tensor:
            if key[-1] == 2:
                time.sleep(1.0)
            return plain(self, rows, out, *key)

        Encoder.encode = slow  # type: ignore[method-assign]
    output = torch.empty(3, numel)
    ncd.all_to_all_single(output, torch.full((3, numel), float(rank)), codec="raw")
    assert output[:, 0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("numel", [10, 20_000, 100_000, 3_000_000])
def test_a_rank_that_has_all_it_needs_may_leave_before_the_others(numel: int) -> None:
    run(3, leaving, numel)


def any_codec(rank: int) -> list[Tensor]:
    results = []
    for codec in ("int4:block=64", nc.codec("int4:block=64"), {"name": "int4", "block": 64}):
        x = mixed(1000, seed=rank)
        ncd.all_reduce(x, codec=codec)
        results.append(x)
    x = mixed(1000, seed=rank)
    ncd.all_reduce(x)
    y = mixed(1000, seed=rank)
    ncd.all_reduce(y, codec="int8")
    return [*results, x, y]


def test_a_codec_is_given_as_nc_codec_takes_it_and_is_int8_otherwise() -> None:
    for a, b, c, default, int8 in run(2, any_codec):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(default, int8)
        assert not torch.equal(a, int8)
