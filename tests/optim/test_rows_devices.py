"""Moments in rows on each device: the reference's bits, and states that go on elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.kernels.operators import dispatch

SHAPES = {torch.float32: (90, 300), torch.bfloat16: (70, 90), torch.float16: (8, 3, 200)}
pytestmark = pytest.mark.untried

Begun = tuple[list[Tensor], nc.optim.AdamW]


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for dtype, shape in SHAPES.items()]


def begun(device: str, state: str) -> Begun:
    parameters = [start.to(device).requires_grad_() for start in drawn(0)]
    return parameters, nc.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, state=state)


def step(number: int, parameters: list[Tensor], optimizer: nc.optim.AdamW) -> list[Tensor]:
    """Take a step; the bytes of parameters and moments after it."""
    for parameter, grad in zip(parameters, drawn(1 + number), strict=True):
        parameter.grad = grad.to(parameter.device)
    optimizer.step()
    held = [optimizer.state[each][key] for each in parameters for key in ("exp_avg_rows", "exp_avg_sq_rows")]
    return [tensor.detach().cpu().clone().view(torch.uint8) for tensor in (*parameters, *held)]


@pytest.mark.parametrize("state", ["int8", "int4", "nf4", "fp8_e4m3", "bf16", "int8:stochastic=true"])
def test_steps_on_each_device_leave_the_references_bits(
    device: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = []
    with monkeypatch.context() as patch:
        patch.setenv("NARROWCAST_KERNEL", "reference")
        dispatch.kernel_for.cache_clear()
        parameters, optimizer = begun("cpu", state)
        for number in range(4):
            expected.append(step(number, parameters, optimizer))
            if number == 1:
                saved = copy.deepcopy(([each.detach() for each in parameters], optimizer.state_dict()))
    dispatch.kernel_for.cache_clear()
    parameters, optimizer = begun(device, state)
    for number, right in enumerate(expected):
        assert all(map(torch.equal, step(number, parameters, optimizer), right)), number
    parameters, optimizer = begun(device, state)
    optimizer.load_state_dict(saved[1])
    for parameter, value in zip(parameters, saved[0], strict=True):
        parameter.data.copy_(value)
    for number in (2, 3):
        assert all(map(torch.equal, step(number, parameters, optimizer), expected[number])), number
