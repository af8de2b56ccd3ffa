"""Steps that are skipped since a gradient is not finite: residuals are those of a run that never saw them, to the bit.

Under DDP here, under FSDP2 in test_fsdp_skipped.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import trained
from ranks import play, run
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import FEW, SHAPES, Given, given

import narrowcast as nc
from cases import same_bits
from narrowcast.distributed.gradients.ddp import average_bucket
from narrowcast.distributed.gradients.ddp_buckets import DdpBucket

pytestmark = pytest.mark.timeout(180)

WORLD = 3
BAD_STEP, END = 2, 5


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states hold the same residuals, of which there are some."""
    named = [(which, name) for which in ("sender", "owner") for name in one[which]]
    return (
        bool(named)
        and all(one[which].keys() == other[which].keys() for which in ("sender", "owner"))
        and all(same_bits(one[which][name], other[which][name]) for which, name in named)
        and any(bool(one[which][name].any()) for which, name in named)
    )


def _spoiled(rank: int, step: int, name: str, bad: float, dtype: torch.dtype) -> trained.Named:
    gradients = given(SHAPES, rank, step, dtype)
    if rank == 1:
        gradients[name].view(-1)[3] = bad
    return gradients


def _scene(rank: int, name: str, bad: float, codec: str, mode: Any, dtype: torch.dtype) -> Any:
    """Steps with a bad one among them, and the same without: the gradients of the rest, and the states."""
    found = []
    for spoiled in (True, False):
        ddp = DDP(Given(SHAPES, dtype), bucket_cap_mb=FEW)
        state = trained.compressed(ddp, codec, error_feedback=mode)
        gradients, states = [], []
        for step in range(END):
            if step == BAD_STEP and spoiled:
                results = trained.backward(ddp, _spoiled(rank, step, name, bad, dtype))
                assert not results[name].isfinite().all()
                assert results["norm"].isfinite().all(), "another bucket"
            elif step == BAD_STEP:
                state.step += 1  # which rounding at random depends on
            else:
                gradients.append(trained.backward(ddp, given(SHAPES, rank, step, dtype)))
            states.append(state.state_dict())
        found.append((gradients, states))
    return found


INF, NAN = float("inf"), float("nan")
SCENES = {
    "compressed": lambda rank: _scene(rank, "odd", INF, "int4", True, torch.float32),
    "exempt": lambda rank: _scene(rank, "bias", NAN, "int4", True, torch.float32),
    "first bucket": lambda rank: _scene(rank, "prime", -INF, "sign", True, torch.float32),
    "last bucket": lambda rank: _scene(rank, "even", NAN, "nf4", True, torch.float32),
    "owner": lambda rank: _scene(rank, "odd", NAN, "int2", "owner", torch.float32),
    "stochastic": lambda rank: _scene(rank, "odd", INF, "int4:stochastic=true", True, torch.float32),
    "by row": lambda rank: _scene(rank, "odd", INF, "int4:block=row", True, torch.float32),
    "fp16": lambda rank: _scene(rank, "odd", INF, "int4", True, torch.float16),
    "bf16": lambda rank: _scene(rank, "odd", NAN, "int4", True, torch.bfloat16),
    "cast": lambda rank: _scene(rank, "odd", INF, "bf16", True, torch.float32),
}


class Scaled:
    """A model in training with a scaler. Rank 1 overflows where it is told to."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32) -> None:
        self.rank = rank
        self.ddp = DDP(trained.mlp(width=25).to(dtype), bucket_cap_mb=0.002)
        self.dtype = dtype
        self.optimizer = trained.sgd(self.ddp)
        # `update(64.0)` leaves the scale as it is: residuals are in its units.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.state = nc.compress_gradients(self.ddp, "int4")

    def step(self, step: int, overflows: bool = False) -> trained.Named:
        self.optimizer.zero_grad()
        loss = self.ddp(trained.batch(self.rank, step).to(self.dtype)).float().square().mean()
        if overflows and self.rank == 1:
            loss = loss * INF
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update(64.0)
        return trained.parameters_of(self.ddp)


def scaled(rank: int, dtype: torch.dtype = torch.float32) -> Any:
    """With skipped steps (the first, two in a row, the last) and without; then resumed right after a skipped one."""
    with_skips, without = Scaled(rank, dtype), Scaled(rank, dtype)
    pairs, skipped = [], {0, 3, 4, 7}
    resumed = None
    for step in range(8):
        before = trained.parameters_of(with_skips.ddp)
        one = with_skips.step(step, step in skipped)
        if step in skipped:
            assert all(same_bits(before[name], one[name]) for name in one), "the scaler skips it"
            without.state.step += 1
        else:
            without.step(step)
        if resumed is not None and step in (5, 6):
            resumed.step(step)
        if step == 4:
            resumed = Scaled(rank, dtype)
            resumed.ddp.load_state_dict(with_skips.ddp.state_dict())
            resumed.optimizer.load_state_dict(copy.deepcopy(with_skips.optimizer.state_dict()))
            resumed.state.load_state_dict(with_skips.state.state_dict())
        states = with_skips.state.state_dict(), without.state.state_dict()
        pairs.append((one, trained.parameters_of(without.ddp), step == 0 or same_state(*states)))
    assert resumed is not None
    pairs.append((trained.parameters_of(resumed.ddp), pairs[-1][0], True))
    return pairs


def scaled_bf16(rank: int) -> Any:
    return scaled(rank, torch.bfloat16)


def forgotten(rank: int) -> Any:
    """A rule of one's own skips step 1; with `forget` the next step is that of a run without residuals."""
    ddp, state = trained.usual("int4", bucket_cap_mb=FEW)
    for step in range(2):
        trained.backward(ddp, given(SHAPES, rank, step))
    state.forget()
    kept = state.state_dict()
    after = trained.backward(ddp, given(SHAPES, rank, 2))
    fresh, _ = trained.usual("int4", bucket_cap_mb=FEW)
    return kept["sender"] or kept["owner"], kept["step"], after, trained.backward(fresh, given(SHAPES, rank, 2))


