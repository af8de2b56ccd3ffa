"""A small model with two parameter groups, the same for every optimizer, and steps of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    layers = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8)).to(dtype)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32))
    return layers


def groups(layers: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and have other betas and another rate."""
    matrices = [parameter for parameter in layers.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in layers.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3, "betas": (0.8, 0.95)}]


def backward(layers: nn.Sequential, number: int, factor: float = 1.0) -> Tensor:
    """The gradients of batch `number`."""
    generator = torch.Generator().manual_seed(1000 + number)
    x = torch.randn(16, 24, generator=generator, dtype=torch.float32)
    x = x.to(next(layers.parameters()).dtype)
    loss: Tensor = layers(x).square().mean() * factor
    loss.backward()
    return loss


def train(
    layers: nn.Sequential, optimizer: torch.optim.Optimizer, numbers: range, before: Callable[[], None] | None = None
) -> None:
    for number in numbers:
        optimizer.zero_grad()
        backward(layers, number)
        if before is not None:
            before()
        optimizer.step()


def bits(layers: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Parameters and state, to the bit."""
    tensors = [*layers.parameters()]
    for parameter in layers.parameters():
        state = optimizer.state[parameter]
        tensors += [state[key] for key in sorted(state)]
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def twins(dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, nn.Sequential]:
    first = model(dtype)
    return first, copy.deepcopy(first)
