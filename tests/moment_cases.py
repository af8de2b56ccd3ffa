"""Moments in rows, as a few steps leave them, and hostile ones: for every kernel that takes a step of AdamW on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.kernels import moments, reference
from narrowcast.kernels.layout import Recipe

SPECS = ("int8", "int4", "nf4", "fp8_e4m3", "bf16", "raw", "int8:block=24", "int5:block=8", "int8:stochastic=true",
         "int4:zero_point=true", "apot4:block=200,scale=fp16", "fp8_e5m2:scale=none")  # fmt: skip
SHAPES = ((1, 1), (3, 64), (5, 200), (2, 5000), (40, 33))
STEP = moments.step_of(1e-2, (0.9, 0.999), 1e-8, 0.1, 3.0, 3.0)


def recipe_of(spec: str) -> Recipe:
    return nc.codec(spec).recipe(torch.device("cpu"))


def operands(spec: str, shape: tuple[int, int], dtype: torch.dtype, *, hostile: bool = False) -> tuple[Tensor, ...]:
    """A parameter, the rows of its moments after a gradient, and another gradient."""
    generator = torch.Generator().manual_seed(sum(shape))

    def draw() -> Tensor:
        size = torch.randn(shape, generator=generator, dtype=torch.float32)
        return (size * torch.randn(shape[0], 1, generator=generator, dtype=torch.float32).exp()).to(dtype)

    parameter, earlier, grad = draw(), draw(), draw()
    if hostile:
        values = [0.0, -0.0, 1e-45, -1e-40, 1e-30, 1e-22, 3e-4, 1e18, -3e19, 3e38, float("inf"), float("nan")]
        flat = grad.view(-1)
        flat[: len(values)] = torch.tensor(values, dtype=torch.float32)[: flat.numel()].to(dtype)
        if flat.numel() > 64:
            flat[-1] = float("inf")  # in a block without a NaN, which would hide it
        earlier[-1] = 0.0
        parameter.view(-1)[-1] = float("nan")
    recipe = recipe_of(spec)
    first = reference.encode(earlier * 0.1, recipe, 5)
    second = reference.encode_second(earlier.float().square() * 0.001, moments.second_format(recipe.format), 5)
    return parameter, first, second, grad


def stepped(
    kernel: Any, tensors: tuple[Tensor, ...], spec: str, *, takes_momentum: bool = False, device: str = "cpu"
) -> list[bytes]:
    """What a kernel leaves, to the bit."""
    parameter, first, second, grad = (tensor.clone().to(device) for tensor in tensors)
    recipe = nc.codec(spec).recipe(parameter.device)
    kernel.adamw(parameter, first, second, grad, recipe, 77, takes_momentum, STEP)
    return [each.cpu().view(-1).view(torch.uint8).numpy().tobytes() for each in (parameter, first, second)]
