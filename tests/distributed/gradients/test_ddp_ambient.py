"""Training with compressed gradients in whatever surrounds it (tests/ambient.py): the bits of plain surroundings.

A new way to train is one more entry in `WAYS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sharded
import torch
import trained
from ranks import run
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import FEW, SHAPES, Given, given

from ambient import SURROUNDINGS, surrounded
from cases import same_bits
from narrowcast.distributed import GradientCompression

pytestmark = pytest.mark.timeout(180)

NO_TRAINING = ("inference mode", "no grad")
"""Nothing has a gradient in these."""
NAMES = [name for name in SURROUNDINGS if name not in NO_TRAINING]

Way = Callable[[int, str | None], tuple[Any, GradientCompression]]


def _ddp(rank: int, name: str | None, codec: str, **options: Any) -> tuple[Any, GradientCompression]:
    ddp = DDP(Given(SHAPES), bucket_cap_mb=FEW)
    gradients = [given(SHAPES, rank, step) for step in range(3)]
    with surrounded(name):
        state = trained.compressed(ddp, codec, **options)
        return [trained.backward(ddp, one) for one in gradients], state


def _fsdp(rank: int, name: str | None, codec: str, **options: Any) -> tuple[Any, GradientCompression]:
    module = sharded.stack()
    gradients = [given(sharded.STACK, rank, step) for step in range(3)]
    with surrounded(name):
        state = trained.compressed(module, codec, **options)
        found = []
        for one in gradients:
            module.zero_grad()
            module(one).backward()
            found.append({key: p.grad.to_local().clone() for key, p in module.named_parameters()})  # type: ignore[union-attr]
    return found, state


WAYS: dict[str, Way] = {
    "ddp, int4": lambda rank, name: _ddp(rank, name, "int4"),
    "ddp, nf4": lambda rank, name: _ddp(rank, name, "nf4"),
    "ddp, owner": lambda rank, name: _ddp(rank, name, "int2", error_feedback="owner"),
    "ddp, stochastic": lambda rank, name: _ddp(rank, name, "int4:stochastic=true"),
    "ddp, a seed of its own": lambda rank, name: _ddp(rank, name, "int4", seed=None),
    "fsdp, int4": lambda rank, name: _fsdp(rank, name, "int4"),
    "fsdp, gathered": lambda rank, name: _fsdp(rank, name, "apot4", gather="int8"),
}


def _train(rank: int) -> Any:
    found: dict[tuple[str, str | None], Any] = {}
    for way, train in WAYS.items():
        for name in (None, *NAMES):
            try:
                gradients, state = train(rank, name)
            except Exception as error:
                raise AssertionError(f"{way}, {name}: {type(error).__name__}: {error}") from error
            with surrounded(name):
                kept = state.state_dict()
            found[way, name] = gradients, {**kept["sender"], **{f"{key}, owner": v for key, v in kept["owner"].items()}}
    return found


@pytest.fixture(scope="module")
def trained_anywhere() -> list[Any]:
    return run(2, _train, timeout=170)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_residuals_are_those_of_plain_surroundings(
    way: str, name: str, trained_anywhere: list[Any]
) -> None:
    for of_rank in trained_anywhere:
        (gradients, residuals), (right, right_residuals) = of_rank[way, name], of_rank[way, None]
        trained.agree(gradients, right)
        assert residuals.keys() == right_residuals.keys()
        for key, residual in residuals.items():
            assert residual.dtype == torch.float32
            assert residual.device.type == "cpu"
            assert same_bits(residual, right_residuals[key])