def forgotten_before_it_is_there(rank: int) -> Any:
    """Residuals that were loaded, and that no step has used yet."""
    ddp, state = trained.usual("int4")
    trained.backward(ddp, given(SHAPES, rank, 0))
    saved = state.state_dict()
    model = Given(SHAPES)
    hooked = DDP(model)
    late = nc.GradientCompression("int4", model=model, error_feedback=True)
    hooked.register_comm_hook(late, nc.gradient_hook)
    late.load_state_dict(saved)
    late.forget()
    fresh, _ = trained.usual("int4")
    return trained.backward(hooked, given(SHAPES, rank, 1)), trained.backward(fresh, given(SHAPES, rank, 1))


def broken_off(rank: int) -> Any:
    """Two buckets a step, handed over as DDP does. One step breaks off after the first of them."""
    found = []
    for breaks in (True, False):
        module = Given(SHAPES)
        state = nc.GradientCompression("int4", model=module)

        def hand_over(step: int, *names: str, module: Given = module, state: Any = state) -> list[torch.Tensor]:
            gradients, results = given(SHAPES, rank, step), []
            for index, name in enumerate(names):
                flat, last = gradients[name].reshape(-1), name == "odd"
                bucket = DdpBucket(flat, [module.get_parameter(name)], [0], index, last)
                results.append(average_bucket(state, bucket).wait())
            return results

        hand_over(0, "even", "odd")
        if breaks:
            hand_over(1, "even")
        before = state.state_dict()
        found.append((before, hand_over(2, "even", "odd"), state.state_dict()))
    return found


OTHERS = {scene.__name__: scene for scene in (scaled, scaled_bf16, forgotten, forgotten_before_it_is_there, broken_off)}


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return run(WORLD, _play, timeout=170)


def _play(rank: int) -> dict[str, Any]:
    return play(rank, {**SCENES, **OTHERS})


@pytest.mark.parametrize("name", SCENES)
def test_a_step_that_is_not_finite_leaves_residuals_as_if_it_had_never_been(
    name: str, played: list[dict[str, Any]]
) -> None:
    for of_rank in played:
        (gradients, states), (right, right_states) = of_rank[name]
        trained.agree(gradients, right)
        assert all(same_state(one, other) for one, other in zip(states, right_states, strict=True))
        assert same_state(states[BAD_STEP], states[BAD_STEP - 1])
        assert not same_state(states[BAD_STEP + 1], states[BAD_STEP])


@pytest.mark.parametrize("name", ["scaled", "scaled_bf16"])
def test_training_with_a_scaler_that_skips_steps_is_training_without_these_steps(
    name: str, played: list[dict[str, Any]]
) -> None:
    for of_rank in played:
        for step, (one, other, same) in enumerate(of_rank[name]):
            assert same, step
            assert all(same_bits(one[key], other[key]) for key in other), step
    for one, other in zip(played[0][name], played[1][name], strict=True):
        assert all(same_bits(one[0][key], other[0][key]) for key in one[0]), "the same on all ranks"


def test_forget_drops_residuals_and_nothing_else(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        kept, step, after, fresh = of_rank["forgotten"]
        assert not kept
        assert step == 2
        trained.agree([after], [fresh])


def test_forget_drops_residuals_that_were_loaded_and_not_used_yet(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        after, fresh = of_rank["forgotten_before_it_is_there"]
        trained.agree([after], [fresh])


def test_a_backward_that_breaks_off_leaves_residuals_as_they_were(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        (before, results, after), (right_before, right, right_after) = of_rank["broken_off"]
        assert same_state(before, right_before)
        assert all(map(same_bits, results, right))
        assert same_state(after, right_after)
