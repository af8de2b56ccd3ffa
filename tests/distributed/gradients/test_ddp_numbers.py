"""Which bits a step of compressed gradients leaves: those of a model in plain codec calls, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import SHAPES, Expected, Given, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)

STEPS = 3
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

CASES: list[tuple[str, Any, torch.dtype]] = [
    ("int8", False, FP32),
    ("int4", True, FP32),
    ("nf4", True, FP32),
    ("sign", True, FP32),
    ("int2", "owner", FP32),
    ("int4:block=row", True, FP32),
    ("int8:block=256", True, FP32),
    ("int3:block=96", False, FP32),
    ("int4:stochastic=true", True, FP32),
    ("int4:stochastic=true", False, FP32),
    ("int8:zero_point=true", True, FP32),
    ("levels:table=-1.0|1.0", "owner", FP32),
    ("fp8_e4m3", True, FP32),
    ("int4", True, BF16),
    ("int8", False, BF16),
    ("sign", "owner", BF16),
    ("int4", True, FP16),
    ("nf4", False, FP16),
]


def _cases(world: int) -> list[tuple[str, Any, torch.dtype]]:
    return CASES if world < 5 else CASES[::4]


def _steps(rank: int, world: int) -> Any:
    """Every case: the gradients after each step, and the state after the last."""
    found = []
    for codec, feedback, dtype in _cases(world):
        ddp = DDP(Given(SHAPES, dtype))
        state = nc.compress_gradients(ddp, codec, error_feedback=feedback, seed=100 + rank)
        steps = [trained.backward(ddp, given(SHAPES, rank, step, dtype)) for step in range(STEPS)]
        found.append((steps, state.state_dict()))
    return found


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_every_step_leaves_the_bits_of_the_model_on_every_rank(world: int) -> None:
    found = run(world, _steps, world, timeout=150)
    for case, (spec, feedback, dtype) in enumerate(_cases(world)):
        expected = Expected(nc.codec(spec), world, feedback, [100 + rank for rank in range(world)])
        for step in range(STEPS):
            right = expected.step([given(SHAPES, rank, step, dtype) for rank in range(world)])
            for rank in range(world):
                steps, _ = found[rank][case]
                assert steps[step].keys() == right.keys()
                for name, gradient in right.items():
                    assert same_bits(steps[step][name], gradient), (spec, feedback, dtype, step, rank, name)
        for rank in range(world):
            state = found[rank][case][1]
            for kept, of_model in zip((state["sender"], state["owner"]), expected.state_of(rank, SHAPES), strict=True):
                assert kept.keys() == of_model.keys()
                assert all(same_bits(kept[name], residual) for name, residual in of_model.items()), (spec, rank)


# -- what is sent, and the residuals ----------------------------------------------------------------------------------

EXACT = ("int8", "int4", "int2", "nf4")
TEN = 10


def _ten_steps(rank: int) -> Any:
    """Ten steps in each codec: every step's gradients, and the states after steps 1, 2 and 10."""
    found = []
    for codec in (*EXACT, "sign"):
        ddp = DDP(Given(SHAPES))
        state = nc.compress_gradients(ddp, codec, error_feedback=True)
        steps, states = [], {}
        for step in range(1, TEN + 1):
            steps.append(trained.backward(ddp, given(SHAPES, rank, step)))
            if step in (1, 2, TEN):
                states[step] = state.state_dict()
        found.append((steps, states))
    return found


@pytest.fixture(scope="module")
def ten_steps() -> list[Any]:
    return run(3, _ten_steps, timeout=150)


@pytest.mark.parametrize("case", range(len(EXACT)), ids=EXACT)
def test_sent_plus_residual_is_what_was_meant_on_both_ways(case: int, ten_steps: list[Any]) -> None:
    """To nearest: what is lost of a number is a number of fp32, and is kept exactly."""
    expected = Expected(nc.codec(EXACT[case]), 3, True)
    for step in range(1, TEN + 1):
        applied = expected.step([given(SHAPES, rank, step) for rank in range(3)])
        if step not in (1, 2, TEN):
            continue
        for name, meant in expected.meant.items():
            assert torch.equal(expected.sent[name].double() + expected.sender[name].double(), meant.double())
            result = _rows(applied[name], expected.owner[name])
            assert torch.equal(result.double() + expected.owner[name].double(), expected.owner_meant[name].double())
            assert expected.sender[name].any()
            assert expected.owner[name].any()
        for rank in range(3):
            state = ten_steps[rank][case][1][step]
            for kept, right in zip((state["sender"], state["owner"]), expected.state_of(rank, SHAPES), strict=True):
                assert all(same_bits(kept[name], residual) for name, residual in right.items())


