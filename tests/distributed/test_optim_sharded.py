"""nc.optim.AdamW with moments in rows under FSDP2: rows follow the shards, and checkpoints go to other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import narrowcast as nc
from narrowcast.errors import OptimizerError

WEIGHTS = ("0.weight", "2.weight")


def build(world: int, state: str | None, **options: Any) -> tuple[nn.Module, nc.optim.AdamW]:
    """Two matrices with rows: 67 do not divide among ranks, and 2 leave some of three ranks without any."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(80, 67), nn.Flatten(0), nn.Linear(67 * 40, 2, bias=False))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    if world > 1:
        fully_shard(layers[2])
        fully_shard(layers)
    return layers, nc.optim.AdamW(layers.parameters(), lr=1e-2, state=state, **options)


def train(layers: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        x = torch.randn(40, 80, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        layers(x).square().sum().backward()
        optimizer.step()


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def held(layers: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters and states, put together from all ranks."""
    found = {}
    for name, parameter in layers.named_parameters():
        found[name] = whole(parameter.detach()).clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole(value).clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def trained_and_saved(rank: int, world: int, folder: str, state: str) -> tuple[Any, Any, Any]:
    layers, optimizer = build(world, state)
    train(layers, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(layers, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    before = held(layers, optimizer)
    local = {
        name: tuple(optimizer.state[layers.get_parameter(name)]["exp_avg_rows"].to_local().shape) for name in WEIGHTS
    }
    train(layers, optimizer, range(3, 5))
    return before, held(layers, optimizer), local


def loaded(rank: int, world: int, folder: str, state: str) -> tuple[Any, Any]:
    layers, optimizer = build(world, state)
    model_state, optimizer_state = get_state_dict(layers, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(layers, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    after = held(layers, optimizer)
    train(layers, optimizer, range(3, 5))
    return after, held(layers, optimizer)


@pytest.mark.parametrize("state", ["int8", "int4"])
def test_a_checkpoint_of_two_ranks_loads_on_two_and_on_three(tmp_path: Path, state: str) -> None:
    results = ranks.run(2, trained_and_saved, 2, str(tmp_path), state)
    before, after, local = results[0]
    assert before["0.weight.exp_avg_rows"].dtype == torch.uint8
    assert before["0.weight.exp_avg_rows"].shape == (67, nc.codec(state).row_bytes(80))
    assert (local["0.weight"][0], results[1][2]["0.weight"][0]) == (34, 33)
    again, on = ranks.run(2, loaded, 2, str(tmp_path), state)[0]
    assert same(again, before)
    assert same(on, after)  # resumed, to the bit
    for each in ranks.run(3, loaded, 3, str(tmp_path), state):
        assert same(each[0], before)
        assert each[1]["0.weight"].isfinite().all()


def counted(rank: int, folder: str) -> tuple[Any, Any]:
    """Momentums, a checkpoint, and a fresh optimizer that loads it."""
    layers, optimizer = build(2, "int8")
    optimizer.expect_momentum(layers.parameters())
    train(layers, optimizer, range(2))
    for parameter in layers.parameters():
        parameter.grad = optimizer.momentum_of(parameter).clone()
    optimizer.take_momentum(layers.parameters())
    optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(layers, optimizer)}, checkpoint_id=folder)
    other, again = build(2, "int8")
    again.expect_momentum(other.parameters())
    state = get_optimizer_state_dict(other, again)
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(other, again, state)
    other.load_state_dict(layers.state_dict())
    for each, its in ((layers, optimizer), (other, again)):
        train(each, its, range(2, 4))
    return held(layers, optimizer), held(other, again)


def test_a_checkpoint_keeps_how_often_second_moments_were_updated(tmp_path: Path) -> None:
    one, other = ranks.run(2, counted, str(tmp_path))[0]
    assert same(one, other)
    assert (one["0.weight.step"], one["0.weight.exp_avg_sq_steps"]) == (5, 4)
    assert (one["0.bias.step"], one["0.bias.exp_avg_sq_steps"]) == (5, 4)


def gathered(rank: int, world: int, state: str | None) -> tuple[Any, Any]:
    """The whole state on rank 0, as one file would hold it, and back into shards of another optimizer."""
    layers, optimizer = build(world, state)
    train(layers, optimizer, range(2))
    before = held(layers, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    full = get_optimizer_state_dict(layers, optimizer, options=options)
    other, again = build(world, state)
    set_optimizer_state_dict(other, again, full if rank == 0 else {}, options=options)
    return before, held(other, again)


def test_a_full_state_dict_goes_back_into_shards() -> None:
    before, after = ranks.run(2, gathered, 2, "int8")[0]
    states = {key for key in before if "exp_avg" in key or "step" in key}
    assert all(torch.equal(before[key], after[key]) for key in states)


def momentums(rank: int) -> bool:
    layers, optimizer = build(2, "int8")
    train(layers, optimizer, range(2))
    for parameter in layers.parameters():
        momentum = optimizer.momentum_of(parameter)
        assert isinstance(momentum, DTensor)
        assert momentum.shape == parameter.shape
        parameter.grad = momentum.clone()
    optimizer.take_momentum(layers.parameters())
    optimizer.step()
    return all(whole(parameter).isfinite().all().item() for parameter in layers.parameters())


def test_momentums_are_shards_too() -> None:
    assert ranks.run(2, momentums) == [True, True]


def sharded_otherwise(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(100, 128), mesh, [Shard(1)]))
    nc.optim.AdamW([weight])
    nc.optim.AdamW([{"params": [weight], "state": None}], state="int8")
    try:
        nc.optim.AdamW([weight], state="int8")
    except OptimizerError as error:
        return str(error)
    return ""


def test_shards_along_another_dimension_are_refused() -> None:
    assert all("Shard(0)" in message and "'state': None" in message for message in ranks.run(2, sharded_otherwise))
