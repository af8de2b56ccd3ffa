"""Residuals held in rows: the bits of a model that rounds them, in steps, in state dicts, after steps that fail."""

from __future__ import annotations

import io
from typing import Any

import faults
import pytest
import sharded
import torch
import trained
from ranks import run
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from cases import same_bits
from narrowcast.distributed.gradients.error_feedback.held import HeldInRows, Rows
from narrowcast.errors import CollectiveError, SpecError

pytestmark = pytest.mark.timeout(180)

SHAPES, STEPS = trained.SHAPES, 4


def _rounded(residuals: Tensor, codec: str) -> Tensor:
    """A residual as it is held: every row of every section begins with a block of its own."""
    rows = residuals.reshape(-1, residuals.shape[-1])
    held = nc.codec(codec)
    return held.decode(held.encode(rows), rows.shape[1]).view(residuals.shape)


class _Expected(trained.Expected):
    held = "int8"

    def _without_padding(self, residuals: Tensor, numel: int) -> Tensor:
        return _rounded(super()._without_padding(residuals, numel), self.held)


class _ShardedExpected(sharded.Expected):
    def _compressed(self, name: str, *args: Any) -> Tensor:
        total = super()._compressed(name, *args)
        self.sender[name] = _rounded(self.sender[name], "int8")
        return total


def _options(codec: str = "int8") -> dict[str, Any]:
    return {"error_feedback": True, "seed": trained.SEED, "residual_codec": codec}


def _steps(rank: int, held: str) -> Any:
    ddp = DDP(trained.Given(SHAPES), bucket_cap_mb=trained.FEW)  # one bucket at first, then several
    state = nc.compress_gradients(ddp, "int4", **_options(held))
    found = [trained.backward(ddp, trained.given(SHAPES, rank, step)) for step in range(STEPS)]
    return found, state.state_dict()


@pytest.mark.parametrize(("world", "held"), [(2, "int8"), (3, "int8"), (3, "bf16")])
def test_every_step_leaves_the_bits_of_the_model(world: int, held: str) -> None:
    expected = _Expected(nc.codec("int4"), world, True, [trained.SEED] * world)
    expected.held = held
    meant = [expected.step([trained.given(SHAPES, rank, step) for rank in range(world)]) for step in range(STEPS)]
    for rank, (found, state) in enumerate(run(world, _steps, held)):
        trained.agree(found, meant)
        sender, owner = expected.state_of(rank, SHAPES)
        trained.agree([state["sender"], state["owner"]], [sender, owner])


def _sharded_steps(rank: int) -> Any:
    module = fully_shard(trained.Given(sharded.SHAPES))
    state = nc.compress_gradients(module, "int4", **_options())
    found = [sharded.backward(module, trained.given(sharded.SHAPES, rank, step)) for step in range(STEPS)]
    return found, state.state_dict()["sender"]


def test_under_fsdp2_whose_parts_are_of_any_size_too() -> None:
    expected = _ShardedExpected(nc.codec("int4"), 3, True, [trained.SEED] * 3)
    meant = [expected.step([trained.given(sharded.SHAPES, rank, step) for rank in range(3)]) for step in range(STEPS)]
    for rank, (found, sender) in enumerate(run(3, _sharded_steps)):
        trained.agree(found, meant)
        trained.agree([sender], [expected.state_of(rank, sharded.SHAPES)])


# -- resumed, skipped, on other ranks ---------------------------------------------------------------------------------


class _Run:
    def __init__(self, rank: int, momentum: bool) -> None:
        self.rank = rank
        self.ddp = DDP(trained.mlp(width=40), bucket_cap_mb=0.002)
        self.optimizer = nc.optim.AdamW(self.ddp.parameters(), 0.01)
        options: Any = {"momentum": self.optimizer, "warmup_steps": 2} if momentum else {}
        self.state = nc.compress_gradients(self.ddp, "sign" if momentum else "int4", **_options(), **options)
        self.parts = self.ddp.module, self.optimizer, self.state

    def train(self, first: int, end: int) -> trained.Named:
        trained.train(self.ddp, self.rank, range(first, end), self.optimizer)
        return trained.parameters_of(self.ddp)


