"""A linear layer whose weight stays encoded: y = x W^T + b, with W decoded on the way.

`torch.ops.narrowcast.linear(x, data, ..., bias)` takes `x` [..., in] in fp32, fp16 or bf16, the encoded rows `data`
[out, row_bytes(in)] of the weight, and a bias [out] or None; it gives [..., out] in x's dtype. What it means,
whatever runs it: the weight is decoded to fp32 as `decode` does, products are summed in fp32 or wider, the bias is
added, and the result is rounded to x's dtype once. The order of a sum is a kernel's own, but fixed: the same input
gives the same bits again. A row whose scale is NaN gives NaN.

`Machine.linear` is what a device provides. It may refuse (return None) a codec, dtype or batch that it has no kernel
for; then the weight is decoded, tile by tile, and multiplied by torch. An operator of its own keeps Inductor from
rewriting any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.library import Library, register_fake

from narrowcast.kernels import ops
from narrowcast.kernels.layout import Format, Recipe

TILE = 1 << 22
"""Weights that are decoded at a time where no kernel fits: 16 MB of fp32."""


class Machine(Protocol):
    """What a device provides for linear layers."""

    def linear(self, x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor | None:
        """`x` [batch, in] times the encoded rows: [batch, out]; None where another way is better or the only one."""


@cache
def machine_for(device_type: str) -> Machine | None:
    """The kernels for linear layers on this kind of device, loaded on first use."""
    return None


def by_tiles(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    """The meaning: decode some rows of the weight, multiply, go on. Never holds more than a tile of the weight."""
    batch, numel = x.shape
    rows = max(1, TILE // max(1, numel))
    wide = x if x.is_cuda and x.dtype != torch.float32 else x.float()
    out = torch.empty(batch, len(data), dtype=x.dtype, device=x.device)
    for first in range(0, len(data), rows):
        weight = ops.decode(data[first : first + rows], numel, wide.dtype, recipe)
        part = torch.nn.functional.linear(wide, weight).float()
        if bias is not None:
            part = part + bias[first : first + rows].float()
        out[:, first : first + rows] = part
    return out


def _linear(
    x: Tensor, data: Tensor, format: Sequence[int], peak: float, table: Tensor | None, bias: Tensor | None
) -> Tensor:
    recipe = Recipe(Format(*format), peak, table)
    flat = x.reshape(-1, x.shape[-1])
    machine = machine_for(x.device.type)
    made = machine.linear(flat, data, recipe, bias) if machine is not None and flat.numel() else None
    if made is None:
        made = by_tiles(flat, data, recipe, bias)
    return made.view(*x.shape[:-1], len(data))


def _linear_shape(x: Tensor, data: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], data.shape[0])


_library = Library("narrowcast", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor data, int[] format, float peak, Tensor? table, Tensor? bias) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _device)  # type: ignore[no-untyped-call]
register_fake("narrowcast::linear", _linear_shape, lib=_library)


def linear(x: Tensor, data: Tensor, recipe: Recipe, bias: Tensor | None) -> Tensor:
    """What modules call."""
    return torch.ops.narrowcast.linear(x, data, *recipe, bias)  # type: ignore[no-any-return]