@pytest.mark.parametrize("case", range(len(EXACT) + 1), ids=(*EXACT, "sign"))
def test_what_was_applied_and_the_residuals_add_up_to_the_true_averages(case: int, ten_steps: list[Any]) -> None:
    """Over ten steps: applied + owner's residual + average of the senders' residuals = sum of true averages.

    Residuals are exact but for one rounding each, so only these roundings are left, of u = 2**-24 of their result: at
    each rank gradient + residual, and the residual itself; at the owner N - 1 additions of what arrived, a division,
    the residual added, and the residual itself. Each result is below `size`: the sum over ranks of |meant| + |sent|
    (a partial sum of arrivals is, and so is |residual| <= |meant| + |sent|), or below |owner meant| + |applied|. A
    rank's roundings count for 1/N. In all less than (N + 3) u times size + |owner meant| + |applied|, each step.
    """
    world, u = 3, 2.0**-24
    expected = Expected(nc.codec((*EXACT, "sign")[case]), world, True)
    true: dict[str, torch.Tensor] = {}
    bound: dict[str, torch.Tensor] = {}
    for step in range(1, TEN + 1):
        gradients = [given(SHAPES, rank, step) for rank in range(world)]
        applied = expected.step(gradients)
        for name, meant in expected.meant.items():
            size = (meant.double().abs() + expected.sent[name].double().abs()).sum(0)
            last = expected.owner_meant[name].double().abs() + _rows(applied[name], size).double().abs()
            average = torch.stack([g[name].double() for g in gradients]).mean(0)
            true[name] = true.get(name, 0) + average
            bound[name] = bound.get(name, 0) + (world + 3) * u * (size + last)
    for name in expected.meant:
        numel = true[name].numel()
        total = torch.stack([found[name].double() for found in ten_steps[0][case][0]]).sum(0).view(-1)
        states = [of_rank[case][1][TEN] for of_rank in ten_steps]
        total += torch.cat([state["owner"][name].double() for state in states])
        total += torch.stack([state["sender"][name].double() for state in states]).mean(0)
        error = (total - true[name].view(-1)).abs()
        assert bool((error <= bound[name].view(-1)[:numel]).all()), name
        assert float(error.max()) < 1e-4 * float(true[name].abs().max()), "the bound says something"


def _rows(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient as its owners have it; padding is what it is in a sum that lost nothing there."""
    flat = torch.zeros(like.numel(), dtype=gradient.dtype)
    flat[: gradient.numel()] = gradient.view(-1)
    return flat.view(like.shape)


# -- sizes ------------------------------------------------------------------------------------------------------------

LARGE: trained.Shapes = {"head": (130, 100), "exempt": (2_200_003,), "large": (2_300_001, 1), "tail": (99, 101)}
"""Several pieces: of exempt elements, of a parameter in several chunks, and of what shares a piece with its end."""


def _large(rank: int) -> Any:
    found = []
    for codec in ("int4:block=row", "int8"):
        ddp = DDP(Given(LARGE))
        nc.compress_gradients(ddp, codec, error_feedback=True)
        found.append([trained.backward(ddp, given(LARGE, rank, step)) for step in range(2)])
    return found


def test_parameters_of_several_pieces_get_the_bits_of_the_model() -> None:
    found = run(2, _large, timeout=150)
    gradients = [[given(LARGE, rank, step) for rank in range(2)] for step in range(2)]
    for case, codec in enumerate(("int4:block=row", "int8")):
        expected = Expected(nc.codec(codec), 2, True)
        for step in range(2):
            right = expected.step(gradients[step])
            for of_rank in found:
                assert all(same_bits(of_rank[case][step][name], right[name]) for name in right), (codec, step)


# -- draws ------------------------------------------------------------------------------------------------------------

TWINS: trained.Shapes = {"one": (40, 50), "two": (40, 50)}


def _twins(rank: int) -> Any:
    """Two parameters that have the same gradients on both ranks, in two steps."""
    ddp = DDP(Given(TWINS))
    nc.compress_gradients(ddp, "int2:stochastic=true", error_feedback=False, seed=1)
    gradients = {name: given({"one": (40, 50)}, 0, 0)["one"] for name in TWINS}
    return [trained.backward(ddp, gradients) for _ in range(2)]


def test_no_two_quantizations_draw_the_same() -> None:
    first, second = run(2, _twins)[0]
    results = [step[name] for step in (first, second) for name in TWINS]
    # The halves have two owners. Half of the elements, at least, are not at a level and could go either way.
    halves = [half.reshape(-1) for result in results for half in result.view(-1).split(1024)[:1]]
    for i, one in enumerate(halves):
        for other in halves[:i]:
            assert int((one != other).sum()) > 100


# -- ranks stay together ----------------------------------------------------------------------------------------------

LONG = [("int4:stochastic=true", True), ("int8", False), ("int4", "owner"), ("int8:stochastic=true", False)]


def _many_steps(rank: int, lengths: list[int]) -> Any:
    found = []
    for (codec, feedback), steps in zip(LONG, lengths, strict=False):
        torch.manual_seed(1)
        ddp = DDP(torch.nn.Linear(20, 31))
        nc.compress_gradients(ddp, codec, error_feedback=feedback, seed=rank)
        before, optimizer = trained.parameters_of(ddp), trained.sgd(ddp)
        for step in range(steps):
            optimizer.zero_grad()
            (ddp(trained.batch(rank, step, 20)).sin() - 0.3).square().mean().backward()
            optimizer.step()
        found.append((before, trained.parameters_of(ddp)))
    return found


def _check_together(world: int, lengths: list[int], timeout: float) -> None:
    one, *others = run(world, _many_steps, lengths, timeout=timeout)
    for case in range(len(lengths)):
        before, after = one[case]
        assert all(bool(p.isfinite().all()) for p in after.values())
        assert not any(same_bits(before[name], after[name]) for name in before)
        for other in others:
            assert all(same_bits(after[name], other[case][1][name]) for name in after), LONG[case]


@pytest.mark.parametrize(("world", "lengths"), [(2, [1000, 1000]), (3, [50, 50, 50, 50])])
def test_ranks_have_the_same_bits_after_many_steps(world: int, lengths: list[int]) -> None:
    _check_together(world, lengths, 170)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [3, 4])
def test_ranks_have_the_same_bits_after_a_thousand_steps_in_every_mode(world: int) -> None:
    _check_together(world, [1000] * 4, 850)