def _resumed(rank: int, momentum: bool) -> Any:
    first, second, third = (_Run(rank, momentum) for _ in range(3))
    first.train(0, 5)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first.parts], file)
    file.seek(0)
    for part, state in zip(second.parts, torch.load(file), strict=True):
        part.load_state_dict(state)
    bad = trained.batch(rank, 5) * (float("inf") if rank == 1 else 1.0)
    third.train(0, 5)
    third.ddp(bad).sum().backward()  # not finite: no residuals are left of it
    third.optimizer.zero_grad()
    return [each.train(5, 10) for each in (first, second, third)]


@pytest.mark.parametrize("momentum", [False, True])
def test_resuming_and_skipping_leave_the_bits(momentum: bool) -> None:
    for one, resumed, skipped in run(2, _resumed, momentum):
        trained.agree([one, one], [resumed, skipped])


def _saved(rank: int) -> Any:
    of_rank = _Run(rank, momentum=False)
    of_rank.train(0, 4)
    return of_rank.state.state_dict()


def _loaded(rank: int, states: list[Any]) -> Any:
    of_rank = _Run(rank, momentum=False)
    of_rank.state.load_state_dict(states, residuals="redistribute")
    return of_rank.train(4, 7)


def test_other_ranks_go_on_with_redistributed_residuals() -> None:
    first, *others = run(3, _loaded, run(2, _saved))
    for other in others:
        trained.agree([first], [other])


# -- memory, and what is refused --------------------------------------------------------------------------------------


def _memory(rank: int) -> Any:
    found = []
    for held in (None, "bf16", "int8"):
        ddp = DDP(trained.Given({"large": (1024, 1024)}))
        state = nc.compress_gradients(ddp, "int4", residual_codec=held)
        trained.backward(ddp, {"large": torch.randn(1024, 1024)})
        found.append(state.stats().residual_bytes / 2**20)
    return found


def test_residuals_in_int8_take_a_quarter_of_the_memory() -> None:
    for in_floats, halved, quartered in run(2, _memory):
        assert in_floats == 12  # 4 bytes at the sender, half of that at the owner, all of it twice
        assert halved < 0.51 * in_floats
        assert quartered < 0.26 * in_floats


def _refusals(rank: int) -> Any:
    ddp = DDP(trained.mlp())
    wrong: dict[str, dict[str, Any]] = {
        "residual_codec='int4'": {"residual_codec": "int4"},
        "residual_codec='int8:stochastic=true'": {"residual_codec": "int8:stochastic=true"},
        "there are no residuals": {"residual_codec": "int8", "error_feedback": False},
        "which is off here": {"residual_codec": "int8", "codec": "int8"},
    }
    errors = {}
    for words, options in wrong.items():
        given = {"codec": "int4", **options}
        errors[words] = faults.error_of(lambda given=given: nc.compress_gradients(ddp, **given))[0]
    held = "int8" if rank else None
    return errors, faults.error_of(lambda: nc.compress_gradients(ddp, "int4", residual_codec=held))[0]


def test_other_codecs_no_feedback_and_ranks_that_differ_are_refused() -> None:
    for errors, differ in run(2, _refusals):
        for words, error in errors.items():
            assert isinstance(error, SpecError), (words, error)
            assert words in str(error)
        assert isinstance(differ, CollectiveError), differ
        assert "error_feedback=True in int8" in str(differ)


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_what_was_decoded_can_be_encoded_again_without_loss(codec: str) -> None:
    """So residuals move as fp32 numbers: sizes from denormal to near the largest, blocks of zeros, ragged runs."""
    runs = [slice(0, 384), slice(384, 385), slice(385, 1000)]
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        sizes = 10.0 ** (torch.rand(8, 1, generator=generator) * 82 - 44)
        floats = torch.randn(8, 1000, generator=generator) * sizes
        floats[:, 128:256] = 0.0
        held = HeldInRows(Rows(nc.codec(codec), runs), floats, floats[0])
        again = HeldInRows(Rows(nc.codec(codec), runs), *held.floats())
        for one, other in zip(held.floats(), again.floats(), strict=True):
            assert one is not None
            assert other is not None
            assert same_bits(one, other)
