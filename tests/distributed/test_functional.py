"""ncd.functional: gradients against one process that holds every rank's tensors, and against torch's own.

Inputs are small whole numbers and losses polynomials with whole coefficients, so that every number on the way is exact
in each dtype and gradients can be compared bit for bit.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import within
from ranks import outcomes_of, run
from torch import Tensor
from torch.distributed.nn import functional as theirs

import narrowcast as nc
from cases import DTYPES, mixed, same_bits
from narrowcast import distributed as ncd
from narrowcast.distributed.transport.agreement import HEADER_BYTES
from narrowcast.errors import CollectiveError

F = ncd.functional
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def whole(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def loss_of(rank: int, out: Tensor) -> Tensor:
    """A loss whose gradient, (rank + 1) * out, is another on every rank."""
    return (rank + 1) * out.square().sum() / 2


# -- one process that plays every rank ------------------------------------------------------------------------------

Simulated = Callable[[Sequence[Tensor]], list[Tensor]]


def splits(world: int) -> list[list[int]]:
    """How many rows each rank sends to each: uneven, some none."""
    return [[(a + 2 * b) % 3 for b in range(world)] for a in range(world)]


def simulated(world: int) -> dict[str, Simulated]:
    """What every rank gets, given what every rank has."""

    def swapped(inputs: Sequence[Tensor]) -> list[Tensor]:
        pieces = [x.split(sizes) for x, sizes in zip(inputs, splits(world), strict=True)]
        return [torch.cat([of_rank[rank] for of_rank in pieces]) for rank in range(world)]

    def total(inputs: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(inputs)).sum(0)

    return {
        "all_gather": lambda inputs: [torch.cat(list(inputs))] * world,
        "all_gather dim": lambda inputs: [torch.cat(list(inputs), 1)] * world,
        "reduce_scatter": lambda inputs: list(total(inputs).tensor_split(world)),
        "reduce_scatter dim": lambda inputs: list(total(inputs).tensor_split(world, -1)),
        "reduce_scatter AVG": lambda inputs: list((total(inputs) / world).tensor_split(world)),
        "all_reduce": lambda inputs: [total(inputs)] * world,
        "all_reduce AVG": lambda inputs: [total(inputs) / world] * world,
        "all_to_all_single": swapped,
    }


def real(name: str, x: Tensor, rank: int, world: int, **options: Any) -> Tensor:
    sent = splits(world)
    if name == "all_to_all_single":
        return F.all_to_all_single(x, [of[rank] for of in sent], sent[rank], **options)
    return {
        "all_gather": lambda: F.all_gather(x, **options),
        "all_gather dim": lambda: F.all_gather(x, None, dim=1, **options),
        "reduce_scatter": lambda: F.reduce_scatter(x, **options),
        "reduce_scatter dim": lambda: F.reduce_scatter(x, SUM, None, dim=-1, **options),
        "reduce_scatter AVG": lambda: F.reduce_scatter(x, AVG, **options),
        "all_reduce": lambda: F.all_reduce(x, **options),
        "all_reduce AVG": lambda: F.all_reduce(x, op=AVG, group=dist.group.WORLD, **options),
    }[name]()


def inputs_of(name: str, rank: int, world: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = sum(splits(world)[rank]) if name == "all_to_all_single" else 2 * world
    return whole(rank, rows, 3 * world, dtype=dtype)


def exact(name: str, world: int) -> bool:
    """Averages over other numbers than powers of two round."""
    return "AVG" not in name or world in (1, 2, 4)


def gradients(rank: int, world: int) -> dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]]:
    found = {}
    for name in simulated(world):
        for dtype in DTYPES:
            x = inputs_of(name, rank, world, dtype).requires_grad_()
            before = x.detach().clone()
            out = real(name, x, rank, world, codec="raw")
            loss_of(rank, out).backward()
            assert same_bits(x.detach(), before)
            assert out.requires_grad
            assert out.dtype == dtype
            assert x.grad is not None
            found[name, dtype] = out.detach(), x.grad
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_and_gradients_are_those_of_the_sum_of_all_losses(world: int) -> None:
    found = run(world, gradients, world)
    for name, simulate in simulated(world).items():
        if not exact(name, world):
            continue
        for dtype in DTYPES:
            leaves = [inputs_of(name, rank, world).requires_grad_() for rank in range(world)]
            outputs = simulate(leaves)
            torch.stack([loss_of(rank, out) for rank, out in enumerate(outputs)]).sum().backward()
            for rank, leaf in enumerate(leaves):
                out, grad = found[rank][name, dtype]
                assert torch.equal(out, outputs[rank].detach().to(dtype)), (name, dtype)
                assert torch.equal(grad, leaf.grad.to(dtype)), (name, dtype)  # type: ignore[union-attr]


def averages(rank: int) -> None:
    """With three ranks an average rounds: once to fp32 forward, once backward, each by 2**-24 of it."""
    for name in ("reduce_scatter AVG", "all_reduce AVG"):
        x = inputs_of(name, rank, 3).requires_grad_()
        loss_of(rank, real(name, x, rank, 3, codec="raw")).backward()
        leaves = [inputs_of(name, peer, 3).double().requires_grad_() for peer in range(3)]
        outputs = simulated(3)[name](leaves)
        torch.stack([loss_of(peer, out) for peer, out in enumerate(outputs)]).sum().backward()
        expected = leaves[rank].grad
        assert x.grad is not None
        assert expected is not None
        # |out| <= 2, so gradients are sums of up to 3 terms of at most 3 * 2 each, over 3; a handful of roundings.
        assert bool(((x.grad - expected).abs() <= 8 * 2.0**-24 * 6).all())


def test_averages_over_three_ranks_are_right_up_to_their_rounding() -> None:
    run(3, averages)


# -- against torch --------------------------------------------------------------------------------------------------


def beside_torch(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    pairs: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "all_gather": (lambda x: F.all_gather(x, codec="raw"), lambda x: torch.cat(theirs.all_gather(x))),
        "all_reduce": (lambda x: F.all_reduce(x, codec="raw"), lambda x: theirs.all_reduce(x)),
        "all_to_all_single": (
            lambda x: F.all_to_all_single(x, codec="raw"),
            lambda x: theirs.all_to_all_single(torch.empty_like(x), x),
        ),
    }
    for name, functions in pairs.items():
        results = []
        for function in functions:
            x = whole(rank, 2 * world, 5).requires_grad_()
            out = function(x)
            loss_of(rank, out).backward()
            results.append((out.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0]), name
        assert torch.equal(results[0][1], results[1][1]), name  # type: ignore[arg-type]


def test_gradients_are_those_of_torch_distributed_nn() -> None:
    run(3, beside_torch, 3)


def test_names_and_order_are_those_of_torch() -> None:
    for name in ("all_gather", "all_reduce"):
        assert (
            list(inspect.signature(getattr(F, name)).parameters)[:2]
            == list(inspect.signature(getattr(theirs, name)).parameters)[:2]
        )
    order = ["tensor", "output_split_sizes", "input_split_sizes", "group", "codec", "backward_codec", "seed"]
    assert list(inspect.signature(F.all_to_all_single).parameters) == order


# -- layouts --------------------------------------------------------------------------------------------------------


def layouts(rank: int, world: int) -> None:
    for name in simulated(world):
        rows, columns = inputs_of(name, rank, world).shape
        grads = []
        for strided in (False, True):
            leaf = inputs_of(name, rank, world).requires_grad_()
            x = leaf
            if strided:
                x = torch.stack([leaf, leaf], -1)[..., 0]  # the same numbers, two elements apart
                assert rows == 0 or not x.is_contiguous()
            out = real(name, x, rank, world, codec="raw")
            assert out.is_contiguous()
            if strided:  # a gradient that is a transposed view
                (out.t().contiguous() * torch.arange(out.shape[1])[:, None]).sum().backward()
            else:
                (out * torch.arange(out.shape[1])).sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads), name  # type: ignore[call-overload]

        leaf = inputs_of(name, rank, world).requires_grad_()
        real(name, leaf, rank, world, codec="raw").sum().backward()  # a gradient of one element, expanded
        each = {"all_gather": world, "all_gather dim": world, "all_reduce": world}.get(name, 1)
        each = 1 / world if name == "reduce_scatter AVG" else each
        assert torch.equal(leaf.grad, torch.full((rows, columns), float(each))), name  # type: ignore[arg-type]

    zero = torch.zeros(0, 4, requires_grad=True)
    F.all_gather(zero, codec="int8").sum().backward()
    F.all_reduce(zero, codec="int8").sum().backward()
    scalar = torch.tensor(float(rank), requires_grad=True)
    out = F.all_gather(scalar, codec="raw")
    assert out.tolist() == [float(peer) for peer in range(world)]
    out.sum().backward()
    assert scalar.grad is not None
    assert scalar.grad.shape == ()
    assert scalar.grad.item() == world


def test_inputs_and_gradients_of_any_layout_are_taken() -> None:
    run(2, layouts, 2)


# -- codecs and seeds -----------------------------------------------------------------------------------------------


def sent(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many bytes its collectives sent, headers not counted."""
    ncd.reset_stats()
    result = function()
    found = ncd.stats().values()
    return result, sum(op.sent_bytes - op.calls * HEADER_BYTES for op in found)


