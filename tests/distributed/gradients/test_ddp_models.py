"""Models and loops of all kinds under DDP: accumulation, unused, frozen, tied parameters, dtypes, join, overlap.

Each leaves on every rank the bits that the model of a step says. All scenes run in one launch, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trained
from ranks import play, run
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import CODEC, FEW, SEED, SHAPES, STEPS, Expected, Given, Named, given

import narrowcast as nc
from cases import same_bits
from narrowcast.distributed.gradients import ddp as engine
from narrowcast.errors import SpecError

pytestmark = pytest.mark.timeout(180)


def accumulated(rank: int) -> Any:
    """Two backwards for each step; the first one is not synchronized."""
    ddp, state = trained.usual()
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(given(SHAPES, rank, 2 * step)).backward()
        ddp(given(SHAPES, rank, 2 * step + 1)).backward()
        found.append(trained.grads(ddp))
    return found, state.step


def unused_on_one(rank: int) -> Any:
    """In the second step rank 1 does not use "odd"; in the third nobody does."""
    ddp, _ = trained.usual(find_unused_parameters=True, bucket_cap_mb=FEW)
    found = []
    for step in range(5):
        gradients = given(SHAPES, rank, step)
        if step == 2 or (step == 1 and rank == 1):
            del gradients["odd"]
        found.append(trained.backward(ddp, gradients))
    return found


def frozen(rank: int) -> Any:
    model = Given(SHAPES)
    model.get_parameter("even").requires_grad_(False)
    model.get_parameter("norm").requires_grad_(False)
    ddp = DDP(model, bucket_cap_mb=FEW)
    trained.compressed(ddp)
    return trained.steps(ddp, rank)


def two_at_once(rank: int) -> Any:
    """Two models in one backward, each with its own compression."""
    one, _ = trained.usual(bucket_cap_mb=FEW)
    two, _ = trained.usual("int8:block=256", bucket_cap_mb=0.01)
    found = []
    for step in range(STEPS):
        gradients = given(SHAPES, rank, step)
        one.zero_grad()
        two.zero_grad()
        (one(gradients) + two(gradients)).backward()
        found.append((trained.grads(one), trained.grads(two)))
    return found


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 24, 3)

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.conv.weight * gradient).sum()


def channels_last(rank: int) -> Any:
    """Of a weight that is not contiguous, the bucket holds the gradient in the weight's own order."""
    ddp = DDP(Convolutions().to(memory_format=torch.channels_last), find_unused_parameters=True)
    trained.compressed(ddp)
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(_kernel(rank, step)).backward()
        found.append(ddp.module.conv.weight.grad.clone())
    return found, found[0].is_contiguous(memory_format=torch.channels_last)


def _kernel(rank: int, step: int) -> Tensor:
    return given({"conv": (24, 8, 3, 3)}, rank, step)["conv"]


def tied(rank: int) -> Any:
    """Two layers with one weight."""
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(30))
    ddp = DDP(model)
    nc.compress_gradients(ddp, "raw", error_feedback=False)
    ddp(torch.full((1, 30), float(rank + 1))).sum().backward()
    return model[0].weight.grad.clone()


def several_dtypes(rank: int, **options: Any) -> Any:
    """DDP gives each dtype buckets of its own."""
    model = Given(SHAPES)
    for name, dtype in OTHERS.items():
        model.register_parameter(name, nn.Parameter(model.get_parameter(name).detach().to(dtype)))
    ddp = DDP(model, **options)
    state = trained.compressed(ddp)
    found, steps = [], []
    for step in range(STEPS):
        found.append(trained.backward(ddp, _of_dtypes(rank, step)))
        steps.append((state.step, len(state.stats().buckets)))
    return found, steps


def static_graph(rank: int) -> Any:
    """In its first backward DDP hands over all buckets at the end, and numbers none of them."""
    return several_dtypes(rank, static_graph=True)


def static_graph_apart(rank: int) -> Any:
    """The first bucket does not wait."""
    return several_dtypes(rank, static_graph=True, bucket_cap_mb=25)


def static_graph_by_hand(rank: int) -> Any:
    """A hook that was registered by hand knows of no DDP: of its first backward it is told no last bucket."""
    model = Given(SHAPES)
    model.odd = nn.Parameter(torch.zeros(SHAPES["odd"], dtype=torch.bfloat16))
    ddp = DDP(model, static_graph=True)
    state = nc.GradientCompression(CODEC, model=ddp.module)
    ddp.register_comm_hook(state, nc.gradient_hook)
    with pytest.raises(SpecError) as caught:
        trained.backward(ddp, {**given(SHAPES, rank, 0), "odd": torch.ones(SHAPES["odd"], dtype=torch.bfloat16)})
    return str(caught.value), state.step


OTHERS = {"odd": torch.bfloat16, "norm": torch.bfloat16, "prime": torch.float16}


def _of_dtypes(rank: int, step: int) -> Named:
    return {name: g.to(OTHERS.get(name, g.dtype)) for name, g in given(SHAPES, rank, step).items()}


def uneven(rank: int) -> Any:
    """Ranks with more batches than others, under DDP's join: what they end with, beside DDP without a hook."""
    found = []
    for codec in (None, "raw", "int4"):
        ddp = DDP(trained.mlp(), bucket_cap_mb=0.002)
        if codec is not None:
            nc.compress_gradients(ddp, codec)
        optimizer = trained.sgd(ddp)
        with ddp.join():
            trained.train(ddp, rank, range(3 + 3 * rank), optimizer)
        found.append(trained.parameters_of(ddp))
    return found


