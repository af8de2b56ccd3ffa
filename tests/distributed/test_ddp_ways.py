"""The ways in which DDP is used: each leaves on every rank the bits that the model of a step says.

All scenes of one number of ranks run in one launch, one after the other; each is a test of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trained
from ranks import run
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import SHAPES, Expected, Given, Named, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)

CODEC, SEED, STEPS = "int4:block=row", 11, 3
FEW = 0.004
"""MB, or 1,000 elements: buckets of one or two parameters."""


def _steps(ddp: nn.Module, rank: int, steps: int = STEPS, first: int = 0) -> list[Named]:
    return [trained.backward(ddp, given(SHAPES, rank, step)) for step in range(first, first + steps)]


def _right(world: int, steps: int = STEPS, codec: str = CODEC, feedback: Any = True) -> list[Named]:
    expected = Expected(nc.codec(codec), world, feedback, [SEED] * world)
    return [expected.step([given(SHAPES, rank, step) for rank in range(world)]) for step in range(steps)]


def _with(rank: int, codec: str = CODEC, shapes: trained.Shapes = SHAPES, **options: Any) -> tuple[DDP, Any]:
    ddp = DDP(Given(shapes), **options)
    return ddp, nc.compress_gradients(ddp, codec, error_feedback=True, seed=SEED)


# -- options of DDP ---------------------------------------------------------------------------------------------------


def plain(rank: int) -> Any:
    ddp, state = _with(rank)
    return _steps(ddp, rank), len(state.stats().buckets)


def two_buckets(rank: int) -> Any:
    ddp, state = _with(rank, bucket_cap_mb=0.016)
    return _steps(ddp, rank), len(state.stats().buckets)


def many_buckets(rank: int) -> Any:
    ddp, state = _with(rank, bucket_cap_mb=FEW)
    return _steps(ddp, rank), len(state.stats().buckets)


def bucket_views(rank: int) -> Any:
    ddp, state = _with(rank, gradient_as_bucket_view=True, bucket_cap_mb=FEW)
    return _steps(ddp, rank), len(state.stats().buckets)


def static_graph(rank: int) -> Any:
    ddp, state = _with(rank, static_graph=True, bucket_cap_mb=FEW)
    return _steps(ddp, rank), len(state.stats().buckets)


def unused_nowhere(rank: int) -> Any:
    ddp, state = _with(rank, find_unused_parameters=True, bucket_cap_mb=FEW)
    return _steps(ddp, rank), len(state.stats().buckets)


def hook_and_state(rank: int) -> Any:
    ddp = DDP(Given(SHAPES), bucket_cap_mb=FEW)
    state = nc.GradientCompression(CODEC, error_feedback=True, model=ddp.module, seed=SEED)
    ddp.register_comm_hook(state, nc.gradient_hook)
    return _steps(ddp, rank), len(state.stats().buckets)


def compiled_module(rank: int) -> Any:
    ddp = DDP(torch.compile(Given(SHAPES), backend="eager"))  # type: ignore[arg-type]
    state = nc.compress_gradients(ddp, CODEC, error_feedback=True, seed=SEED)
    return _steps(ddp, rank), len(state.stats().buckets)


def compiled_ddp(rank: int) -> Any:
    ddp = torch.compile(DDP(Given(SHAPES)), backend="aot_eager")
    state = nc.compress_gradients(ddp, CODEC, error_feedback=True, seed=SEED)  # type: ignore[arg-type]
    return _steps(ddp, rank), len(state.stats().buckets)  # type: ignore[arg-type]


SAME = {
    scene.__name__: (scene, buckets)
    for scene, buckets in (
        (plain, 1),
        (two_buckets, 2),
        (many_buckets, 4),
        (bucket_views, 4),
        (static_graph, 4),
        (unused_nowhere, 4),
        (hook_and_state, 4),
        (compiled_module, 1),
        (compiled_ddp, 1),
    )
}


def _play(rank: int, scenes: dict[str, Callable[[int], Any]]) -> dict[str, Any]:
    found = {}
    for name, scene in scenes.items():
        try:
            found[name] = scene(rank)
        except Exception as error:
            raise AssertionError(f"scene {name}: {type(error).__name__}: {error}") from error
    return found


@pytest.fixture(scope="module")
def same() -> list[dict[str, Any]]:
    return run(3, _play, {name: scene for name, (scene, _) in SAME.items()}, timeout=150)


@pytest.mark.parametrize("name", SAME)
def test_every_way_leaves_the_same_bits_however_gradients_are_spread_over_buckets(
    name: str, same: list[dict[str, Any]]
) -> None:
    right = _right(3)
    for of_rank in same:
        steps, buckets = of_rank[name]
        assert buckets == SAME[name][1]
        for found, meant in zip(steps, right, strict=True):
            assert found.keys() == meant.keys()
            assert all(same_bits(found[key], meant[key]) for key in meant)


# -- more than one backward, or less than one model -------------------------------------------------------------------


def accumulated(rank: int) -> Any:
    """Two backwards for each step; the first one is not synchronized."""
    ddp, state = _with(rank)
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
    ddp, _ = _with(rank, find_unused_parameters=True, bucket_cap_mb=FEW)
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
    nc.compress_gradients(ddp, CODEC, error_feedback=True, seed=SEED)
    return _steps(ddp, rank)


def two_at_once(rank: int) -> Any:
    """Two models in one backward, each with its own compression."""
    one, _ = _with(rank, bucket_cap_mb=FEW)
    two, _ = _with(rank, "int8:block=256", bucket_cap_mb=0.01)
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
    nc.compress_gradients(ddp, CODEC, error_feedback=True, seed=SEED)
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(_kernel(rank, step)).backward()
        found.append(ddp.module.conv.weight.grad.clone())
    return found, found[0].is_contiguous(memory_format=torch.channels_last)


def _kernel(rank: int, step: int) -> Tensor:
    return given({"conv": (24, 8, 3, 3)}, rank, step)["conv"]


def other_layouts(rank: int) -> Any:
    """A tied weight, and one without elements that anyone would send."""
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(30))
    ddp = DDP(model)
    nc.compress_gradients(ddp, "raw", error_feedback=False)
    ddp(torch.full((1, 30), float(rank + 1))).sum().backward()
    return model[0].weight.grad.clone()


def several_dtypes(rank: int) -> Any:
    """DDP gives each dtype buckets of its own."""
    model = Given(SHAPES)
    for name, dtype in OTHERS.items():
        model.register_parameter(name, nn.Parameter(model.get_parameter(name).detach().to(dtype)))
    ddp = DDP(model)
    state = nc.compress_gradients(ddp, CODEC, error_feedback=True, seed=SEED)
    return [trained.backward(ddp, _of_dtypes(rank, step)) for step in range(STEPS)], len(state.stats().buckets)


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
    ddp, state = _with(rank, bucket_cap_mb=FEW)
    _steps(ddp, rank, 2)
    reduce, done = state.reduce, []
    store = distributed_c10d._get_default_store()

    def watched(*args: Any) -> Any:
        future = reduce(*args)
        done.append(future.done())
        if rank == 0 and len(done) == 4:
            store.set("handed over", "yes")
        return future

    state.reduce = watched
    if rank == 1:
        store.wait(["handed over"])
    return trained.backward(ddp, given(SHAPES, rank, 2)), done


MORE: dict[str, Callable[[int], Any]] = {
    scene.__name__: scene
    for scene in (
        accumulated,
        unused_on_one,
        frozen,
        two_at_once,
        channels_last,
        other_layouts,
        several_dtypes,
        uneven,
        overlapping,
    )
}


@pytest.fixture(scope="module")
def more() -> list[dict[str, Any]]:
    return run(2, _play, MORE, timeout=150)


def _agree(found: list[Named], right: list[Named]) -> None:
    for step, (one, other) in enumerate(zip(found, right, strict=True)):
        assert one.keys() == other.keys(), step
        for name in other:
            assert same_bits(one[name], other[name]), (step, name)


def test_what_no_sync_accumulated_is_sent_with_the_next_step(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True, [SEED] * 2)
    right = []
    for step in range(STEPS):
        pairs = [(given(SHAPES, rank, 2 * step), given(SHAPES, rank, 2 * step + 1)) for rank in range(2)]
        right.append(expected.step([{name: a[name] + b[name] for name in a} for a, b in pairs]))
    for of_rank in more:
        found, steps = of_rank["accumulated"]
        assert steps == STEPS, "a step is one synchronization"
        _agree(found, right)


def test_a_parameter_that_a_rank_does_not_use_counts_as_zeros_there(more: list[dict[str, Any]]) -> None:
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
    for of_rank in more:
        _agree(of_rank["unused_on_one"], right)


def test_frozen_parameters_are_left_alone(more: list[dict[str, Any]]) -> None:
    right = [{n: g for n, g in step.items() if n not in ("even", "norm")} for step in _right(2)]
    for of_rank in more:
        _agree(of_rank["frozen"], right)


def test_two_models_in_one_backward_do_not_disturb_each_other(more: list[dict[str, Any]]) -> None:
    for of_rank in more:
        ones, twos = zip(*of_rank["two_at_once"], strict=True)
        _agree(list(ones), _right(2))
        _agree(list(twos), _right(2, codec="int8:block=256"))


def test_a_weight_in_channels_last_is_averaged_in_its_own_order(more: list[dict[str, Any]]) -> None:
    def stored(weight: Tensor) -> Tensor:
        return weight.permute(0, 2, 3, 1).contiguous()

    expected = Expected(nc.codec(CODEC), 2, True, [SEED] * 2)
    right = []
    for step in range(STEPS):
        found = expected.step([{"conv.weight": stored(_kernel(rank, step))} for rank in range(2)])
        right.append(found["conv.weight"])
    for of_rank in more:
        found, last = of_rank["channels_last"]
        assert last
        assert all(same_bits(stored(one), other) for one, other in zip(found, right, strict=True))


def test_a_tied_weight_has_one_gradient(more: list[dict[str, Any]]) -> None:
    for of_rank in more:
        # Two uses of the identity on rows of ones and of twos: 2 * (1 + 2) / 2.
        assert torch.equal(of_rank["other_layouts"], torch.full((30, 30), 3.0))


def test_every_dtype_keeps_its_own(more: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec(CODEC), 2, True, [SEED] * 2)
    right = [expected.step([_of_dtypes(rank, step) for rank in range(2)]) for step in range(STEPS)]
    for of_rank in more:
        found, buckets = of_rank["several_dtypes"]
        assert buckets == 3
        _agree(found, right)


def test_ranks_with_fewer_batches_may_join_early(more: list[dict[str, Any]]) -> None:
    for of_rank, other in zip(more, more[::-1], strict=True):
        without, lossless, compressed = of_rank["uneven"]
        # Half of a sum of two is the sum of their halves, to the bit.
        assert all(same_bits(without[name], lossless[name]) for name in without)
        assert not all(same_bits(without[name], compressed[name]) for name in without)
        assert all(same_bits(compressed[name], other["uneven"][2][name]) for name in compressed)


def test_the_hook_returns_at_once_and_backward_goes_on(more: list[dict[str, Any]]) -> None:
    for of_rank in more:
        gradients, _ = of_rank["overlapping"]
        _agree([gradients], _right(2)[2:])
    assert more[0]["overlapping"][1] == [False] * 4


# -- sub-groups -------------------------------------------------------------------------------------------------------


def _apart(rank: int, hooked: bool) -> Any:
    """Ranks 0 and 2 train one model, 1 and 3 another in another codec; between steps all four meet."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    codec = (CODEC, "int8:block=256")[rank % 2]
    ddp = DDP(Given(SHAPES), process_group=mine)
    if hooked:
        state = nc.GradientCompression(codec, error_feedback=True, process_group=mine, model=ddp.module, seed=SEED)
        ddp.register_comm_hook(state, nc.gradient_hook)
    else:
        nc.compress_gradients(ddp, codec, error_feedback=True, seed=SEED)
    found = []
    for step in range(STEPS):
        found.append(trained.backward(ddp, given(SHAPES, rank, step)))
        if rank % 2:
            time.sleep(0.01)
        dist.barrier()
    return found


