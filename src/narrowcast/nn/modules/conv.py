"""Convolutions whose weights are encoded rows.

The weight of a convolution, [out, in / groups, *kernel], has a row for every output. Each forward pass decodes it to
x's dtype and then convolves: less memory at rest, the same arithmetic. Every option of torch's modules is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.nn.modules.base import OneWeight
from narrowcast.nn.modules.linear import as_float_input


class Convolution(OneWeight):
    """What convolutions share."""

    convolve: ClassVar[Callable[..., Tensor]]
    bias: nn.Parameter | None
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    _reversed_padding_repeated_twice: list[int]

    def forward(self, input: Tensor) -> Tensor:
        return self.convolved(as_float_input(input, "Pass input.float()."), self.bias)

    def convolved(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x convolved with the decoded weight, in x's dtype."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * len(self.kernel_size)
        bias = None if bias is None else bias.to(x.dtype)
        weight = self.decoded(x.dtype)
        return type(self).convolve(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class Conv1d(Convolution):
    """torch.nn.Conv1d on encoded rows."""

    float_class = nn.Conv1d
    convolve = F.conv1d


class Conv2d(Convolution):
    """torch.nn.Conv2d on encoded rows."""

    float_class = nn.Conv2d
    convolve = F.conv2d


class Conv3d(Convolution):
    """torch.nn.Conv3d on encoded rows."""

    float_class = nn.Conv3d
    convolve = F.conv3d