def two_codecs(rank: int) -> None:
    numel = 2 * 640
    row = {spec: nc.codec(spec).row_bytes for spec in ("raw", "int8", "int4", "bf16")}
    for forward, backward in (("raw", "int4"), ("int4", "raw"), ("int8", None)):
        back = backward or forward
        options = {"codec": forward, "backward_codec": backward}
        cases: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
            "all_gather": (lambda x: F.all_gather(x, **options), row[forward](numel), row[back](numel)),  # noqa: B023
            "reduce_scatter": (
                lambda x: F.reduce_scatter(x, **options),  # noqa: B023
                row[forward](numel // 2),
                row[back](numel // 2),
            ),
            "all_reduce": (
                lambda x: F.all_reduce(x, **options),  # noqa: B023
                2 * row[forward](numel // 2),
                2 * row[back](numel // 2),
            ),
            "all_to_all": (
                lambda x: F.all_to_all_single(x, **options),  # noqa: B023
                row[forward](numel // 2),
                row[back](numel // 2),
            ),
        }
        for name, (function, there, here) in cases.items():
            x = mixed(numel, seed=rank).requires_grad_()
            out, bytes_forward = sent(lambda: function(x))  # noqa: B023
            _, bytes_backward = sent(lambda: out.square().sum().backward())  # noqa: B023
            assert (bytes_forward, bytes_backward) == (there, here), (name, options)
            with torch.no_grad():
                quiet, again = sent(lambda: function(x))  # noqa: B023
            assert again == there
            assert not quiet.requires_grad
            assert torch.equal(quiet, out)


def test_each_direction_travels_in_its_own_codec() -> None:
    run(2, two_codecs)


def seeded(rank: int) -> None:
    codec = "int4:stochastic=true"
    results = []
    for seed in (5, 5, 6, None, None):
        x = mixed(1000, seed=3).requires_grad_()
        out = F.all_reduce(x, codec=codec, seed=seed)
        out.backward(mixed(1000, seed=3))  # the same numbers back as forth
        results.append((out.detach(), x.grad))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])  # type: ignore[arg-type]
    for one, other in ((0, 2), (3, 4)):
        assert not torch.equal(results[one][0], results[other][0])
        assert not torch.equal(results[one][1], results[other][1])  # type: ignore[arg-type]
    assert not torch.equal(results[0][0], results[0][1])  # type: ignore[arg-type]


def test_a_seed_settles_both_directions_which_draw_apart() -> None:
    run(2, seeded)


# -- gradients of gradients -----------------------------------------------------------------------------------------


def twice(rank: int, world: int) -> dict[str, Tensor]:
    found = {}
    for name in simulated(world):
        x = inputs_of(name, rank, world).requires_grad_()
        out = real(name, x, rank, world, codec="raw")
        (grad,) = torch.autograd.grad(loss_of(rank, out), x, create_graph=True)
        (grad * whole(rank, *x.shape, seed=9)).sum().backward()
        assert x.grad is not None
        found[name] = x.grad
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_of_gradients_are_those_of_one_process(world: int) -> None:
    found = run(world, twice, world)
    for name, simulate in simulated(world).items():
        if not exact(name, world):
            continue
        leaves = [inputs_of(name, rank, world).requires_grad_() for rank in range(world)]
        total = torch.stack([loss_of(rank, out) for rank, out in enumerate(simulate(leaves))]).sum()
        grads = torch.autograd.grad(total, leaves, create_graph=True)
        torch.stack([(g * whole(rank, *g.shape, seed=9)).sum() for rank, g in enumerate(grads)]).sum().backward()
        for rank, leaf in enumerate(leaves):
            assert torch.equal(found[rank][name], leaf.grad), name  # type: ignore[arg-type]


# -- who takes part -------------------------------------------------------------------------------------------------


def one_sided(rank: int) -> None:
    x = torch.ones(10, requires_grad=rank == 0)
    out = F.all_reduce(x)
    if rank == 0:
        out.sum().backward()
    else:
        assert not out.requires_grad
        dist.recv(torch.empty(1), 0)  # alive, and elsewhere


def test_a_backward_that_others_do_not_join_raises_at_the_groups_timeout() -> None:
    outcome = outcomes_of(2, one_sided, group_timeout=1.5)[0]
    assert isinstance(outcome.error, CollectiveError)
    assert "rank 1" in str(outcome.error)
    assert outcome.seconds < within(4)


# -- torch.compile --------------------------------------------------------------------------------------------------


def compiled(rank: int) -> None:
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled_by(backend, rank)


def compiled_by(backend: str, rank: int) -> None:
    from torch._dynamo.utils import counters

    counters.clear()

    def step(x: Tensor) -> Tensor:
        out = F.all_gather(x * 2, codec="int8", backward_codec="int4")
        return (out.sin() * (rank + 1)).sum()

    def in_place(x: Tensor) -> Tensor:
        y = x * 2
        ncd.all_reduce(y, codec="int8")
        return y + 1

    eager = mixed(300, seed=rank).requires_grad_()
    step(eager).backward()
    fast = torch.compile(step, backend=backend)
    for _ in range(3):
        x = mixed(300, seed=rank).requires_grad_()
        loss = fast(x)
        loss.backward()
        assert torch.equal(loss, step(x))
        assert torch.equal(x.grad, eager.grad)  # type: ignore[arg-type]
    assert counters["stats"]["unique_graphs"] == 2  # before it and after it; nothing of its inside
    once = mixed(300, seed=rank)
    assert torch.equal(torch.compile(in_place, backend=backend)(once), in_place(once))
    assert counters["stats"]["unique_graphs"] == 4


def test_compiled_code_breaks_at_a_collective_and_gives_the_same() -> None:
    run(2, compiled)


def test_importing_the_collectives_does_not_load_the_compiler() -> None:
    code = "import sys; from narrowcast import distributed; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- a mixture of experts -------------------------------------------------------------------------------------------


def experts(rank: int, codec: str) -> list[float]:
    """One expert per rank; each token goes to the rank of its sign, is transformed there, and comes back."""
    torch.manual_seed(rank)
    expert = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    embed = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam([*expert.parameters(), *embed.parameters()], lr=1e-2)
    tokens = torch.randn(64, 8)
    losses = []
    for _ in range(40):
        target = torch.where(tokens[:, :1] > 0, tokens.roll(1, 1), -tokens)
        owner = (tokens[:, 0] > 0).long()
        order = owner.argsort(stable=True)
        sent_to = torch.bincount(owner, minlength=2)
        coming = torch.empty_like(sent_to)
        dist.all_to_all_single(coming, sent_to)
        there, here = sent_to.tolist(), coming.tolist()
        dispatched = F.all_to_all_single(embed(tokens)[order], here, there, codec=codec)
        returned = F.all_to_all_single(expert(dispatched), there, here, codec=codec)
        loss = (returned - target[order]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_mixture_of_experts_trains_through_a_quantized_all_to_all() -> None:
    for losses in run(2, experts, "int8"):
        assert losses[-1] < losses[0] / 3