@pytest.mark.parametrize("hooked", [False, True])
def test_models_of_sub_groups_train_side_by_side(hooked: bool) -> None:
    found = run(4, _apart, hooked, timeout=150)
    for side, codec in enumerate((CODEC, "int8:block=256")):
        expected = Expected(nc.codec(codec), 2, True, [SEED] * 2)
        right = [expected.step([given(SHAPES, rank, step) for rank in (side, side + 2)]) for step in range(STEPS)]
        _agree(found[side], right)
        _agree(found[side + 2], right)


def _alone(rank: int) -> Any:
    """A sub-group of one rank, while the others train without it."""
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    ddp = DDP(Given(SHAPES), process_group=single if rank == 2 else pair)
    state = nc.compress_gradients(ddp, CODEC, error_feedback=True, seed=SEED)
    return _steps(ddp, rank), state.step, state.stats().sent_bytes


def test_a_rank_alone_keeps_its_gradients_as_they_are() -> None:
    one, two, alone = run(3, _alone, timeout=150)
    _agree(one[0], _right(2))
    _agree(two[0], _right(2))
    steps, count, sent = alone
    _agree(steps, [given(SHAPES, 2, step) for step in range(STEPS)])
    assert (count, sent) == (STEPS, 0)


# -- mixed precision --------------------------------------------------------------------------------------------------