def overlapping(rank: int) -> Any:
    """Rank 1 starts its step when rank 0 has handed over all its buckets: a hook that waited would wait forever."""
    ddp, _ = trained.usual(bucket_cap_mb=FEW)
    trained.steps(ddp, rank, 2)
    reduce, done = engine.average_bucket, []
    store = distributed_c10d._get_default_store()

    def watched(*args: Any) -> Any:
        future = reduce(*args)
        done.append(future.done())
        if rank == 0 and len(done) == 4:
            store.set("handed over", "yes")
        return future

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "average_bucket", watched)
        if rank == 1:
            store.wait(["handed over"])
        return trained.backward(ddp, given(SHAPES, rank, 2)), done


SCENES: dict[str, Callable[[int], Any]] = {
    scene.__name__: scene
    for scene in (
        accumulated,
        unused_on_one,
        frozen,
        two_at_once,
        channels_last,
        tied,
        several_dtypes,
        static_graph,
        static_graph_apart,
        static_graph_by_hand,
        uneven,
        overlapping,
    )
}


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return run(2, play, SCENES, timeout=150)


def test_what_no_sync_accumulated_is_sent_with_the_next_step(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True, [SEED] * 2)
    right = []
    for step in range(STEPS):
        pairs = [(given(SHAPES, rank, 2 * step), given(SHAPES, rank, 2 * step + 1)) for rank in range(2)]
        right.append(expected.step([{name: a[name] + b[name] for name in a} for a, b in pairs]))
    for of_rank in played:
        found, steps = of_rank["accumulated"]
        assert steps == STEPS, "a step is one synchronization"
        trained.agree(found, right)


def test_a_parameter_that_a_rank_does_not_use_counts_as_zeros_there(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True, [SEED] * 2)
    right = []
    for step in range(5):
        gradients = [given(SHAPES, rank, step) for rank in range(2)]
        if step in (1, 2):
            gradients[1]["odd"].zero_()
        if step == 2:
            gradients[0]["odd"].zero_()
        right.append(expected.step(gradients))
    del right[2]["odd"]  # nobody used it: DDP leaves it without a gradient
    for of_rank in played:
        trained.agree(of_rank["unused_on_one"], right)


def test_frozen_parameters_are_left_alone(played: list[dict[str, Any]]) -> None:
    right = [{n: g for n, g in step.items() if n not in ("even", "norm")} for step in trained.right(2)]
    for of_rank in played:
        trained.agree(of_rank["frozen"], right)


def test_two_models_in_one_backward_do_not_disturb_each_other(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        ones, twos = zip(*of_rank["two_at_once"], strict=True)
        trained.agree(list(ones), trained.right(2))
        trained.agree(list(twos), trained.right(2, codec="int8:block=256"))


def test_a_weight_in_channels_last_is_averaged_in_its_own_order(played: list[dict[str, Any]]) -> None:
    def stored(weight: Tensor) -> Tensor:
        return weight.permute(0, 2, 3, 1).contiguous()

    expected = Expected(nc.codec(CODEC), 2, True, [SEED] * 2)
    right = []
    for step in range(STEPS):
        found = expected.step([{"conv.weight": stored(_kernel(rank, step))} for rank in range(2)])
        right.append(found["conv.weight"])
    for of_rank in played:
        found, last = of_rank["channels_last"]
        assert last
        assert all(same_bits(stored(one), other) for one, other in zip(found, right, strict=True))


def test_a_tied_weight_has_one_gradient(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        # Two uses of the identity on rows of ones and of twos: 2 * (1 + 2) / 2.
        assert torch.equal(of_rank["tied"], torch.full((30, 30), 3.0))


@pytest.mark.parametrize("name", ["several_dtypes", "static_graph", "static_graph_apart"])
def test_every_dtype_keeps_its_own(name: str, played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True, [SEED] * 2)
    right = [expected.step([_of_dtypes(rank, step) for rank in range(2)]) for step in range(STEPS)]
    for of_rank in played:
        found, steps = of_rank[name]
        assert steps == [(step + 1, 3) for step in range(STEPS)]
        trained.agree(found, right)


def test_a_hook_registered_by_hand_that_cannot_tell_the_last_bucket_says_so(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        words, step = of_rank["static_graph_by_hand"]
        assert words.startswith("static_graph: ")
        assert "Call compress_gradients(ddp, ...)" in words
        assert step == 0


def test_ranks_with_fewer_batches_may_join_early(played: list[dict[str, Any]]) -> None:
    for of_rank, other in zip(played, played[::-1], strict=True):
        without, lossless, compressed = of_rank["uneven"]
        # Half of a sum of two is the sum of their halves, to the bit.
        assert all(same_bits(without[name], lossless[name]) for name in without)
        assert not all(same_bits(without[name], compressed[name]) for name in without)
        assert all(same_bits(compressed[name], other["uneven"][2][name]) for name in compressed)


def test_the_hook_returns_at_once_and_backward_goes_on(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        gradients, _ = of_rank["overlapping"]
        trained.agree([gradients], trained.right(2)[2:])
    assert played[0]["overlapping"][1] == [False] * 4
