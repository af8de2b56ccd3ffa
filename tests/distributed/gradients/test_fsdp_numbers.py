"""Which bits a step of compressed gradients leaves under FSDP2: those of a model in plain codec calls."""

from __future__ import annotations

from typing import Any

import pytest
import sharded
import torch
from ranks import run
from sharded import SHAPES, STACK, Expected, stack
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trained import Given, given

import narrowcast as nc
from cases import same_bits

pytestmark = pytest.mark.timeout(180)

STEPS = 3
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

CASES: list[tuple[str, bool, torch.dtype, torch.dtype]] = [
    # the codec, error feedback, the dtype of parameters and gradients in use, the dtype in which gradients are reduced
    ("int8", False, FP32, FP32),
    ("int4", True, FP32, FP32),
    ("nf4", False, FP32, FP32),
    ("sign", True, FP32, FP32),
    ("int4:block=row", True, FP32, FP32),
    ("int3:block=96", False, FP32, FP32),
    ("int4:stochastic=true", True, FP32, FP32),
    ("int2:stochastic=true", False, FP32, FP32),
    ("levels:table=-1.0|1.0", True, FP32, FP32),
    ("int4", True, BF16, FP32),
    ("int4", True, BF16, BF16),
    ("int8", False, BF16, BF16),
    ("int4", True, FP16, FP16),
]


def _steps(rank: int) -> Any:
    """Every case: the gradients after each step, and the state after the last."""
    found = []
    for codec, feedback, dtype, reduced in CASES:
        module = fully_shard(Given(SHAPES), mp_policy=MixedPrecisionPolicy(dtype, reduced))
        state = nc.compress_gradients(module, codec, error_feedback=feedback, seed=100 + rank)
        steps = [sharded.backward(module, given(SHAPES, rank, step, dtype)) for step in range(STEPS)]
        found.append((steps, state.state_dict()))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_step_leaves_the_bits_of_the_model(world: int) -> None:
    ranks = run(world, _steps, timeout=150)
    for case, (codec, feedback, dtype, reduced) in enumerate(CASES):
        expected = Expected(nc.codec(codec), world, feedback, [100 + rank for rank in range(world)])
        # torch divides fp16 half before and half after the sum
        halves = {"before": 2, "divisor": 1, "after": world / 2} if reduced == FP16 else {}
        for step in range(STEPS):
            gradients = [
                {name: g.to(reduced) for name, g in given(SHAPES, rank, step, dtype).items()} for rank in range(world)
            ]
            right = expected.step(gradients, **halves)  # type: ignore[arg-type]
            for rank in range(world):
                found = ranks[rank][case][0][step]
                for name, value in right.items():
                    assert same_bits(found[name], value.float()), (codec, feedback, dtype, reduced, step, rank, name)
        for rank in range(world):
            state = ranks[rank][case][1]
            kept = expected.state_of(rank, SHAPES)
            assert state["owner"] == {}
            assert state["sender"].keys() == kept.keys()
            assert all(same_bits(state["sender"][name], kept[name]) for name in kept), (codec, rank)
            assert (state["ranks"], state["rank"]) == ((world, rank) if feedback else (0, 0))


def test_what_was_sent_and_the_residual_are_what_was_meant() -> None:
    expected = Expected(nc.codec("int4"), 3, True)
    for step in range(STEPS):
        before = {name: kept.clone() for name, kept in expected.sender.items()}
        gradients = [given(SHAPES, rank, step) for rank in range(3)]
        expected.step(gradients)
        for name, meant in expected.meant.items():
            padded = torch.stack([sharded.padded(g[name], 3) for g in gradients])
            assert same_bits(meant, padded + before.get(name, torch.zeros(padded.shape)))
            assert torch.equal(expected.sent[name] + expected.sender[name], meant)  # int4: a difference fp32 holds


# -- several groups, several pieces -----------------------------------------------------------------------------------

LARGE = {"large": (1000, 1500), "small": (64, 64), "norm": (300,), "larger": (700, 3001)}
"""3.6 million elements, in pieces of 2 million; a parameter of two pieces, and pieces of two parameters."""


def _large(rank: int) -> Any:
    module = fully_shard(Given(LARGE))
    state = nc.compress_gradients(module, "int4", seed=1)
    return sharded.backward(module, given(LARGE, rank, 0)), state.state_dict()


def test_a_group_of_several_pieces_leaves_the_bits_of_the_model() -> None:
    ranks = run(2, _large, timeout=100)
    expected = Expected(nc.codec("int4"), 2, True)
    right = expected.step([given(LARGE, rank, 0) for rank in range(2)])
    for rank, (found, state) in enumerate(ranks):
        kept = expected.state_of(rank, LARGE)
        assert all(same_bits(found[name], right[name]) for name in right)
        assert all(same_bits(state["sender"][name], kept[name]) for name in kept)


def _groups(rank: int) -> Any:
    module = stack()
    state = nc.compress_gradients(module, "int4", seed=1)
    found = [sharded.backward(module, given(STACK, rank, step)) for step in range(STEPS)]
    return found, state.stats()


def test_every_group_is_a_bucket_and_leaves_the_bits_of_the_model() -> None:
    ranks = run(2, _groups)
    expected = Expected(nc.codec("int4"), 2, True)
    for step in range(STEPS):
        right = expected.step([given(STACK, rank, step) for rank in range(2)])
        for found, _ in ranks:
            assert all(same_bits(found[step][name], value) for name, value in right.items())
    stats = ranks[0][1]
    assert stats.steps == STEPS
    assert sorted(stats.buckets) == [0, 1, 2]
    assert stats.buckets[0].numel == 2 * 16 * 50  # its own: 31 rows, of which a rank has 16
    assert stats.sent_bytes < stats.plain_bytes / 3  # a third of the elements are exempt
    padded = sum(kept[0].numel() for kept in expected.sender.values())
    assert stats.residual_bytes == 2 * 4 * padded  # in fp32: those that count, and those that the next step leaves