def _scaled(rank: int) -> Any:
    """Five steps with a scaler; rank 1 meets an Inf in the second and a NaN in the third."""
    ddp = DDP(trained.mlp())
    state = nc.compress_gradients(ddp, "int4")
    optimizer, scaler = trained.sgd(ddp), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        loss = ddp(trained.batch(rank, step)).square().mean()
        if rank == 1 and step in (1, 2):
            loss = loss * (float("inf") if step == 1 else float("nan"))
        scaler.scale(loss).backward()
        finite = all(bool(g.isfinite().all()) for g in trained.grads(ddp).values())
        scaler.step(optimizer)
        scaler.update()
        kept = state.state_dict()
        tidy = all(bool(r.isfinite().all()) for which in ("sender", "owner") for r in kept[which].values())
        found.append((finite, scaler.get_scale(), tidy, trained.parameters_of(ddp)))
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_the_next_one_trains() -> None:
    found = run(2, _scaled, timeout=150)
    for of_rank in found:
        assert [finite for finite, *_ in of_rank] == [True, False, False, True, True]
        assert [scale for _, scale, *_ in of_rank] == [1024.0, 512.0, 256.0, 256.0, 256.0]
        assert all(tidy for _, _, tidy, _ in of_rank), "residuals stay finite"
        names = of_rank[0][3]
        changed = [
            [not same_bits(of_rank[step][3][name], of_rank[step - 1][3][name]) for name in names]
            for step in (1, 2, 3, 4)
        ]
        assert [all(c) for c in changed] == [False, False, True, True]
        assert not any(changed[0] + changed[1])
    for one, other in zip(*found, strict=True):
        assert all(same_bits(one[3][name], other[3][name]) for name in one[3])


