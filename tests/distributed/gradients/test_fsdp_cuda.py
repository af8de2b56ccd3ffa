"""FSDP2 on CUDA: two ranks over gloo that share one GPU, with the bits that the model of a step says."""

from __future__ import annotations

import os
from typing import Any

import pytest
import sharded
import torch
from ranks import run
from sharded import STACK, Expected, every, padded, stack
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from trained import given

import narrowcast as nc
from cases import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 3


def _local(values: Any) -> dict[str, Tensor]:
    return {name: value.to_local().cpu() for name, value in values.items()}


def reduced(rank: int, codec: str, **options: Any) -> Any:
    """What this rank has of the gradients after each step, and its residuals after the last."""
    module = stack(mesh=init_device_mesh("cuda", (2,)), **options)
    state = nc.compress_gradients(module, codec, error_feedback=True, seed=100 + rank, gather="int8")
    found = []
    for step in range(STEPS):
        module.zero_grad()
        module({name: g.cuda() for name, g in given(STACK, rank, step).items()}).backward()
        found.append(_local({name: p.grad for name, p in module.named_parameters()}))
    return found, state.state_dict()["sender"]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("int4", {}),
    "resharded": ("int4", {"reshard_after_forward": True}),
    "random": ("int4:stochastic=true", {}),
    "bf16": ("int8", {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.bfloat16)}),
}


def all_of_them(rank: int) -> Any:
    os.environ["LOCAL_RANK"] = "0"  # init_device_mesh takes it for the number of a GPU, and there is one
    return {name: reduced(rank, codec, **options) for name, (codec, options) in CASES.items()}


def test_two_ranks_on_one_gpu_leave_the_bits_of_the_model() -> None:
    ranks = run(2, all_of_them, timeout=250, group_timeout=200)
    for name, (codec, options) in CASES.items():
        dtype = options["mp_policy"].reduce_dtype if "mp_policy" in options else torch.float32
        expected = Expected(nc.codec(codec), 2, True, [100, 101])
        for step in range(STEPS):
            gradients = [{key: g.to(dtype) for key, g in given(STACK, rank, step).items()} for rank in range(2)]
            for key, value in expected.step(gradients).items():
                for rank in range(2):
                    found = ranks[rank][name][0][step][key]
                    right = padded(value.float(), 2)[rank][: found.numel()]
                    assert same_bits(found.reshape(-1), right), (name, step, key, rank)
        for rank in range(2):
            kept = expected.state_of(rank, STACK)
            assert all(same_bits(ranks[rank][name][1][key].cpu(), kept[key]) for key in kept), (name, rank)


def gathered(rank: int) -> tuple[Tensor, Tensor]:
    """Many layers one after the other, prefetched: what comes out, on the GPU and on the CPU."""
    os.environ["LOCAL_RANK"] = "0"
    found = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        module: Any = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        with torch.no_grad():
            for layer in module:
                layer.weight.copy_(torch.randint(-7, 8, (64, 64)) * torch.eye(64))  # exact in int4, and in any order
        sharded.shard(module, *map(str, range(6)), mesh=init_device_mesh(device, (2,)), reshard_after_forward=True)
        nc.compress_gradients(module, "raw", gather="int4:block=row")
        x = torch.eye(64, device=device, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert x.grad is not None
        assert all(part.weight.grad is not None for part in every(module) if isinstance(part, nn.Linear))
        found.append(torch.stack([y.detach().cpu(), x.grad.cpu()]))
    return found[0], found[1]


def test_prefetched_parameters_are_there_when_they_are_used() -> None:
    for on_gpu, on_cpu in run(2, gathered, timeout=200, group_timeout=150):
        assert torch.equal(on_gpu, on_cpu)
