"""Exact integer products on a GPU: cuBLAS multiplies them, not Triton."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowcast.kernels import reference
from narrowcast.kernels.windows import Window


def integer_linear(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """cuBLAS multiplies int8 where sizes are multiples of 8 and the batch is above 16: zeros fill up the rest."""
    (batch, k), rows = x.shape, len(weight)
    x = pad(x, (0, -k % 8, 0, max(24, -(-batch // 8) * 8) - batch))
    weight = pad(weight, (0, -k % 8, 0, -rows % 8)).contiguous()
    out.copy_(torch._int_mm(x.contiguous(), weight.t())[:batch, :rows])


def integer_conv(
    out: Tensor, levels: Tensor, top: Tensor, weight: Tensor, factor: Tensor, bias: Tensor | None, window: Window
) -> None:
    """Windows of levels, fp32, laid out and multiplied as int8, less 128 where the `top` level is above 127."""
    offset = torch.where(top > 127, 128, 0)  # a tensor: nothing waits for the device

    def multiply(windows: Tensor, rows: Tensor) -> Tensor:
        sums = torch.empty(len(windows), len(rows), dtype=torch.int32, device=windows.device)
        integer_linear(sums, (windows - offset).to(torch.int8), rows)
        return sums + offset * rows.sum(1, dtype=torch.int64)

    out.copy_(reference.convolve_levels(levels, weight, factor, bias, window, multiply))
