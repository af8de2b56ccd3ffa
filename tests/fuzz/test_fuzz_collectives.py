"""Random programs of collectives on real ranks: any order, codec, dtype, layout and surroundings, some calls refused.

Every rank must end with the bits of the model (tests/distributed/model.py), which knows no wire and no lane. A program
is drawn from a number, by every rank for itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import model
import torch
import torch.distributed as dist
from campaign import campaign
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import run
from torch import Tensor

from ambient import SURROUNDINGS, surrounded
from cases import CODECS, DTYPES, mixed, same_bits
from narrowcast import Codec
from narrowcast import distributed as ncd

OPS = (
    "all_reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "messages",
)
LAYOUTS = ("plain", "columns", "gaps", "offset")
SPECS = [name for name, codec in CODECS.items() if not codec.stochastic]
AROUND = [None, *(name for name in SURROUNDINGS if "cuda" not in name and "stream" not in name)]


@dataclass
class Step:
    """One call, as all ranks know it. `rows` x `columns` is the shape of one rank's share."""

    index: int
    op: str
    codec: str
    dtype: torch.dtype
    rows: int
    columns: int
    average: bool
    root: int
    sizes: list[list[int]]
    """Rows from each rank to each other, where an op allows them to differ."""
    layouts: list[str]
    around: list[str | None]
    """By rank."""
    asynchronous: bool
    refused_by: int | None
    tags: list[tuple[int, int, int]] = field(default_factory=list)
    """Messages: source, target and tag."""


def program(number: int) -> tuple[int, list[Step]]:
    """The number of ranks, and what they do."""
    draw = random.Random(number)
    world, steps = draw.choice((2, 2, 3, 4, 5)), []
    for index in range(12):
        pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
        tags = [(*draw.choice(pairs), tag) for tag in draw.sample(range(1000), draw.randrange(1, 8))]
        step = Step(
            index,
            draw.choice(OPS),
            draw.choice(SPECS),
            draw.choice(DTYPES),
            draw.choice((0, 1, 2, 3, 7)),
            draw.choice((0, 1, 5, 127, 128, 129, 1000, 30_000)),
            draw.random() < 0.5,
            draw.randrange(world),
            [[draw.choice((0, 0, 1, 2, 5)) for _ in range(world)] for _ in range(world)],
            [draw.choice(LAYOUTS) for _ in range(2)],
            [draw.choice(AROUND) for _ in range(world)],
            draw.random() < 0.4,
            draw.randrange(world) if draw.random() < 0.1 else None,
            tags,
        )
        steps.append(step)
    return world, steps


def values(step: Step, rank: int, rows: int, part: int = 0) -> Tensor:
    x = mixed(rows * step.columns, seed=1000 * step.index + 10 * rank + part, dtype=step.dtype)
    return x.clamp(-1e4, 1e4).view(rows, step.columns)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, in another order in memory, between others, or not at its start."""
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "gaps":
        return torch.stack([x, torch.full_like(x, -7.0)], -1)[..., 0]
    if layout == "offset":
        return torch.cat([torch.full((3,), -7.0, dtype=x.dtype), x.flatten()])[3:].view(x.shape)
    return x


def call(step: Step, rank: int, world: int, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
    """Make the call; `outputs` are the tensors that it writes."""
    op = dist.ReduceOp.AVG if step.average else dist.ReduceOp.SUM
    how = {"codec": CODECS[step.codec], "async_op": step.asynchronous}
    name = step.op
    if step.refused_by == rank:
        inputs, outputs = ([x.to(torch.int32) for x in tensors] for tensors in (inputs, outputs))
    if name == "all_reduce":
        return ncd.all_reduce(outputs[0], op, **how)
    if name == "broadcast":
        return ncd.broadcast(outputs[0], step.root, **how)
    if name == "reduce_scatter":
        return ncd.reduce_scatter(outputs[0], inputs, op, **how)
    if name == "reduce_scatter_tensor":
        return ncd.reduce_scatter_tensor(outputs[0], inputs[0], op, **how)
    if name == "all_gather":
        return ncd.all_gather(outputs, inputs[0], **how)
    if name == "all_gather_into_tensor":
        return ncd.all_gather_into_tensor(outputs[0], inputs[0], **how)
    if name == "all_to_all":
        return ncd.all_to_all(outputs, inputs, **how)
    sent, coming = step.sizes[rank], [row[rank] for row in step.sizes]
    return ncd.all_to_all_single(outputs[0], inputs[0], coming, sent, **how)


def operands(step: Step, rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank passes: what it reads, and what it writes."""
    read, write = step.layouts
    sent, coming = step.sizes[rank], [row[rank] for row in step.sizes]
    x = values(step, rank, step.rows)
    empty = torch.full((step.rows, step.columns), 7.0, dtype=step.dtype)
    if step.op in ("all_reduce", "broadcast"):
        return [], [laid_out(x, write)]
    if step.op == "reduce_scatter":
        inputs = [values(step, rank, step.rows, part) for part in range(world)]
        return [laid_out(x, read) for x in inputs], [laid_out(empty, write)]
    if step.op == "reduce_scatter_tensor":
        return [laid_out(values(step, rank, step.rows * world), read)], [laid_out(empty, write)]
    if step.op == "all_gather":
        return [laid_out(x, read)], [laid_out(empty.clone(), write) for _ in range(world)]
    if step.op == "all_gather_into_tensor":
        return [laid_out(x, read)], [laid_out(empty.repeat(world, 1), write)]
    pieces = [values(step, rank, size, part) for part, size in enumerate(sent)]
    places = [torch.full((size, step.columns), 7.0, dtype=step.dtype) for size in coming]
    if step.op == "all_to_all":
        return [laid_out(x, read) for x in pieces], [laid_out(x, write) for x in places]
    return [laid_out(torch.cat(pieces), read)], [laid_out(torch.cat(places), write)]


