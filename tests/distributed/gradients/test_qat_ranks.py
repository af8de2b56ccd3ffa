"""Training with quantized weights on several ranks: DDP and FSDP2 keep ranks equal, and starts are refused there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.errors import CalibrationError


def prepared() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    nc.prepare_qat_(model, "apot4", "apot4")
    nc.calibrate_(model, [torch.randn(32, 8)])
    return model


def steps(model: nn.Module, groups: list, data: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(groups, lr=0.05)
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def batches(rank: int) -> list[Tensor]:
    torch.manual_seed(100 + rank)
    return [torch.randn(6, 8) for _ in range(3)]


def train_ddp(rank: int) -> dict[str, Tensor]:
    model = prepared()
    steps(nn.parallel.DistributedDataParallel(model), nc.parameter_groups(model), batches(rank))
    return model.state_dict()


def train_fsdp(rank: int) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = prepared()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    steps(model, nc.parameter_groups(model), batches(rank))
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in model.state_dict().items()
    }


def train_alone() -> dict[str, Tensor]:
    """One process with the ranks' batches end to end: the mean of equal halves' gradients is the whole's."""
    model = prepared()
    steps(model, nc.parameter_groups(model), [torch.cat(pair) for pair in zip(batches(0), batches(1), strict=True)])
    return model.state_dict()


@pytest.mark.parametrize("train", [train_ddp, train_fsdp])
def test_ranks_stay_equal_and_learn_what_one_process_learns(train) -> None:
    first, second = run(2, train)
    assert all(torch.equal(first[key], second[key]) for key in first)
    alone, start = train_alone(), prepared().state_dict()
    for key, value in alone.items():
        # Gradients are summed in another order; three steps later that is still below 1e-4 of anything.
        torch.testing.assert_close(first[key], value, rtol=1e-3, atol=1e-4)
    moved = [key for key in alone if key.endswith("alpha") and not torch.equal(first[key], start[key])]
    assert moved


def start_on_ranks(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    nc.prepare_qat_(model, "apot4", "apot4")
    assert dist.get_world_size() == 2
    before = copy.deepcopy(model.state_dict())
    try:
        nn.parallel.DistributedDataParallel(model)(torch.randn(2, 8))
    except CalibrationError as error:
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return str(error)
    return ""


def test_a_clip_does_not_start_from_each_ranks_own_data() -> None:
    for message in run(2, start_on_ranks):
        assert "every rank would start from data of its own" in message
        assert "calibrate_" in message


def follow_on_ranks(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    nc.prepare_qat_(model, "apot4", "apot4", learn=False)
    nc.calibrate_(model, [torch.randn(16, 8)])
    clip = model.input_quantizer.clip
    message = ""
    try:
        model(torch.randn(2, 8))
    except CalibrationError as error:
        message = str(error)
    model.input_quantizer.observer = None
    nn.parallel.DistributedDataParallel(model)(torch.randn(2, 8)).sum().backward()
    assert torch.equal(model.input_quantizer.clip, clip)
    return message


def test_a_clip_that_is_not_learned_can_be_kept_where_it_cannot_follow_the_data() -> None:
    for message in run(2, follow_on_ranks):
        assert message.startswith("the clip of this FakeQuantize('apot4') is not learned: its observer")
        assert message.endswith("To keep the clip that it has, set quantizer.observer = None.")
