"""While no momentum travels, nc.optim.AdamW is torch.optim.AdamW: its bits, its hooks, its state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from small_training import backward, bits, groups, model, train, twins

import narrowcast as nc

OPTIONS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"fused": True, "amsgrad": True},
    {"amsgrad": True},
    {"maximize": True},
    {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": torch.tensor(3e-3, dtype=torch.float32)},
    {"lr": torch.tensor(3e-3, dtype=torch.float32), "fused": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_gives_the_bits_of_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = twins(dtype)
    mine = nc.optim.AdamW(groups(ours), **copy.deepcopy(options))
    reference = torch.optim.AdamW(groups(theirs), **copy.deepcopy(options))
    train(ours, mine, range(6))
    train(theirs, reference, range(6))
    assert bits(ours, mine) == bits(theirs, reference)
    assert mine.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


def test_it_is_public_and_a_torch_optimizer() -> None:
    assert issubclass(nc.optim.AdamW, torch.optim.AdamW)
    assert "optim" in nc.__all__


def test_hooks_and_closures_run_once() -> None:
    ours, theirs = twins()
    train(theirs, torch.optim.AdamW(theirs.parameters()), range(1))  # torch wraps its own step now, if not before
    optimizer, seen = nc.optim.AdamW(ours.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        seen.append("closure")
        assert torch.is_grad_enabled()
        return backward(ours, 0).item()

    loss = optimizer.step(closure)
    assert seen == ["before", "closure", "after"]
    assert loss > 0
    train(ours, optimizer, range(1))
    assert seen == ["before", "closure", "after", "before", "after"]


@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR"])
def test_schedulers_drive_it_as_they_drive_torch(schedule: str) -> None:
    results = []
    for kind, layers in zip((nc.optim.AdamW, torch.optim.AdamW), twins(), strict=True):
        optimizer = kind(groups(layers), lr=1e-2)
        scheduler: Any = (
            torch.optim.lr_scheduler.StepLR(optimizer, 2)
            if schedule == "StepLR"
            else torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 2e-2], total_steps=9)  # moves betas, too
        )
        for number in range(8):
            train(layers, optimizer, range(number, number + 1))
            scheduler.step()
        results.append(bits(layers, optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize("fused", [None, True])
def test_a_grad_scaler_drives_it_as_it_drives_torch(fused: bool | None) -> None:
    results = []
    for kind, layers in zip((nc.optim.AdamW, torch.optim.AdamW), twins(), strict=True):
        optimizer, scaler = kind(groups(layers), fused=fused), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number in range(6):
            optimizer.zero_grad()
            factor = scaler.scale(torch.ones((), dtype=torch.float32)).item()
            backward(layers, number, factor=float("inf") if number == 3 else factor)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
        results.append(bits(layers, optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("fused", [None, True])
def test_state_dicts_go_from_torch_and_to_torch(ours_first: bool, fused: bool | None) -> None:
    kinds = (nc.optim.AdamW, torch.optim.AdamW) if ours_first else (torch.optim.AdamW, nc.optim.AdamW)
    layers, other = twins()
    first, second = (kind(groups(each), fused=fused) for kind, each in zip(kinds, (layers, other), strict=True))
    train(layers, first, range(3))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    other.load_state_dict(layers.state_dict())
    train(layers, first, range(3, 6))
    train(other, second, range(3, 6))
    assert bits(layers, first) == bits(other, second)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_steps_as_the_original(way: str) -> None:
    layers = model()
    optimizer = nc.optim.AdamW(groups(layers))
    train(layers, optimizer, range(2))
    pair = (layers, optimizer)
    again, copied = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train(layers, optimizer, range(2, 4))
    train(again, copied, range(2, 4))
    assert bits(layers, optimizer) == bits(again, copied)


def test_parameters_without_gradients_are_left_alone() -> None:
    layers = model()
    optimizer = nc.optim.AdamW(layers.parameters())
    before = [parameter.clone() for parameter in layers.parameters()]
    optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, layers.parameters(), strict=True))


def test_a_subclass_with_its_own_step_runs_hooks_as_torch_does() -> None:
    class Counting(nc.optim.AdamW):
        """Without a step of its own."""

    layers, seen = model(), []
    optimizer = Counting(layers.parameters())
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    train(layers, optimizer, range(3))
    assert seen == [1, 1, 1]


def test_torch_refuses_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        nc.optim.AdamW(model().parameters(), lr=-1.0)
    with pytest.raises(ValueError, match="empty parameter list"):
        nc.optim.AdamW([])
    sparse = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = nc.optim.AdamW(sparse.parameters())
    sparse(torch.tensor([1], dtype=torch.int64)).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_a_compiled_step_is_close_to_torchs_compiled_step() -> None:
    results = []
    for kind, layers in zip((nc.optim.AdamW, torch.optim.AdamW), twins(), strict=True):
        torch._dynamo.reset()
        optimizer = kind(groups(layers), lr=1e-2)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for number in range(3):
            optimizer.zero_grad()
            backward(layers, number)
            step()
        results.append(bits(layers, optimizer))
    assert results[0] == results[1]