def expected(step: Step, world: int) -> list[list[Tensor]]:
    """What each rank must end with."""
    codec: Codec = CODECS[step.codec]
    divisor = world if step.average else 1
    shares = [values(step, rank, step.rows) for rank in range(world)]
    if step.op == "all_reduce":
        return [[model.all_reduce(codec, shares, divisor)]] * world
    if step.op == "broadcast":
        return [[model.all_gather(codec, shares)[step.root]]] * world
    if step.op == "reduce_scatter":
        inputs = [[values(step, rank, step.rows, part) for part in range(world)] for rank in range(world)]
        return [[x] for x in model.reduce_scatter(codec, inputs, divisor)]
    if step.op == "reduce_scatter_tensor":
        whole = [list(values(step, rank, step.rows * world).tensor_split(world)) for rank in range(world)]
        if step.rows == 0:
            whole = [[x.view(0, step.columns) for _ in range(world)] for (x, *_) in whole]
        return [[x] for x in model.reduce_scatter(codec, whole, divisor)]
    if step.op == "all_gather":
        return [model.all_gather(codec, shares)] * world
    if step.op == "all_gather_into_tensor":
        return [[torch.cat(model.all_gather(codec, shares))]] * world
    inputs = [[values(step, rank, n, part) for part, n in enumerate(step.sizes[rank])] for rank in range(world)]
    moved = model.all_to_all(codec, inputs)
    return moved if step.op == "all_to_all" else [[torch.cat(pieces)] for pieces in moved]


def messages(step: Step, rank: int) -> list[Tensor]:
    """Send and receive all of the step's messages, the latter in an order of this rank's own."""
    codec, works, received = CODECS[step.codec], [], {}
    for i, (source, target, tag) in enumerate(step.tags):
        if rank == source:
            works.append(ncd.isend(values(step, i, 3), target, tag=tag, codec=codec))
    mine = [(i, m) for i, m in enumerate(step.tags) if m[1] == rank]
    random.Random(100 * step.index + rank).shuffle(mine)
    for i, (source, _, tag) in mine:
        received[i] = torch.full((3, step.columns), 7.0, dtype=step.dtype)
        works.append(ncd.irecv(received[i], source, tag=tag, codec=codec))
    for work in works:
        work.wait()
    return [received[i] for i in sorted(received)]


def carry_out(rank: int, number: int) -> list[list[Tensor] | str]:
    world, steps = program(number)
    results: list[list[Tensor] | str] = []
    pending: list[tuple[Any, int]] = []
    for step in steps:
        if step.op == "messages":
            results.append(messages(step, rank))
            continue
        inputs, outputs = operands(step, rank, world)
        before = [x.clone() for x in inputs]
        results.append(outputs)
        try:
            with surrounded(step.around[rank]):
                work = call(step, rank, world, inputs, outputs)
            if work is not None and step.refused_by is None:
                pending.append((work, step.index))
            elif work is not None:
                work.wait()
        except Exception as error:
            results[-1] = type(error).__name__
        if not step.asynchronous:
            assert all(map(same_bits, inputs, before)), "an input was changed"
    for work, _ in pending:
        work.wait()
    return results


@campaign(6)
@given(number=st.integers(0, 2**32))
@example(number=1)
def test_random_programs_of_collectives_end_with_the_bits_of_the_model(number: int) -> None:
    world, steps = program(number)
    found = run(world, carry_out, number, timeout=120)
    for step in steps:
        if step.op == "messages":
            check_messages(step, found)
        elif step.refused_by is None:
            theirs = expected(step, world)
            for rank in range(world):
                ours = found[rank][step.index]
                assert not isinstance(ours, str), (step, rank, ours)
                assert len(ours) == len(theirs[rank])
                for x, y in zip(ours, theirs[rank], strict=True):
                    assert same_bits(x, y.view(x.shape)), (step, rank)
        else:
            for rank in range(world):
                refused = rank == step.refused_by
                assert found[rank][step.index] == ("DtypeError" if refused else "CollectiveError"), (step, rank)


def check_messages(step: Step, found: list[Any]) -> None:
    codec = CODECS[step.codec]
    for rank, results in enumerate(found):
        expected = [i for i, (_, target, _) in enumerate(step.tags) if target == rank]
        for i, x in zip(expected, results[step.index], strict=True):
            y = model.there(codec, codec.as_rows(values(step, i, 3)), 0, step.dtype).view(3, step.columns)
            assert same_bits(x, y), (step, rank, i)
