"""Where the windows of a convolution lie, and the order in which kernels read its weights.

An integer convolution reads four channels of a pixel at a time, as one word. So its weights [outputs, channels, y, x]
lie as [outputs, words, y, x, 4], with zeros behind the last channel. A convolution of one dimension has the height 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

LONGEST = (2**31 - 1) // (255 * 128)
"""The elements of a window, channels included, up to which every sum of levels times weights fits into an int32."""


class Window(NamedTuple):
    """Strides, dilations, zeros around the input, and groups: nine integers, in the order that operators take them."""

    stride_y: int
    stride_x: int
    dilation_y: int
    dilation_x: int
    left: int
    right: int
    top: int
    bottom: int
    groups: int

    def outputs(self, height: int, width: int, kernel: Sequence[int]) -> tuple[int, int]:
        """The height and width of the output, for those of the input and a kernel [y, x]."""
        down = height + self.top + self.bottom - self.dilation_y * (kernel[0] - 1) - 1
        across = width + self.left + self.right - self.dilation_x * (kernel[1] - 1) - 1
        return down // self.stride_y + 1, across // self.stride_x + 1


def to_words(weight: Tensor) -> Tensor:
    """Weights [outputs, channels, y, x] as [outputs, words, y, x, 4]."""
    filled = pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % 4))
    outputs, channels, *size = filled.shape
    return filled.view(outputs, channels // 4, 4, *size).movedim(2, -1).contiguous()


def from_words(words: Tensor, channels: int) -> Tensor:
    """The inverse of `to_words`."""
    return words.movedim(-1, 2).flatten(1, 2)[:, :channels]
