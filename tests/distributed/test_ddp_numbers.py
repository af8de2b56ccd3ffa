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
