"""Which bits a collective leaves behind: the same on every rank, those of a model in plain codec calls, within a bound.

The model is model.py. Every codec of the table in cases.py is held to it.
"""

from __future__ import annotations

import model
import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

from cases import CODECS, DTYPES, mixed, same_bits
from narrowcast import distributed as ncd

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
SEED = 7

# Rows of these sizes are above what travels along with a header (128 KB), or above a piece (768 KB).
LARGE = ("raw", "bf16", "int8", "fp8_e4m3:block=32")
PIECES = ("raw", "int8:stochastic=true")


def data(rank: int, case: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank brings: an eighth of `mixed`, so that sums of eight stay within fp16."""
    return mixed(numel, seed=1000 * rank + case, dtype=dtype) / 8


# -- all_reduce -----------------------------------------------------------------------------------------------------


def reductions(world: int) -> list[tuple[str, int, torch.dtype, dist.ReduceOp]]:
    """(codec, numel, dtype, op): every codec once, with sizes, dtypes and ops that take turns."""
    numels = (1000, 129 * world + 5, 2500, 385)
    made = [
        (name, numels[(i + world) % 4], DTYPES[i // 2 % 4], (SUM, AVG)[(i + world) % 2])
        for i, name in enumerate(CODECS)
    ]
    large = LARGE[world % 2 :: 2]
    made += [(name, 150_000 * world + 3, DTYPES[(i + world) % 4], (SUM, AVG)[i]) for i, name in enumerate(large)]
    if world <= 4:
        made += [(name, 900_000 * world + 77, torch.float32, (SUM, AVG)[i]) for i, name in enumerate(PIECES)]
    return made


def all_reduces(rank: int, world: int) -> list[Tensor]:
    results = []
    for case, (name, numel, dtype, op) in enumerate(reductions(world)):
        x = data(rank, case, numel, dtype)
        ncd.all_reduce(x, op, codec=CODECS[name], seed=SEED)
        results.append(x)
    return results


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8])
def test_all_reduce_leaves_the_same_bits_on_every_rank_those_of_the_model_within_the_bound(world: int) -> None:
    found = run(world, all_reduces, world)
    for case, (name, numel, dtype, op) in enumerate(reductions(world)):
        codec, divisor = CODECS[name], world if op == AVG else 1
        inputs = [data(rank, case, numel, dtype) for rank in range(world)]
        result = found[0][case]
        for rank in range(1, world):
            assert same_bits(found[rank][case], result), (name, rank)
        assert same_bits(result, model.all_reduce(codec, inputs, divisor, SEED)), name
        exact = torch.stack([x.double() for x in inputs]).sum(0) / divisor
        bound = model.all_reduce_bound(codec, inputs, divisor, SEED)
        assert bool(((result.double() - exact).abs() <= bound).all()), name


RAW = [
    *((numel, op, torch.float32) for numel in (1, 5, 1000, 100_003) for op in (SUM, AVG)),
    *((numel, op, dtype) for numel, op in ((300, SUM), (90_000, AVG)) for dtype in DTYPES[1:]),
]


def raw_all_reduces(rank: int) -> list[Tensor]:
    results = []
    for case, (numel, op, dtype) in enumerate(RAW):
        x = data(rank, case, numel, dtype)
        ncd.all_reduce(x, op, codec="raw")
        results.append(x)
    return results


@pytest.mark.parametrize("world", [2, 5, 8])
def test_raw_all_reduce_is_the_fp32_sum_in_rank_order(world: int) -> None:
    found = run(world, raw_all_reduces)
    for case, (numel, op, dtype) in enumerate(RAW):
        total = data(0, case, numel, dtype).float()
        for rank in range(1, world):
            total = total + data(rank, case, numel, dtype).float()
        if op == AVG:
            total = total / torch.full_like(total, world)
        for rank in range(world):
            assert same_bits(found[rank][case], total.to(dtype)), (numel, op, dtype, rank)


# -- the others -----------------------------------------------------------------------------------------------------


def movements(world: int) -> list[tuple[str, int, torch.dtype]]:
    """(codec, columns, dtype): tensors of 6 rows for codecs that tell rows apart."""
    names = list(CODECS) if world == 3 else ["raw", "int4", "int8:block=row", "int4:stochastic=true", "nf4"]
    made = [(name, (7, 40, 129)[i % 3], DTYPES[i % 4]) for i, name in enumerate(names)]
    return made + [(name, 9000, DTYPES[i]) for i, name in enumerate(LARGE)]


def matrix(rank: int, case: int, columns: int, dtype: torch.dtype) -> Tensor:
    return data(rank, case, 6 * columns, dtype).view(6, columns)


def lists(rank: int, world: int, case: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """A piece for each rank, of as many rows as that rank's number plus the case, some of them none."""
    rows = [(peer + case) % 4 for peer in range(world)]
    x = data(rank, case, sum(rows) * columns, dtype).view(sum(rows), columns)
    return list(x.split(rows))


def moves(rank: int, world: int) -> list[dict[str, list[Tensor]]]:
    results = []
    for case, (name, columns, dtype) in enumerate(movements(world)):
        codec = CODECS[name]
        x, pieces = matrix(rank, case, columns, dtype), lists(rank, world, case, columns, dtype)
        gathered = [torch.empty_like(x) for _ in range(world)]
        ncd.all_gather(gathered, x, codec=codec, seed=SEED)
        joined = x.new_empty(world * 6, columns)
        ncd.all_gather_into_tensor(joined, x, codec=codec, seed=SEED)
        swapped = [torch.empty_like(pieces[rank]) for _ in range(world)]
        ncd.all_to_all(swapped, pieces, codec=codec, seed=SEED)
        single = x.new_empty(len(pieces[rank]) * world, columns)
        sizes = [len(piece) for piece in pieces]
        ncd.all_to_all_single(single, torch.cat(pieces), [sizes[rank]] * world, sizes, codec=codec, seed=SEED)
        reduced, averaged = torch.empty_like(pieces[rank]), torch.empty_like(x)
        ncd.reduce_scatter(reduced, pieces, codec=codec, seed=SEED)
        ncd.reduce_scatter_tensor(averaged, torch.cat([x] * world), AVG, codec=codec, seed=SEED)
        sent = x.clone()
        ncd.broadcast(sent, case % world, codec=codec, seed=SEED)
        kept = {"gathered": gathered, "joined": [joined], "swapped": swapped, "single": [single]}
        results.append({**kept, "reduced": [reduced], "averaged": [averaged], "sent": [sent]})
    return results


@pytest.mark.parametrize("world", [2, 3, 7])
def test_every_other_collective_leaves_the_bits_of_the_model(world: int) -> None:
    found = run(world, moves, world)
    for case, (name, columns, dtype) in enumerate(movements(world)):
        codec = CODECS[name]
        inputs = [matrix(rank, case, columns, dtype) for rank in range(world)]
        pieces = [lists(rank, world, case, columns, dtype) for rank in range(world)]
        gathered = model.all_gather(codec, inputs, SEED)
        swapped = model.all_to_all(codec, pieces, SEED)
        reduced = model.reduce_scatter(codec, pieces, 1, SEED)
        averaged = model.reduce_scatter(codec, [[x] * world for x in inputs], world, SEED)
        for rank in range(world):
            expected = {
                "gathered": gathered,
                "joined": [torch.cat(gathered)],
                "swapped": swapped[rank],
                "single": [torch.cat(swapped[rank])],
                "reduced": [reduced[rank]],
                "averaged": [averaged[rank]],
                "sent": [gathered[case % world]],
            }
            for what, tensors in expected.items():
                for theirs, ours in zip(found[rank][case][what], tensors, strict=True):
                    assert same_bits(theirs, ours), (name, what, rank)


def gathered_and_broadcast(rank: int) -> list[tuple[Tensor, Tensor]]:
    results = []
    for case, numel in enumerate((40, 3 * 40_000)):
        x = data(rank, case, numel)
        joined = x.new_empty(3, numel)
        ncd.all_gather_into_tensor(joined, x, codec="int4:stochastic=true")
        ncd.broadcast(x, 1, codec="int4:stochastic=true")
        results.append((joined, x))
    return results


def test_without_a_seed_the_sender_still_ends_with_what_it_sent() -> None:
    found = run(3, gathered_and_broadcast)
    for case in range(2):
        for rank in range(1, 3):
            assert same_bits(found[rank][case][0], found[0][case][0])
            assert same_bits(found[rank][case][1], found[0][case][1])


def reduce_scatters(rank: int) -> list[tuple[Tensor, Tensor]]:
    results = []
    for case, numel in enumerate((300, 50_000)):
        everyone = [data(peer, case, 4 * numel).view(4, numel) for peer in range(4)]
        output = torch.empty(numel)
        ncd.reduce_scatter_tensor(output, everyone[rank], codec="int4")
        rows = CODECS["int4"].encode(torch.stack([x[rank] for x in everyone]))
        again = CODECS["int4"].decode_sum(rows, numel, own=everyone[rank][rank], own_rank=rank)
        results.append((output, again))
    return results


def test_reduce_scatter_is_the_decoded_sum_not_quantized_again() -> None:
    for of_rank in run(4, reduce_scatters):
        for output, again in of_rank:
            assert same_bits(output, again)
            assert output.unique().numel() > 16 * output.numel() / 64  # more than 16 values for each block of 64