def _one_bad_element(rank: int, codec: str, dtype: torch.dtype) -> Any:
    ddp = DDP(Given(SHAPES, dtype))
    state = nc.compress_gradients(ddp, codec, error_feedback=True)
    found = []
    for step, bad in enumerate((float("inf"), float("nan"), None)):
        gradients = given(SHAPES, rank, step, dtype)
        if bad is not None and rank == 1:
            for name in ("bias", "odd", "prime"):
                gradients[name].view(-1)[-1] = bad  # the last rows are owned by the last ranks
                gradients[name].view(-1)[0] = bad
        found.append(trained.backward(ddp, gradients))
    kept = state.state_dict()
    return found, [r for which in ("sender", "owner") for r in kept[which].values()]


def _bad_elements(rank: int) -> Any:
    return [_one_bad_element(rank, codec, dtype) for codec, dtype in BAD]


BAD = [("int4", torch.float32), ("sign", torch.float32), ("fp8_e4m3", torch.float32), ("int4", torch.float16)]


def test_one_bad_element_is_not_finite_on_every_rank_and_leaves_no_trace() -> None:
    found = run(3, _bad_elements, timeout=150)
    for of_rank in found:
        for steps, residuals in of_rank:
            for step in steps[:2]:
                for name in ("bias", "odd", "prime"):
                    assert not step[name].view(-1)[0].isfinite()
                    assert not step[name].view(-1)[-1].isfinite()
                assert bool(step["even"].isfinite().all()), "others do not notice"
            assert all(bool(gradient.isfinite().all()) for gradient in steps[2].values())
            assert residuals
            assert all(bool(residual.isfinite().all()) for residual in residuals)
